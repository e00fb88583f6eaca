"""follow: keep engines at the newest version of a store."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pulse_rl.cli import output
from pulse_rl.cli.metrics import Metrics, Track, exporting, tracking
from pulse_rl.cli.output import AsJson
from pulse_rl.cli.stores import CLEAR, StoreTarget
from pulse_rl.errors import printable
from pulse_rl.units import nbytes, seconds

if TYPE_CHECKING:
    from pulse_rl import History
    from pulse_rl.engines.client import EngineClient
    from pulse_rl.engines.follow import Driver, Followed, Follower, Manner
    from pulse_rl.engines.states import Follow

_SGLANG = "sglang+"  # before the address of an SGLang server
_BLINK_S = 0.5  # between two looks whether Ctrl-C was pressed
_AT_WORK = ("opening", "staging", "applying")


class Pause(StrEnum):
    """What happens to running requests."""

    keep = "keep"
    wait = "wait"
    abort = "abort"


def follow(
    store: StoreTarget,
    engine: Annotated[
        list[str],
        typer.Option(
            metavar="URL",
            help="An engine, as http://host:8000, or sglang+http://host:30000; give it once for each.",
            show_default=False,
        ),
    ],
    pause: Annotated[
        Pause,
        typer.Option(help="Running requests: keep freezes and continues them, wait lets them end, abort ends them."),
    ] = Pause.keep,
    keep_caches: Annotated[
        bool,
        typer.Option("--keep-caches", help="Keep cached keys and values that old weights have made; a mixture."),
    ] = False,
    cache: Annotated[
        str | None,
        typer.Option(
            metavar="DIR", help="On the engines' hosts: download once per host, to this directory.", show_default=False
        ),
    ] = None,
    engine_store: Annotated[
        str | None,
        typer.Option(metavar="URL", help="The store as the engines reach it, where that differs.", show_default=False),
    ] = None,
    public_key: Annotated[
        str | None,
        typer.Option(
            metavar="PEM",
            help="Ed25519 public key that every manifest must be signed by; the same path here and on the engines.",
            show_default=False,
        ),
    ] = None,
    view: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="The view that engines follow: those that were started on it.", show_default=False
        ),
    ] = None,
    heartbeat: Annotated[
        bool, typer.Option("--heartbeat", help="Engines write what they hold to the store, for `pulse-rl status`.")
    ] = False,
    poll: Annotated[float, typer.Option(min=0.05, metavar="SECONDS", help="How often to look for versions.")] = 1.0,
    once: Annotated[
        bool, typer.Option("--once", help="End when every engine is at the newest version; exit code 1 if not.")
    ] = False,
    timeout: Annotated[
        float, typer.Option(min=0, metavar="SECONDS", help="How long --once waits for the engines.")
    ] = 600.0,
    api_key: Annotated[
        str | None,
        typer.Option(metavar="KEY", help="The engines' API key.", envvar="VLLM_API_KEY", show_default=False),
    ] = None,
    metrics: Metrics = None,
    track: Track = None,
    as_json: AsJson = False,
) -> None:
    """Keep any number of engines at the newest version, and show what they hold.

    Engines fetch and prove a version while they generate, and pause for the
    write alone. Engines that are started again, or that were not there yet,
    are brought to the newest version when they answer. This command keeps
    nothing: stop it with Ctrl-C and start it again whenever you like.

    Each engine is vLLM with pulse-rl beside it, started with VLLM_PLUGINS=pulse
    and --weight-transfer-config '{"backend":"pulse"}'; or SGLang, started with
    --custom-weight-loader pulse_rl.integrations.sglang.load, whose address is
    given with sglang+ before it. Looks at SGLang pause it for milliseconds.

    With --json, stdout gets one JSON document per change, each on a line; with
    --once too, one document at the end.

    Example: pulse-rl follow s3://bucket/run-a --engine http://gpu-1:8000
    """
    from pulse_rl.engines.client import absolute
    from pulse_rl.engines.follow import Manner
    from pulse_rl.engines.states import Follow
    from pulse_rl.watch.measurements import run_name

    history, place = open_history(store, public_key, view)
    wanted = Follow(
        store=absolute(engine_store or place),
        cache=cache,
        public_key=public_key,
        heartbeat="*" if heartbeat else None,
        view=view,
    )
    manner = Manner(pause=pause.value, reset_caches=not keep_caches, poll=poll)
    with output.checking():
        engines = [_client(url, api_key, pause) for url in engine]
    drive(
        history,
        wanted,
        engines,
        manner,
        once=once,
        timeout=timeout,
        metrics=metrics,
        track=track,
        as_json=as_json,
        run=run_name(history.store.url),  # however the engines reach it
    )


def drive(
    history: History,
    wanted: Follow,
    engines: Sequence[Follower],
    manner: Manner,
    *,
    once: bool,
    timeout: float,
    metrics: str | None,
    track: str | None,
    as_json: bool,
    run: str | None,
) -> None:
    """Keep engines at the newest version until Ctrl-C, and show how they stand. The options are those of `follow`.

    run: as of `exporting`.
    """
    from pulse_rl.engines.follow import Driver
    from pulse_rl.watch.measurements import run_name
    from pulse_rl.watch.trackers import UNUSUAL

    show = _Show(as_json=as_json, once=once)
    with output.checking():
        driver = Driver(history, wanted, engines, manner=manner, notice=lambda seen: show.change(driver, seen))
    current = False
    name = UNUSUAL.sub("_", run_name(history.store.url)).strip("/")
    tracked = tracking(track, name, Path("runs") / "follow")
    with exporting(metrics, run=run), tracked:
        driver.start()
        try:
            deadline = time.monotonic() + timeout
            while not (once and (current or time.monotonic() >= deadline)):
                if once:
                    current = driver.wait_until_current(min(_BLINK_S, max(0.0, deadline - time.monotonic())))
                else:
                    time.sleep(_BLINK_S)
                show.store(driver)
                show.at_work(driver)
        except KeyboardInterrupt:
            if once:
                raise
        finally:
            driver.stop()
    if once:
        show.end(driver)
        raise typer.Exit(0 if current else 1)


def _client(url: str, api_key: str | None, pause: Pause) -> EngineClient:
    if not url.startswith(_SGLANG):
        from pulse_rl.engines.client import EngineClient

        return EngineClient(url, api_key=api_key)
    from pulse_rl.integrations.sglang import SGLangEngine

    if pause is Pause.wait:
        raise ValueError(f"{printable(url)}: SGLang cannot wait for requests: give --pause keep or --pause abort")
    return SGLangEngine(url.removeprefix(_SGLANG), api_key=api_key)


def open_history(store: str, public_key: str | None, view: str | None = None) -> tuple[History, str]:
    """The history, which may not have begun yet, and its store."""
    from pulse_rl import History
    from pulse_rl.history.operate.targets import kind_of

    try:
        kind, place = kind_of(store)
    except FileNotFoundError as error:
        typer.echo(f"{printable(str(error))}: correct the address, or publish a first version there", err=True)
        place = store
    else:
        if kind != "store":
            raise ValueError(f"{store}: expected a store or the directory of a run, found a {kind}")
    return History(place, public_key=public_key, patience=0, view=view), place


class _Show:
    """Shows how engines stand: a table in a terminal, else a line for each change; or JSON. With --once, at the end."""

    def __init__(self, *, as_json: bool, once: bool) -> None:
        self._as_json, self._once = as_json, once
        self._lock = threading.Lock()
        self._table = sys.stdout.isatty() and not as_json
        self._changed: dict[str, float] = {}  # when each engine's standing did last
        self._errors: dict[str, str] = {}  # of each engine, the last one that was shown with --once
        self._store_error: str | None = None  # the last one that was shown
        self._next = 0.0  # when to say again who is at work

    def change(self, driver: Driver, seen: Followed) -> None:
        """Show a change. Threads call it."""
        with self._lock:
            self._changed[seen.engine] = time.monotonic()
            if self._table:
                output.write(CLEAR)
                _table(driver.engines())
            elif self._once:  # stdout is for the end, which a lasting error keeps away until the timeout
                if seen.error is not None and seen.error != self._errors.get(seen.engine):
                    self._errors[seen.engine] = seen.error
                    typer.echo(_line(seen), err=True, nl=False)
            elif self._as_json:
                output.emit(seen)
            else:
                output.write(_line(seen))

    def store(self, driver: Driver) -> None:
        """Say on stderr what is wrong with the store, where no engine says it, as one that is away does not."""
        error = driver.store_error
        if error not in (self._store_error, None, *(seen.error for seen in driver.engines())):
            typer.echo(printable(f"follow: the store: {error}"), err=True)
        self._store_error = error

    def at_work(self, driver: Driver) -> None:
        """Say on stderr, every ten seconds, which engines have been at work for so long. A table shows them."""
        if self._table or time.monotonic() < self._next:
            return
        self._next = time.monotonic() + output.LINE_S
        for seen in driver.engines():
            spent = time.monotonic() - self._changed.get(seen.engine, float("inf"))
            if seen.standing in _AT_WORK and spent >= output.LINE_S:
                version = "" if seen.newest is None else f" version {seen.newest}"
                text = f"follow: {seen.engine} is {seen.standing}{version}, for {seconds(spent)}"
                typer.echo(printable(text), err=True)

    def end(self, driver: Driver) -> None:
        """Show how all stand at last."""
        engines = driver.engines()
        if self._as_json:
            output.emit({"newest": driver.newest, "store_error": driver.store_error, "engines": engines})
        elif not self._table:
            _table(engines)


def _line(seen: Followed) -> str:
    clock = time.strftime("%H:%M:%S", time.localtime(seen.time))
    version = "nothing proved" if seen.version is None else f"version {seen.version}"
    if seen.newest not in (None, seen.version):
        version += f" → {seen.newest}"
    text = f"{clock}  {seen.engine}  {seen.standing}  {version}"
    if seen.standing == "ok" and seen.report is not None and seen.report.version == seen.version:
        report = seen.report
        text += f"  read {nbytes(report.fetched_nbytes)}, staged {seconds(report.stage_s)}"
        text += f", paused {seconds(report.pause_s)}"
    return printable(f"{text}  {seen.error}" if seen.error else text) + "\n"


def _table(engines: list[Followed]) -> None:
    columns = ["engine", "standing", "version", "newest", "updates", "restarts", "read", "staged", "paused", "error"]
    rows = []
    for seen in engines:
        report = seen.report
        took = (nbytes(report.fetched_nbytes), seconds(report.stage_s), seconds(report.pause_s)) if report else "–––"
        numbers = ("–" if number is None else number for number in (seen.version, seen.newest))
        rows.append((seen.engine, seen.standing, *numbers, seen.updates, seen.restarts, *took, seen.error or "–"))
    output.table(columns, rows)
