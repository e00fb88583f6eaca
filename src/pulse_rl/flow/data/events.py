"""What changes a dataflow's state: the events that its journal keeps, and their bytes.

The state follows from the events alone, in their order; each has the time at which it happened.
"""

import typing
from typing import Any, Literal

import msgspec
import numpy as np

from pulse_rl.documents import LEARNING
from pulse_rl.flow.samples import EpisodeGroup, Task


class Event(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Something happened.

    Attributes:
        at: Seconds since the run's first start, without the time in which no dataflow ran.
    """

    at: float


class Registered(Event, frozen=True):
    worker: str
    kind: str
    slots: int
    policies: list[str]
    region: str


class Left(Event, frozen=True):
    worker: str


class Lost(Event, frozen=True):
    worker: str
    error: str


class Revived(Event, frozen=True):
    worker: str


class Leased(Event, frozen=True):
    worker: str
    task: Task
    versions: dict[str, int]  # of each trained policy, at hand-out
    source: Literal["new", "returned", "window", "wave"]


class Pushed(Event, frozen=True):
    group: EpisodeGroup


class Failed(Event, frozen=True):
    worker: str
    number: int
    error: str  # empty: given back untried


class Began(Event, frozen=True):
    policy: str
    step: int
    version: int
    batches: int


class RankBegan(Event, frozen=True):
    policy: str
    rank: int
    step: int


class RankLost(Event, frozen=True):
    policy: str
    rank: int


class Shared(Event, frozen=True):
    what: str
    rank: int
    value: Any


class Pulled(Event, frozen=True):
    policy: str
    number: int


class Published(Event, frozen=True):
    policy: str
    version: int
    digest: str
    step: int


class Committed(Event, frozen=True):
    policy: str
    batches: int


class Finished(Event, frozen=True):
    policy: str


class Opened(Event, frozen=True):
    tasks: list[Task]


class Asked(Event, frozen=True):
    window: str
    tasks: list[Task]


class Dismissed(Event, frozen=True):
    worker: str


class Stopped(Event, frozen=True):
    ended: bool  # the trainers have ended too


class Resumed(Event, frozen=True):
    pass


AnyEvent: Any = typing.Union[tuple(Event.__subclasses__())]  # noqa: UP007  # of those above

_NARROW = tuple(np.dtype(name) for name in ("u1", "<u2", "<u4"))


def _to_bytes(value: Any) -> Any:
    """An array as a name of its dtype in three bytes, and its values. Whole numbers take as few bytes as they need."""
    if isinstance(value, np.ndarray):
        dtype = value.dtype.newbyteorder("<")
        if value.dtype.kind == "i" and len(value) and value.min() >= 0:
            most = int(value.max())
            dtype = next((each for each in _NARROW if most <= np.iinfo(each).max), dtype)
        return dtype.str.encode() + value.astype(dtype).tobytes()
    if isinstance(value, np.generic):
        return value.item()
    raise NotImplementedError(f"expected an array, found {type(value).__name__}")


def _to_array(kind: Any, value: Any) -> Any:
    """An array that can be written to, of the dtype that its annotation names. One of another kind is a TypeError."""
    if not isinstance(value, bytes):
        raise TypeError(f"expected an array, found {type(value).__name__}")
    dtype = np.dtype(typing.get_args(typing.get_args(kind)[1])[0])
    return np.frombuffer(value, np.dtype(value[:3].decode()), offset=3).astype(dtype, casting="same_kind")


ENCODER = msgspec.msgpack.Encoder(enc_hook=_to_bytes)


def decoder(kind: Any) -> "msgspec.msgpack.Decoder[Any]":
    """Decodes what ENCODER has made of a value of this type."""
    with LEARNING:
        return msgspec.msgpack.Decoder(kind, dec_hook=_to_array)
