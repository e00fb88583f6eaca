"""The board: the small objects of one run, read, written and listed.

A round is committed by one put-if-absent. All that is known of who has arrived comes from one listing.
"""

from typing import NamedTuple, TypeVar

from pulse_rl.errors import IntegrityError, ObjectNotFoundError
from pulse_rl.group.collectives import RankPlace
from pulse_rl.group.ranks import TEXT_CHARACTERS
from pulse_rl.loco.meeting import names
from pulse_rl.loco.meeting.documents import FORMAT, Anchor, Commit, Document, Notice, RunDocument
from pulse_rl.log.beginning import begin_at, read_first
from pulse_rl.log.objects import create, new_token, numbered
from pulse_rl.log.sealed import read_sealed
from pulse_rl.log.signing import Keys
from pulse_rl.store.base import Store

D = TypeVar("D", bound=Document)


class Look(NamedTuple):
    """What a listing showed of a round."""

    committed: bool
    later: bool  # whether there is anything of a later round, which begins when this one is committed
    offering: frozenset[int] = frozenset()  # ranks
    stops: frozenset[str] = frozenset()  # names
    lacks: frozenset[str] = frozenset()  # names


class Board:
    """The small objects of one run in a store, as one life of a trainer reads and writes them.

    place: the trainer's rank, of how many. Methods raise StoreError, and IntegrityError for what is damaged.
    """

    def __init__(self, store: Store, keys: Keys, place: RankPlace) -> None:
        self.store = store
        self._keys = keys
        self.rank, self.size = place
        self.life = new_token()
        self.run_id = ""  # of the run that this trainer takes part in, once `joining` knows it

    def post(self, name: str, document: Document) -> bool:
        """Put a document, if absent; returns whether it is the one that is there now."""
        return create(self.store, name, self._keys.seal(document))

    def stop(self, round: int, reason: str, *, refused: bool = False, rank: int | None = None) -> None:
        """Tell the others why this trainer cannot take part. rank: whose fault it is; None for its own."""
        notice = Notice(
            run=self.run_id,
            round=round,
            rank=self.rank if rank is None else rank,
            reason=reason[:TEXT_CHARACTERS],
            refused=refused,
        )
        self.post(names.notice_name("stop", round, self.rank, self.life), notice)

    def run(self) -> RunDocument | None:
        """The run that is in the store; None in one without."""
        try:
            return self.read(names.RUN, RunDocument)
        except ObjectNotFoundError:
            return None

    def look(self, round: int) -> Look:
        """List a round, and what is later."""
        look = self._look(round)
        # A listing takes time: what it shows of a later round may be newer than what it shows of this one.
        return self._look(round) if look.later and not look.committed else look

    def _look(self, round: int) -> Look:
        folder = f"{names.round_folder(round)}/"
        found = [info.name for info in self.store.list(names.ROUNDS, after=names.round_folder(round))]
        here = {name: name.removeprefix(folder) for name in found if name.startswith(folder)}
        return Look(
            committed=names.commit_name(round) in here,
            later=len(here) < len(found),
            offering=frozenset(rank for name in here.values() if (rank := names.offering_rank(name)) is not None),
            stops=frozenset(name for name, last in here.items() if names.stopped_rank(last) is not None),
            lacks=frozenset(name for name, last in here.items() if names.lacking_rank(last) is not None),
        )

    def committed(self, first: int = 0) -> list[int]:
        """The rounds from `first` on whose commits are in the store, ascending."""
        after = names.round_folder(first) if first else ""
        return list(numbered(self.store, names.ROUNDS, names.committed_round, after))

    def anchors(self) -> list[int]:
        """The rounds after which there is an anchor, ascending. That of the run's beginning is in `run.json`."""
        return list(numbered(self.store, names.ANCHORS, names.anchored_round))

    def first(self) -> int:
        """The round from which on everything stays; 0 where nothing was pruned."""
        return read_first(self.store, names.FIRST, self._keys)

    def begin_at(self, first: int) -> None:
        """Say from which round on everything stays, unless it was said of a later one."""
        begin_at(self.store, first, names.FIRST, self._keys)

    def commit(self, round: int) -> Commit:
        """The commit of a round."""
        name = names.commit_name(round)
        found = self.read(name, Commit, round=round)
        ranks = [offer.rank for offer in found.offers]
        of_round = all((offer.run, offer.round) == (found.run, round) for offer in found.offers)
        if not ranks or ranks != sorted(set(ranks)) or not of_round:
            raise IntegrityError(f"{name} in {self.store.url}: expected offers of its round by rising ranks", name=name)
        return found

    def anchor(self, round: int) -> Anchor:
        """The anchor of a round."""
        return self.read(names.anchor_name(round), Anchor, round=round)

    def read(self, name: str, kind: type[D], **expected: int) -> D:
        """Read a document of this run, and compare members of it."""
        document = read_sealed(self.store, name, kind, FORMAT, self._keys.public)
        if self.run_id and document.run != self.run_id:
            raise IntegrityError(
                f"{name} in {self.store.url}: expected the run {self.run_id}, found {document.run}: the store was "
                "emptied, or another run was copied into it",
                name=name,
            )
        found = {member: getattr(document, member) for member in expected}
        if found != expected:
            raise IntegrityError(f"{name} in {self.store.url}: expected {expected}, found {found}", name=name)
        return document
