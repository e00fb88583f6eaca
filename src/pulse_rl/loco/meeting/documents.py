"""The small objects of a meeting: sealed JSON, signed where there is a key, as the manifests of a history are.

Each says what it is (`kind`), of which run and round, so none can stand in for another.
"""

from typing import Self

import msgspec
from blake3 import blake3

from pulse_rl.documents import Count, Digest, Hash, Token
from pulse_rl.log.objects import ObjectRef
from pulse_rl.log.sealed import SealedFormat

# The limit holds a commit of 10,000 trainers with 10 fragments each.
FORMAT = SealedFormat("pulse-rl/trainers", 1, "the meeting of trainers", "sealed document", 16 << 20)


class FragmentObject(msgspec.Struct, frozen=True, array_like=True):
    """The object of one fragment."""

    nbytes: Count
    blake3: Hash

    @classmethod
    def of(cls, data: bytes) -> Self:
        """The object of these bytes."""
        return cls(len(data), blake3(data).hexdigest())

    def ref(self, name: str) -> ObjectRef:
        """A reference to it under its name."""
        return ObjectRef(name, self.nbytes, self.blake3)


class Document(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind"):
    """What all of them say."""

    format: str = FORMAT.name
    format_version: Count = FORMAT.version
    run: Token  # random, made with the run


class Anchor(Document, frozen=True, kw_only=True, tag="anchor"):
    """A state that newcomers start from."""

    round: Count  # rounds done
    theta: Digest
    momentum: Digest
    life: Token  # of the trainer that wrote it
    parts: tuple[FragmentObject, ...]  # by fragment


class RunDocument(Document, frozen=True, kw_only=True, tag="run"):
    """Who may take part, and the state that the run began with."""

    world_size: Count
    options: dict[str, str]  # what must be the same on all trainers
    anchor: Anchor


class Offer(Document, frozen=True, kw_only=True, tag="offer"):
    """What one trainer wants to count in a round."""

    round: Count
    rank: Count
    life: Token
    base: Digest  # of its θ before the round
    sent: Count  # elements
    parts: tuple[FragmentObject, ...]  # by fragment


class Refusal(msgspec.Struct, frozen=True, kw_only=True):
    """Why an offer does not count."""

    rank: Count
    life: Token
    reason: str
    found: Digest | None = None  # its base, where that is why


class Commit(Document, frozen=True, kw_only=True, tag="commit"):
    """A round: which offers count in it. The only object that decides."""

    round: Count
    base: Digest  # of θ before the round
    offers: tuple[Offer, ...]  # by ascending rank
    refused: tuple[Refusal, ...] = ()
    committer: Count  # rank

    def offer(self, rank: int) -> Offer | None:
        """The offer of a rank that counts."""
        return next((offer for offer in self.offers if offer.rank == rank), None)


class Notice(Document, frozen=True, kw_only=True, tag="notice"):
    """What a trainer tells those that wait for the end of a round: that it stops, or what it lacks."""

    round: Count  # the open one, in whose folder this lies
    rank: Count  # whose fault it is
    reason: str
    refused: bool = False  # whether another model, world size or option is why, so that no run of all can begin
    lacks: Count = 0  # the committed round that the trainer cannot end; 0 if it stops
