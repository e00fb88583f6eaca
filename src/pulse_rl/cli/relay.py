"""relay: publish the versions of a store on to another one, with quantised views of them."""

from __future__ import annotations

from typing import Annotated

import typer

from pulse_rl.cli import output
from pulse_rl.cli.follow import drive, open_history
from pulse_rl.cli.metrics import Metrics, Track
from pulse_rl.cli.output import AsJson, PublicKeyFile
from pulse_rl.cli.stores import Grace, KeepEvery, StoreTarget


def relay(
    source: StoreTarget,
    target: Annotated[
        str, typer.Argument(metavar="DST", help="The store here: empty, or of an earlier relay.", show_default=False)
    ],
    view: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=FORM",
            help="A view to make, as in Python: \"fp8=Fp8(block='channel', rule='vllm')\"; give it once for each.",
            show_default=False,
        ),
    ] = None,
    retain: Annotated[
        int | None,
        typer.Option(
            min=1, help="Keep at least this many of the newest versions in DST; without it, all.", show_default=False
        ),
    ] = None,
    keep_every: KeepEvery = None,
    grace: Grace = 3600.0,
    public_key: PublicKeyFile = None,
    sign_with: Annotated[
        str | None, typer.Option(metavar="PEM", help="Ed25519 private key to sign DST by.", show_default=False)
    ] = None,
    heartbeat: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Write what is held to STORE, for `pulse-rl status`.", show_default=False),
    ] = None,
    poll: Annotated[float, typer.Option(min=0.05, metavar="SECONDS", help="How often to look for versions.")] = 1.0,
    once: Annotated[
        bool, typer.Option("--once", help="End when DST has the newest version; exit code 1 if not.")
    ] = False,
    timeout: Annotated[float, typer.Option(min=0, metavar="SECONDS", help="How long --once takes at most.")] = 3600.0,
    metrics: Metrics = None,
    track: Track = None,
    as_json: AsJson = False,
) -> None:
    """Keep a store at the newest version of another one, with quantised views made here.

    So one copy of the weights comes to a site as patches, and each kind of
    engine there follows its view from DST. Versions keep their numbers; those
    that come while it is at work on another one are passed over, but for the
    newest. Each is proved before it is published, and its digest compared
    afterwards. Stop it with Ctrl-C, or kill it, and start it again whenever you
    like: it continues from what DST holds. It holds the weights twice, and the
    codes of each view twice.

    It reports as `pulse-rl follow` does, DST being the engine.

    Example: pulse-rl relay s3://bucket/run-a /site/run-a --view "fp8=Fp8()"
    """
    from pulse_rl.engines.client import absolute
    from pulse_rl.engines.follow import Manner
    from pulse_rl.engines.relay import Relay
    from pulse_rl.engines.states import Follow
    from pulse_rl.weights.views.view import view_of

    with output.checking():
        named = [view_of(text) for text in view or []]
        views = dict(named)
        if len(views) < len(named):
            raise ValueError(
                f"--view: expected a different name for each, found {', '.join(name for name, _ in named)}"
            )
    history, place = open_history(source, public_key)
    with output.checking():
        made = Relay(absolute(target), views, sign_with=sign_with, retain=retain, keep_every=keep_every, grace=grace)
        if made.url == history.store.url:
            raise ValueError(f"DST: expected another store than the one that is followed, found {made.url} twice")
    wanted = Follow(store=absolute(place), public_key=public_key, heartbeat=heartbeat, patience=0)
    drive(
        history,
        wanted,
        [made],
        Manner(poll=poll),
        once=once,
        timeout=timeout,
        metrics=metrics,
        track=track,
        as_json=as_json,
        run=None,  # what it reads is the source's, what it publishes is not
    )
