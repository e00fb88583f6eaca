"""What came of an update of an engine, as its callers get it: a report, or an error."""

from __future__ import annotations

from pulse_rl.engines.states import LONGEST, EngineReport, EngineState, Failure, PauseMode, Prepared
from pulse_rl.errors import EngineError, printable


def report(
    staged: Prepared,
    previous: int | None,
    *,
    drain_s: float,
    apply_s: float,
    pause_s: float,
    pause: PauseMode,
    reset_caches: bool,
) -> EngineReport:
    """The report of a version that was staged and is applied. previous: the version before."""
    return EngineReport(
        version=staged.version,
        previous=previous,
        digest=staged.digest,
        route=staged.route,
        changes=staged.changes,
        fetched_nbytes=staged.fetched_nbytes,
        stage_s=staged.stage_s,
        drain_s=drain_s,
        apply_s=apply_s,
        pause_s=pause_s,
        pause=pause,
        reset_caches=reset_caches,
    )


def staged_for(version: int | None, prepared: Prepared | None) -> Prepared | Failure:
    """What is staged, if it is that version; None for whichever is."""
    if prepared is not None and version in (None, prepared.version):
        return prepared
    found = "nothing" if prepared is None else f"version {prepared.version}"
    wanted = "a version" if version is None else f"version {version}"
    message = f"expected {wanted} to be staged, found {found}: stage it"
    return Failure("apply", "VersionNotFoundError", message, fields={"version": version})


def check_holds(
    url: str, found: EngineState | EngineReport, version: int | None, digest: str | None, during: str
) -> None:
    """Raise EngineError if an engine does not hold this version of the history, whatever number it says."""
    if (found.version, found.digest) != (version, digest):
        raise EngineError(
            f"{url}: expected version {version} of digest {digest}, as the history has it, found version "
            f"{found.version} of digest {printable(str(found.digest))}: it follows another history",
            url=url,
            during=during,
            kind="IntegrityError",
            version=found.version,
        )


def failed(failure: Failure, state: EngineState, url: str | None = None, status: int | None = None) -> EngineError:
    """The error for what went wrong in an engine. state: what it holds after that. url: None in this process."""
    where = "" if url is None else f"{url}: "
    holds = f"it holds version {state.version}" if state.version is not None else "no version of it is proved"
    then = ", and stays paused until an update succeeds" if state.paused else ""
    said = printable(f"{failure.kind[:100]}: {failure.message[:LONGEST]}")  # an engine's words
    return EngineError(
        f"{where}{failure.during} failed: {said} ({holds}{then})",
        url=url,
        during=failure.during,
        kind=failure.kind,
        status=status,
        temporary=failure.temporary,
        version=state.version,
        paused=state.paused,
        fields=failure.fields,
    )
