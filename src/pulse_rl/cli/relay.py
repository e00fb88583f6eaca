"""relay: publish the versions of a store on to another one, with quantised views of them."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING, Annotated

import typer

from pulse_rl.cli import output
from pulse_rl.cli.follow import drive, open_history
from pulse_rl.cli.metrics import Metrics, Track
from pulse_rl.cli.output import AsJson, PublicKeyFile
from pulse_rl.cli.stores import StoreTarget

if TYPE_CHECKING:
    from pulse_rl import Fp4, Fp8, Int8


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

    with output.checking():
        views = dict(map(_view, view or []))
    history, place = open_history(source, public_key)
    with output.checking():
        made = Relay(absolute(target), views, sign_with=sign_with)
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
    )


def _view(text: str) -> tuple[str, Fp4 | Fp8 | Int8]:
    """A view by its name, from text as "fp8=Fp8(block='channel', rule='vllm')". Raises ValueError."""
    import pulse_rl

    name, _, form = text.partition("=")
    kinds = {kind.__name__: kind for kind in (pulse_rl.Fp8, pulse_rl.Fp4, pulse_rl.Int8)}
    try:
        call = ast.parse(form.strip().removeprefix("pulse."), mode="eval").body
        if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and not call.args):
            raise SyntaxError
        if (kind := kinds.get(call.func.id)) is None:
            raise ValueError(f"expected one of {', '.join(kinds)}, found {call.func.id!r}")
        return name, kind(**{str(each.arg): ast.literal_eval(each.value) for each in call.keywords})
    except SyntaxError:
        raise ValueError(f"--view: expected NAME=FORM with settings by name, as fp8=Fp8(), found {text!r}") from None
    except (TypeError, ValueError) as error:
        raise ValueError(f"--view {text}: {error}") from None
