"""What an engine says of itself over HTTP, written by the plug-in and read by clients: JSON of these structs.

Unknown fields are ignored, so that a client of one release understands an engine of the next.
"""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import msgspec

from pulse_rl.errors import EngineError, PulseError, StoreError, VersionNotFoundError, one_line, printable

BUSY = "Busy"  # the kind of failure of a call that came while the engine was at work for another one
ROUTES = "/v1/pulse"  # below /v1, which an engine's API key guards
VERBS = ("state", "follow", "stage", "apply", "verify", "resume")  # what an engine is asked for
PauseMode: TypeAlias = Literal["keep", "wait", "abort"]
Phase: TypeAlias = Literal["idle", "working", "staged"]
During: TypeAlias = Literal["follow", "stage", "apply", "verify"]

LONGEST = 2000  # characters of a message


class Follow(msgspec.Struct, frozen=True, omit_defaults=True):
    """Which history an engine follows, and how it opens it.

    Attributes:
        store: The store's URL, as the engine reaches it.
        cache: A directory on the engine's host, where all its processes keep what one has downloaded; None: no cache.
        public_key: The path of a PEM file on the engine's host: what it did not sign is refused. None: not looked at.
        heartbeat: The id under which the engine writes heartbeats to the store, for `pulse-rl status`; None: none.
        patience: Seconds for which a failure of the store that may pass is tried again.
        view: The view of the history, as "fp8"; None: the weights as they were published.
    """

    store: str
    cache: str | None = None
    public_key: str | None = None
    heartbeat: str | None = None
    patience: float = 30.0
    view: str | None = None


class Failure(msgspec.Struct, frozen=True):
    """What went wrong in an engine.

    Attributes:
        during: What the engine did: "follow" (open the history and find the weights), "stage", "apply" or "verify".
        kind: The class of the error, as "IntegrityError".
        message: What it says.
        temporary: Whether it may pass by itself, as an outage of the store does.
        fields: The error's fields that JSON can hold.
    """

    during: During
    kind: str
    message: str
    temporary: bool = False
    fields: dict[str, Any] = {}


def failure_of(during: During, error: BaseException) -> Failure:
    """The failure that an error is."""
    found = vars(error) if isinstance(error, PulseError) else {}
    plain = {name: value for name, value in found.items() if _is_plain(value)}
    temporary = isinstance(error, StoreError) and error.temporary
    return Failure(during, type(error).__name__, one_line(error, LONGEST), temporary, plain)


def not_staged(version: int | None, found: int | None) -> VersionNotFoundError:
    """The error of an apply of a version, or of any for None, where another one or none is staged."""
    expected = "a version" if version is None else f"version {version}"
    staged = "nothing" if found is None else f"version {found}"
    return VersionNotFoundError(f"expected {expected} to be staged, found {staged}: stage it", version=version)


class Prepared(msgspec.Struct, frozen=True):
    """A version that is staged, and what that took.

    Attributes:
        version: The version.
        digest: Its digest, 16 hex digits.
        route: "none" (it is held already), "patches" or "anchor".
        nbytes: Bytes held until it is applied, in all ranks together.
        changes: Elements that its patches change.
        fetched_nbytes: Bytes read from the store, by all ranks together.
        stage_s: Seconds of staging, the slowest rank's.
    """

    version: int
    digest: str
    route: Literal["none", "patches", "anchor"]
    nbytes: int
    changes: int
    fetched_nbytes: int
    stage_s: float


class Mapped(msgspec.Struct, frozen=True):
    """How the engine's memory was found to hold the published tensors.

    Attributes:
        tensors: Published tensors that are followed in place, on rank 0.
        ignored: Published tensors that the engine does not load, as tied ones.
        seconds: What finding and proving the map took, the slowest rank's.
    """

    tensors: int
    ignored: tuple[str, ...]
    seconds: float


class EngineState(msgspec.Struct, frozen=True):
    """What an engine holds, and what it does.

    Attributes:
        instance: A random id of this start of the engine: after a restart it is another one.
        model: The model that the engine was started with.
        follow: Which history it follows, whose `version` it holds; None before it has opened the first.
        pending: What it was asked to follow and has not opened yet, or could not: then `failure` says why, it goes on
            with the version that it holds, and the next `stage` tries again. None where it follows what was asked.
        version: The version that its live weights are proved to hold, on all ranks of all replicas; None where that is
            not known, or they differ.
        digest: The digest of that version, 16 hex digits.
        ready: Whether it has been brought to a version since it was started, holds one, and is not paused: a load
            balancer may send it requests.
        paused: Whether generation is paused.
        weight_version: The version that it reports in its own way, as vLLM in /weight_info and in responses.
        phase: "working" while it opens, maps, stages or counts, "staged", or "idle".
        prepared: What is staged; None if nothing is.
        mapping: How the weights are followed; None before the map was found.
        failure: What went wrong last; None after a success.
        ranks: Processes that hold weights: the ranks of all replicas.
    """

    instance: str
    model: str
    follow: Follow | None = None
    pending: Follow | None = None
    version: int | None = None
    digest: str | None = None
    ready: bool = False
    paused: bool = False
    weight_version: str = ""
    phase: Phase = "idle"
    prepared: Prepared | None = None
    mapping: Mapped | None = None
    failure: Failure | None = None
    ranks: int = 1


class EngineReport(msgspec.Struct, frozen=True):
    """What it took to bring an engine to a version.

    Attributes:
        version: The version that the engine is now proved to hold.
        previous: The version before; None if that was not known.
        digest: Its digest, 16 hex digits.
        route: "none" (it was held already), "patches" or "anchor".
        changes: Elements that its patches changed.
        fetched_nbytes: Bytes read from the store.
        stage_s: Seconds of staging, while requests were generated.
        drain_s: Seconds until the engine had paused: of the step under way, or with "wait" of all running requests.
        apply_s: Seconds of writing, the scatter alone, and of rebuilding what the engine derives from the weights.
        pause_s: Seconds for which no request was generated: from the end of `drain_s` until the engine went on; 0
            where nothing had to be written.
        pause: How running requests were treated: "keep", "wait" or "abort".
        reset_caches: Whether cached keys and values were dropped.
    """

    version: int
    previous: int | None
    digest: str
    route: Literal["none", "patches", "anchor"]
    changes: int
    fetched_nbytes: int
    stage_s: float
    drain_s: float
    apply_s: float
    pause_s: float
    pause: PauseMode
    reset_caches: bool


class ErrorBody(msgspec.Struct, frozen=True):
    """The body of an answer that is no success.

    Attributes:
        failure: What went wrong.
        state: What the engine holds after it.
    """

    failure: Failure
    state: EngineState


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


def method(verb: str) -> str:
    """The HTTP method of a verb's route."""
    return "GET" if verb == "state" else "POST"


def _is_plain(value: object) -> bool:
    """Whether JSON can hold it."""
    if isinstance(value, (list, tuple)):
        return all(_is_plain(item) for item in value)
    return value is None or isinstance(value, (str, int, float, bool))
