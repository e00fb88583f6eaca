"""What a trainer gives to be published: checked, viewed as bits, and agreed on with the other ranks.

Nothing here knows what was published before.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from pulse_rl.errors import IntegrityError
from pulse_rl.group.agreement import require_same
from pulse_rl.group.collectives import default_place
from pulse_rl.group.ranks import Ranks
from pulse_rl.history.anchor import check_assets, model_config
from pulse_rl.history.manifest import Scalar
from pulse_rl.history.restore import no_room
from pulse_rl.logs import logger
from pulse_rl.patch import format as patch_format
from pulse_rl.sync.publish.successor import check_metadata
from pulse_rl.sync.replicas import unequal_copies
from pulse_rl.sync.share_plan import SharePlan
from pulse_rl.sync.shares import Share, layout_fingerprint, share_of
from pulse_rl.weights import streamed
from pulse_rl.weights.bits import Bits
from pulse_rl.weights.casts import cast_name
from pulse_rl.weights.kept import Kept
from pulse_rl.weights.layout import Layout
from pulse_rl.weights.names import refuse_adapters

if TYPE_CHECKING:
    import torch

log = logger(__name__)

_ALONE = (
    "rank %d of %d publishes by itself: its Publisher was made without a group, before init_process_group was called "
    "(until then torch.distributed.group.WORLD is None): give group='world' on all ranks, or publish on rank 0 alone"
)
_UNCHANGED = "nothing was published"


class Request(NamedTuple):
    """The arguments of one `publish`, as they were given."""

    weights: Any
    version: int | None
    anchor: bool
    background: bool
    cast: str | torch.dtype | None
    assets: Mapping[str, bytes] | None
    metadata: Mapping[str, Any] | None
    like: Any


class Given(NamedTuple):
    """What is to be published."""

    share: Share  # what this rank holds
    files: Mapping[str, bytes]  # to put with an anchor
    metadata: dict[str, Scalar] | None


class _Asked(msgspec.Struct, array_like=True):
    """What one rank was asked to publish, and how."""

    version: int | None
    anchor: bool
    background: bool
    settings: str
    fingerprint: bytes  # of what the rank holds (`layout_fingerprint`); empty of one process alone


class Intake:
    """Takes the weights of one publisher in.

    cast: the dtype that floating-point tensors are published in; None for their own. tied: as of `Publisher`.
    settings: what else must be the same on all ranks. warn: whether to warn of ranks that publish alone. Raises
    ValueError for ties or a cast that make no sense.
    """

    def __init__(
        self, ranks: Ranks, cast: str | torch.dtype | None, tied: Mapping[str, str] | None, settings: str, *, warn: bool
    ) -> None:
        self._ranks = ranks
        self._cast = None if cast is None else cast_name(cast)
        self._tied = _check_ties(tied)
        self._settings = settings + (f", tied={self._tied}" if tied else "")
        self._warn = warn
        self._kept = Kept()
        self._plan: SharePlan | None = None  # who owns what, as it was agreed last

    def take(self, request: Request, prepare: Callable[[], object]) -> Given:
        """Check what this rank was given, and agree with the others that it fits theirs. A collective.

        prepare: runs first, in the same step.
        """

        def check() -> tuple[tuple[Layout, Mapping[str, bytes], dict[str, Scalar] | None], _Asked]:
            prepare()
            if request.version is not None:
                patch_format.check_version("version", request.version)
            noted = check_metadata(request.metadata)
            if self._warn and (place := default_place()) is not None and place.rank:
                self._warn = False
                log.warning(_ALONE, place.rank, place.size)
            kind, assets = self._kind(request), request.assets or {}
            check_assets(assets)
            refuse_adapters(request.weights)
            files = {**model_config(request.weights if request.like is None else request.like, kind), **assets}
            tensors = self._kept.layout(request.weights, cast=kind)
            mine = layout_fingerprint(tensors, self._plan) if self._ranks.size > 1 else b""
            asked = _Asked(request.version, request.anchor, request.background, f"cast={kind}, {self._settings}", mine)
            return (tensors, files, noted), asked

        (tensors, files, noted), asked = self._ranks.do_and_share("check the weights", check, _Asked)
        options = ("version", "anchor", "background", "settings")
        require_same("publish", [{name: getattr(one, name) for name in options} for one in asked], _UNCHANGED)
        prints = [one.fingerprint for one in asked] if self._ranks.size > 1 else None
        share = share_of(self._ranks, tensors, self._plan, prints)
        self._plan = share.plan
        if not share.plan.tensors:  # such a history would refuse the real model ever after; one rank's may be empty
            raise ValueError(
                "weights: expected at least one tensor, found none: give the model, its state dict, or a mapping of "
                "name → tensor"
            )
        return Given(without_copies(self._ranks, share, self._tied), files, noted)

    def spool(self, request: Request, files: ExitStack) -> Request:
        """Keep the bits of a stream of tensors in a file. A collective. Returns the request with these as weights.

        files: as of `streamed.keep`.
        """

        def read() -> Mapping[str, Bits]:
            try:
                return streamed.keep(request.weights, self._kind(request), files)
            except OSError as error:
                raise no_room(error) from error

        return request._replace(weights=self._ranks.do("read the weights", read))

    def _kind(self, request: Request) -> str | None:
        return self._cast if request.cast is None else cast_name(request.cast)


def _check_ties(tied: Mapping[str, str] | None) -> dict[str, str]:
    """The argument `tied` of a Publisher. Raises ValueError."""
    found = dict(tied or {})
    for alias, owner in found.items():
        if not isinstance(alias, str) or not isinstance(owner, str) or owner in found:
            raise ValueError(
                "tied: expected further name → the name that stands for it, which is no further name itself, found "
                f"{alias!r}: {owner!r}"
            )
    return found


def without_copies(ranks: Ranks, share: Share, tied: Mapping[str, str]) -> Share:
    """The same share without the copies of tensors that are to be published once. A collective.

    tied: the copies → the tensors that they equal. One of both may be absent. Raises ValueError, and IntegrityError for
    copies that differ.
    """
    if not tied:
        return share
    share = share.called(None, tied)
    specs, ties = share.plan.tensors, share.plan.tied
    copies = {alias: owner for alias, owner in tied.items() if alias in specs}
    for alias, owner in tied.items():
        one, other = (specs.get(ties.get(name, name)) for name in (alias, owner))
        if one is None or other is None or (one.dtype, one.shape) != (other.dtype, other.shape):
            raise ValueError(
                f"tied: expected {alias!r} and {owner!r} with one dtype and shape, found "
                + " and ".join(f"{spec.dtype} {list(spec.shape)}" if spec else "none" for spec in (one, other))
            )
        if alias in ties and ties[alias] != ties.get(owner, owner):
            raise ValueError(f"tied: expected {alias!r} tied to {owner!r}, found it tied to {ties[alias]!r}")
    for alias in unequal_copies(ranks, share.held, copies):
        raise IntegrityError(
            f"tensor {alias!r}: expected the bits of {copies[alias]!r}, which it is tied to by tied=…, found other "
            "ones: give equal tensors, or a Publisher without tied=… and a new store; nothing was published",
            name=alias,
        )
    return share.without(copies)
