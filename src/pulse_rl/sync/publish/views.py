"""Views: the versions of one publisher in other precisions, each committed with its version or not at all.

A view is quantised from the baseline, which holds the version once it has moved: that needs neither the trainer's
weights nor its time. A view has its own baseline and trail, and is published as weights are. But the version's manifest
names its objects, so one commit and one signature cover all.
"""

import json
from collections.abc import Mapping
from typing import NamedTuple

from blake3 import blake3

from pulse_rl.documents import check_view_name
from pulse_rl.errors import BaseMismatchError
from pulse_rl.group.ranks import Ranks
from pulse_rl.history.anchor import read_config
from pulse_rl.history.history import History
from pulse_rl.history.manifest import Manifest
from pulse_rl.sync.publish.attempt import Attempt, VersionStart
from pulse_rl.sync.publish.delivery import Delivery, InView
from pulse_rl.sync.publish.encoding import Encoder
from pulse_rl.sync.publish.intake import Given, Request
from pulse_rl.sync.publish.line import Line
from pulse_rl.sync.publish.position import Position
from pulse_rl.sync.shares import Share, share_of
from pulse_rl.weights.boxes import Shape
from pulse_rl.weights.changes import SectionChanges
from pulse_rl.weights.layout import Layout
from pulse_rl.weights.views.formats import ViewFormat
from pulse_rl.weights.views.quantised import Quantised
from pulse_rl.weights.views.view import View

CONFIG = "config.json"


class _Codes(NamedTuple):
    """The codes and scales of one version, and the weights that they were made of."""

    quantised: Quantised
    source: Layout
    share: Share  # what this rank holds of them


class ViewLine:
    """One view of a publisher's versions.

    Of two fields one is always None: `_codes` are of the version that the view's baseline holds; while a version is on
    its way they are in `_attempt`.
    """

    def __init__(self, name: str, view: View, ranks: Ranks, history: History, codec: str, anchor_every: int) -> None:
        if not isinstance(view, View):
            raise ValueError(f"views: expected name → pulse.Fp8(…), found {name!r}: {view!r}")
        check_view_name(name)
        self.name, self._form, self._view, self._ranks = name, repr(view), view, ranks
        delivery = Delivery(history, None, ranks)
        self._line = Line(ranks, Position(delivery, ranks, "host"), Encoder(codec, ranks), delivery, anchor_every)
        self._codes: _Codes | None = None
        self._attempt: tuple[Attempt, _Codes] | None = None

    def check(self, head: Manifest | None) -> None:
        """Raise BaseMismatchError if the version before has a view of this name and another form."""
        found = head.views.get(self.name) if head is not None else None
        if head is not None and found is not None and found.form != self._form:
            raise BaseMismatchError(
                f"view {self.name!r}: expected that of version {head.version}, {found.form}, found {self._form}: give "
                "it another name"
            )

    def encode(self, version: Attempt) -> InView:
        """Quantise a version that the baseline holds, code it as the view's next, and move the view. A collective."""
        held, self._codes = self._codes, None
        fresh = held is None or held.source is not version.tensors
        codes = held if held and not fresh else self._made(version)
        before, anchored = version.start.head, version.manifest.anchor_sequence == version.manifest.sequence
        head = before.of(self.name) if before is not None else None
        token = blake3(f"{version.start.token} {self.name}".encode()).hexdigest(8)
        start = VersionStart(version.start.sequence, token, version.start.bandwidth, head, None)
        start = self._line.position.continue_from(start, codes.share, skip_rebuild=version.asks_anchor)
        known = self._ranks.do("quantise", lambda: _follow(codes, version, start, fresh=fresh))
        request = Request(None, version.manifest.version, anchored, False, None, None, None, None)
        given = Given(codes.share, self._files(version), None)
        attempt = self._line.find(start, given, request, version.clock, known)
        self._attempt = attempt, codes
        return InView(self._form, self._line.delivery, self._line.advance(attempt))

    def _made(self, version: Attempt) -> _Codes:
        def make() -> Quantised:
            ViewFormat(self._view).check_any(_shapes(version), version.plan.tied)
            return Quantised(self._view, version.tensors, whole=self._ranks.size == 1)

        quantised = self._ranks.do("look at a view", make)
        return _Codes(quantised, version.tensors, share_of(self._ranks, quantised.layout))

    def _files(self, version: Attempt) -> Mapping[str, bytes]:
        """The small files of an anchor: the version's, with a config.json that says how the weights are quantised."""
        if CONFIG not in version.assets:
            return version.assets
        form = ViewFormat(self._view).config(_shapes(version), version.plan.tied)
        config = read_config(version.assets[CONFIG], f"assets: {CONFIG}") | {"quantization_config": form}
        return {**version.assets, CONFIG: json.dumps(config, indent=2).encode()}

    def settle(self) -> None:
        """After a delivery: take the baseline and the codes back, of this version if it is committed."""
        if self._attempt is None:
            return
        (attempt, codes), self._attempt = self._attempt, None
        if self._line.settle(attempt):
            self._codes = codes


def _shapes(version: Attempt) -> dict[str, Shape]:
    return {name: spec.shape for name, spec in version.plan.tensors.items()}


def _follow(codes: _Codes, version: Attempt, start: VersionStart, *, fresh: bool) -> list[SectionChanges] | None:
    """Bring codes up to a version. Returns what they held before that may have changed; None if it is not known."""
    replaced = version.new.replaced
    if fresh and start.base is not None:
        codes.quantised.go_on(start.base.tensors)
    if fresh or replaced is None:
        codes.quantised.look()
        return None
    return codes.quantised.follow(replaced.sections())
