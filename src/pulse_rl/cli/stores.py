"""status and prune: an operator's commands for a store."""

from __future__ import annotations

import sys
import threading
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pulse_rl.cli import output
from pulse_rl.cli.metrics import address
from pulse_rl.cli.output import AsJson, PublicKeyFile
from pulse_rl.errors import printable
from pulse_rl.units import count, nbytes

if TYPE_CHECKING:
    from pulse_rl import History, Status
    from pulse_rl.history.operate.prune import Pruning
    from pulse_rl.history.operate.status import Objects
    from pulse_rl.history.operate.subscribers import SubscriberInfo
    from pulse_rl.watch.alarms import Alarm

OK, PROBLEM, UNREADABLE = 0, 1, 2  # exit codes of `status`, for monitors
CLEAR = "\x1b[H\x1b[2J"

StoreTarget = Annotated[
    str,
    typer.Argument(
        metavar="STORE",
        help="A store (directory or URL), or the directory of a run.",
        show_default=False,
        callback=output.resolved,
    ),
]

KeepEvery = Annotated[
    int | None,
    typer.Option(
        min=1, help="Of older versions, keep every N-th anchor permanently; without it, none.", show_default=False
    ),
]
Grace = Annotated[
    float,
    typer.Option(
        min=0,
        metavar="SECONDS",
        help="Keep what was among the newest --retain versions less than this long ago: readers may be using it.",
    ),
]


def status(
    store: StoreTarget,
    max_lag: Annotated[
        int | None,
        typer.Option(
            min=0, help="How many versions a subscriber may be behind; without it, any number.", show_default=False
        ),
    ] = None,
    max_silence: Annotated[
        float, typer.Option(min=0, metavar="SECONDS", help="How long a subscriber may write no heartbeat.")
    ] = 300.0,
    expire: Annotated[
        float, typer.Option(min=0, metavar="SECONDS", help="Leave out subscribers that were silent this long.")
    ] = 86400.0,
    watch: Annotated[
        float | None,
        typer.Option(min=0.1, metavar="SECONDS", help="Look again and again, until Ctrl-C.", show_default=False),
    ] = None,
    serve: Annotated[
        str | None,
        typer.Option(
            metavar="[HOST:]PORT",
            help="Show nothing; serve the store's metrics to Prometheus, on 127.0.0.1 where no host is given.",
            show_default=False,
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show a store's versions, sizes, reductions and anchors, and its subscribers.

    Each subscriber gets a verdict: ok, behind (--max-lag), failing (its last
    sync), silent (--max-silence) or damaged (its heartbeat). The store's is
    damaged where something is wrong at a glance (as an anchor or a patch that
    is missing on the way to the newest version), otherwise its subscribers'
    worst. Alarms say what else deserves a look: weights that are NaN, no new
    version for longer than usual, a density that jumps, an anchor that is
    overdue. Exit code: 0 all ok, 1 not, an alarm or no version yet, 2 no store
    can be read there, as after a slip in its URL.

    Reads listings, the newest version's manifest and trail, and the heartbeats
    of subscribers that write them, as Subscriber(store, heartbeat="worker-3")
    does. It proves nothing: `pulse-rl verify` does.

    Example: pulse-rl status s3://bucket/run-a
    """
    import msgspec

    from pulse_rl import status as look
    from pulse_rl.errors import IntegrityError, PulseError, VersionNotFoundError, one_line
    from pulse_rl.watch.alarms import alarms_of_status

    if serve is not None:
        if watch is not None or as_json:
            raise typer.BadParameter("--serve: expected without --watch and --json")
        _serve(store, serve, max_lag=max_lag, max_silence=max_silence, expire=expire)
        return
    code = OK
    try:
        while True:
            try:
                info = look(store, max_lag=max_lag, max_silence=max_silence, expire=expire)
            except (PulseError, OSError, ValueError) as error:
                read = isinstance(error, (IntegrityError, VersionNotFoundError))  # it was, and this was found
                code = PROBLEM if read else UNREADABLE
                print(f"error: {one_line(error)}", file=sys.stderr)
                if isinstance(error, ValueError):
                    break  # what was given names no store, however often it is looked at
            else:
                alarms = alarms_of_status(info, max_lag=max_lag)
                code = OK if info.verdict == "ok" and not alarms else PROBLEM
                if as_json:
                    output.emit(msgspec.structs.asdict(info) | {"alarms": alarms})
                else:
                    if watch is not None and sys.stdout.isatty():
                        output.write(CLEAR)
                    _print_status(info, alarms)
            if watch is None:
                break
            time.sleep(watch)
    except KeyboardInterrupt:
        pass
    raise typer.Exit(code)


def _serve(store: str, where: str, **limits: Any) -> None:
    """Serve metrics until Ctrl-C."""
    from pulse_rl.watch import stores

    host, port = address(where, "--serve")
    server = stores.serve(store, host, port, **limits)
    typer.echo(f"metrics: http://{host}:{server.server_port}/metrics", err=True)
    try:
        threading.Event().wait()
    except KeyboardInterrupt:
        server.shutdown()


def prune(
    store: StoreTarget,
    retain: Annotated[int, typer.Option(min=1, help="Keep at least this many of the newest versions.")],
    keep_every: KeepEvery = None,
    grace: Grace = 3600.0,
    expire: Annotated[
        float,
        typer.Option(min=0, metavar="SECONDS", help="Delete the heartbeats of subscribers that were silent this long."),
    ] = 86400.0,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Delete nothing; list what would be deleted.")] = False,
    as_json: AsJson = False,
) -> None:
    """Delete old versions of a store, and what failed publishes and interrupted prunings left.

    Among that are unfinished uploads of publishers that were killed (of a
    directory; in a bucket a lifecycle rule deletes them), and the heartbeats
    of subscribers that are gone.

    It keeps the newest versions, the anchor from which the oldest of them starts,
    and everything after it; these can be loaded at any time. Anchors that an
    earlier pruning kept permanently are kept again only with the same
    --keep-every. A publisher prunes by itself with Publisher(store, retain=…).

    Example: pulse-rl prune s3://bucket/run-a --retain 100 --keep-every 10 --dry-run
    """
    from pulse_rl.history.operate.prune import Retention, delete_planned
    from pulse_rl.history.operate.targets import open_history

    with output.checking():
        retention = Retention(retain, keep_every, grace, expire)
    history = open_history(store)
    pruning = retention.plan(history, leftovers=True)
    if not as_json:
        _print_pruning(history, pruning, dry_run)
    if not dry_run:
        with output.progress("prune") as update:
            delete_planned(history, pruning, update)
    if as_json:
        output.emit(pruning)


def copy(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SRC", help="A store (directory or URL), or the directory of a run.", callback=output.resolved
        ),
    ],
    target: Annotated[str, typer.Argument(metavar="DST", help="Another store: empty, or with an earlier copy.")],
    public_key: PublicKeyFile = None,
    as_json: AsJson = False,
) -> None:
    """Copy a history to another store, every object proved by its hash.

    An interrupted copy is continued by the same command. A directory gets the
    times of the originals, which `status` and grace periods count from; in a
    bucket they begin anew.

    Example: pulse-rl copy s3://bucket/run-a /archive/run-a
    """
    from pulse_rl import copy_history

    with output.progress("copy") as update:
        report = copy_history(source, target, public_key=public_key, progress=update)
    if as_json:
        output.emit(report)
        return
    output.facts(
        {
            "from": report.source,
            "to": report.target,
            "versions": f"{report.versions}, the newest {report.newest}",
            "copied": f"{count(report.objects, 'object')}, {nbytes(report.nbytes)}",
            "present": count(report.present, "object"),
            "times": "as in the source" if report.times_kept else "of the copy: ages and grace periods begin anew",
        }
    )


def _print_pruning(history: History, pruning: Pruning, dry_run: bool) -> None:
    kept = count(len(pruning.kept), "version")
    if pruning.kept_nbytes is not None:
        kept += f", {nbytes(pruning.kept_nbytes)}"
    if pruning.kept and pruning.kept[-1] >= pruning.first:
        kept += f": all from {_version(history, pruning.first)} on"
    permanent = [sequence for sequence in pruning.kept if sequence < pruning.first]
    if permanent:
        kept += f", and permanently {_sequences(permanent)}"
    deleted = "nothing"
    if pruning.manifests or pruning.objects or pruning.partial or pruning.heartbeats:
        deleted = f"{count(len(pruning.manifests), 'version')} and {count(len(pruning.objects), 'object')}"
        if pruning.partial:
            deleted += f", {count(len(pruning.partial), 'unfinished upload')}"
        if pruning.heartbeats:
            deleted += f", {count(len(pruning.heartbeats), 'heartbeat')}"
        deleted += f", {nbytes(pruning.nbytes)}"
    if pruning.manifests:
        deleted += f": {_sequences(pruning.manifests[::-1])}"
    output.facts({"store": pruning.url, "would delete" if dry_run else "deletes": deleted, "keeps": kept})
    if pruning.reason is not None:
        output.write(f"no version goes: {pruning.reason}\n")


def _version(history: History, sequence: int) -> str:
    """A version, and its sequence number, with which the names of its objects start."""
    from pulse_rl.errors import PulseError

    try:
        return f"version {history.read(sequence).version} (sequence number {sequence})"
    except PulseError:  # its manifest is damaged
        return f"sequence number {sequence}"


def _sequences(numbers: list[int] | tuple[int, ...]) -> str:
    """Sequence numbers as text: "sequence numbers 0, 50"."""
    if len(numbers) > 8:
        return f"sequence numbers {numbers[0]} … {numbers[-1]}"
    return f"sequence number{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"


def _print_status(info: Status, alarms: tuple[Alarm, ...]) -> None:
    now = time.time()
    lines = {"store": info.url}
    oldest = "?" if info.oldest is None else info.oldest
    written = info.listing.modified if info.listing else info.created
    clock = "" if info.listing else " by the publisher's clock"
    versions = f"{oldest} to {info.newest}" if info.versions > 1 else f"version {info.newest}"
    lines["versions"] = f"{info.versions}, {versions}, the newest {_age(now - written)} ago{clock}"
    if info.metadata:
        lines["noted of it"] = output.noted(info.metadata)
    if info.listing and info.listing.interval_s is not None:
        lines["interval"] = f"{_seconds(info.listing.interval_s)}, the median between the last versions"
    lines["model"] = f"{info.elements:,} elements, {nbytes(info.full_nbytes)}"
    if info.recent and info.recent.patches.count:
        recent = info.recent
        lines["patches"] = (
            f"{nbytes(recent.patch_nbytes)}, median of the last {recent.patches.count}, "
            f"{recent.reduction:,.1f} times smaller than the model"
        )
        if recent.skips.count:
            lines["skip patches"] = f"{_objects(recent.skips)}, among the last {recent.versions} versions"
    if info.views:
        lines["views"] = output.views(info)
    since = info.sequence - info.anchor_sequence
    lines["anchors"] = "the newest version has one" if since == 0 else f"the newest {count(since, 'version')} ago"
    if info.listing is None:
        lines["in the store"] = "unknown, like its subscribers: the store cannot be listed"
    else:
        listing = info.listing
        anchors = listing.anchor_sequences
        named = f"{len(anchors)} ({_sequences(anchors)})" if anchors else "none"
        if info.anchor_sequence not in anchors:
            lines["anchors"] = f"the one of sequence number {info.anchor_sequence}, the newest, is missing"
        lines["anchors"] = f"{named}; {lines['anchors']}"
        lines["in the store"] = ", ".join(
            f"{folder} {_objects(total)}"
            for folder, total in {
                "manifests": listing.manifests,
                "patches and skip patches": listing.patches,
                "files of anchors": listing.anchors,
                "trails": listing.trails,
            }.items()
        )
        if listing.unnamed.count:
            lines["unnamed"] = f"{_objects(listing.unnamed)} that no version names: failed or unfinished publishes"
        if listing.partial.count:
            lines["unfinished"] = f"{_objects(listing.partial)} uploads: under way, or of a publisher that was killed"
    if info.expired:
        lines["expired"] = f"{count(info.expired, 'subscriber')}, silent for too long to be shown"
    lines["verdict"] = info.verdict
    lines["signed"] = "yes" if info.signed else "no"
    if info.ended:
        lines["ended"] = f"yes, version {info.newest} is the last one"
    output.facts(lines)
    for alarm in alarms:
        output.write(f"alarm: {printable(alarm.sentence)}\n")
    for problem in info.problems:
        output.write(f"problem: {printable(problem)}\n")
    if info.subscribers:
        output.write("\n")
        output.table(
            ["subscriber", "verdict", "version", "lag", "last seen", "last sync", "fetched", "host", "last error"],
            [_row(subscriber, now) for subscriber in info.subscribers],
        )


def _row(subscriber: SubscriberInfo, now: float) -> tuple[object, ...]:
    return (
        subscriber.id,
        subscriber.verdict,
        "–" if subscriber.version is None else subscriber.version,
        "–" if subscriber.lag is None else subscriber.lag,
        f"{_age(now - subscriber.seen)} ago",
        "–" if subscriber.sync_s is None else _seconds(subscriber.sync_s),
        "–" if subscriber.fetched_nbytes is None else nbytes(subscriber.fetched_nbytes),
        "–" if subscriber.host is None else subscriber.host,
        subscriber.unreadable or subscriber.error or "–",
    )


def _objects(total: Objects) -> str:
    return f"{total.count:,} ({nbytes(total.nbytes)})"


def _seconds(seconds: float) -> str:
    return f"{seconds * 1000:.0f} ms" if seconds < 1 else f"{seconds:.3g} s" if seconds < 100 else _age(seconds)


def _age(seconds: float) -> str:
    """A past time in the largest unit that fits. The store's clock may be ahead of this machine's."""
    seconds = max(0.0, seconds)
    for unit, length in (("days", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"
