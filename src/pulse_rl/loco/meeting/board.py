"""The board: the small objects of one run, read, written and listed.

A round is committed by one put-if-absent. All that is known of who has arrived comes from one listing.
"""

from typing import NamedTuple, TypeVar

from pulse_rl.errors import IntegrityError, ObjectExistsError, ObjectNotFoundError
from pulse_rl.history.signing import Keys
from pulse_rl.loco.meeting import names
from pulse_rl.loco.meeting.documents import (
    MAX_NBYTES,
    Anchor,
    Beginning,
    Commit,
    Document,
    Lack,
    Offer,
    Run,
    Stop,
    decode,
)
from pulse_rl.store.base import Store, has_bytes, read_up_to

D = TypeVar("D", bound=Document)


class Look(NamedTuple):
    """What a listing showed of a round."""

    committed: bool
    later: bool  # whether there is anything of a later round, which begins when this one is committed
    offering: frozenset[int]  # ranks
    stops: frozenset[str]  # names
    lacks: frozenset[str] = frozenset()  # names


class Board:
    """The small objects of one run in a store. Methods raise StoreError, and IntegrityError for what is damaged."""

    def __init__(self, store: Store, keys: Keys) -> None:
        self.store = store
        self._keys = keys
        self.run_id: str | None = None  # of the run that this trainer takes part in

    def post(self, name: str, document: Document) -> bool:
        """Put a document, if absent; returns whether it is the one that is there now."""
        data = self._keys.seal(document)
        try:
            self.store.put(name, data, mode="create")
        except ObjectExistsError:  # a retry can meet its first attempt
            return has_bytes(self.store, name, data)
        return True

    def run(self) -> Run | None:
        """The run that is in the store; None in one without."""
        try:
            return self._read(names.RUN, Run)
        except ObjectNotFoundError:
            return None

    def look(self, round: int) -> Look:
        """List a round, and what is later."""
        look = self._look(round)
        # A listing takes time: what it shows of a later round may be newer than what it shows of this one.
        return self._look(round) if look.later and not look.committed else look

    def _look(self, round: int) -> Look:
        found = [info.name for info in self.store.list(names.ROUNDS, after=names.round_folder(round))]
        here = [name for name in found if names.round_of(name) == round]
        return Look(
            committed=names.commit_name(round) in here,
            later=len(here) < len(found),
            offering=frozenset(rank for name in here if (rank := names.offering_rank(name)) is not None),
            stops=frozenset(name for name in here if names.stopped_rank(name) is not None),
            lacks=frozenset(name for name in here if names.lacking_rank(name) is not None),
        )

    def committed(self, first: int = 0) -> list[int]:
        """The rounds from `first` on whose commits are in the store, ascending."""
        after = names.round_folder(first) if first else ""
        found = [(names.round_of(info.name), info.name) for info in self.store.list(names.ROUNDS, after=after)]
        return [round for round, name in found if round is not None and name == names.commit_name(round)]

    def anchors(self) -> list[int]:
        """The rounds after which there is an anchor, ascending. That of the run's beginning is in `run.json`."""
        found = [(names.round_of(info.name), info.name) for info in self.store.list(names.ANCHORS)]
        return [round for round, name in found if round is not None and name == names.anchor_name(round)]

    def first(self) -> int:
        """The round from which on everything stays; 0 where nothing was pruned."""
        try:
            return self._read(names.FIRST, Beginning).first
        except ObjectNotFoundError:
            return 0

    def begin_at(self, first: int) -> None:
        """Say from which round on everything stays."""
        self.store.put(names.FIRST, self._keys.seal(Beginning(run=self._run, first=first)))

    def commit(self, round: int) -> Commit:
        """The commit of a round."""
        name = names.commit_name(round)
        found = self._read(name, Commit)
        ranks = [offer.rank for offer in found.offers]
        of_round = all((offer.run, offer.round) == (found.run, round) for offer in found.offers)
        if found.round != round or not ranks or ranks != sorted(set(ranks)) or not of_round:
            raise self._wrong(name, f"a commit of round {round}, by offers of it in the order of ranks")
        return found

    def offer(self, round: int, rank: int) -> Offer:
        """The offer of a rank in a round."""
        name = names.offer_name(round, rank)
        found = self._read(name, Offer)
        if (found.round, found.rank) != (round, rank):
            raise self._wrong(name, f"the offer of rank {rank} in round {round}")
        return found

    def stop(self, name: str) -> Stop:
        """Why a trainer cannot take part."""
        return self._read(name, Stop)

    def lack(self, name: str) -> Lack:
        """Which round a trainer cannot end."""
        return self._read(name, Lack)

    def anchor(self, round: int) -> Anchor:
        """The anchor of a round."""
        name = names.anchor_name(round)
        found = self._read(name, Anchor)
        if found.round != round:
            raise self._wrong(name, f"the anchor of round {round}")
        return found

    @property
    def _run(self) -> str:
        assert self.run_id is not None  # set by `joining`
        return self.run_id

    def _read(self, name: str, kind: type[D]) -> D:
        where = f"{name} in {self.store.url}"
        document = decode(read_up_to(self.store, name, MAX_NBYTES), kind, self._keys, name, where)
        if self.run_id is not None and document.run != self.run_id:
            raise IntegrityError(
                f"{where}: expected the run {self.run_id}, found {document.run}: the store was emptied, or another "
                "run was copied into it",
                name=name,
            )
        return document

    def _wrong(self, name: str, expected: str) -> IntegrityError:
        return IntegrityError(f"{name} in {self.store.url}: expected {expected}, found another", name=name)
