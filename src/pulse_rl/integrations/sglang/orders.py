"""What a client asks of the loader in an SGLang engine, and what its ranks answer.

An order goes through SGLang's own route as one small tensor: the bytes of a JSON document. SGLang answers each call of
a custom loader with success, and ends the whole engine if the loader raises. So the loader never raises, and each rank
sends its answer to a TCPStore of torch that the client keeps, at the address that the order names.
"""

from __future__ import annotations

import base64
import pickle
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import msgspec
import torch
from torch.distributed import DistStoreError

from pulse_rl.documents import decode_json

NAME = "pulse_rl.order"  # the tensor's
MAX_NBYTES = 1 << 16  # of an order
_REPLY_S = 10.0  # to reach the client that waits for an answer


class Order(msgspec.Struct, frozen=True):
    """What a client asks for.

    verb, arguments: as for `engines.service.serve`. id: unlike that of any other order. host, port: of the client's
    TCPStore.
    """

    verb: str
    id: str
    host: str
    port: int
    arguments: dict[str, Any] = {}


class Answer(msgspec.Struct, frozen=True):
    """What `engines.service.serve` returned in a rank, or failure: why it did not."""

    found: Any = None
    failure: str | None = None


def named_tensors(order: Order) -> list[tuple[str, torch.Tensor]]:
    """An order as SGLang hands it to a custom loader."""
    return [(NAME, torch.frombuffer(bytearray(msgspec.json.encode(order)), dtype=torch.uint8))]


def payload(order: Order) -> str:
    """An order as SGLang's HTTP route takes it, for one rank.

    It is a plain pickle, whose tensor has its bytes with it. SGLang's own serialiser passes a handle of shared memory,
    which works on one host only.
    """
    return base64.b64encode(pickle.dumps(named_tensors(order))).decode()


def read(tensors: Sequence[tuple[str, torch.Tensor]]) -> Order:
    """The order in a loader's named tensors. Raises ValueError or FormatError if they are something else."""
    names = [name for name, _ in tensors]
    if names != [NAME]:
        raise ValueError(f"expected one tensor {NAME!r}, found {names[:3]}")
    data = tensors[0][1]
    if data.dtype != torch.uint8 or data.numel() > MAX_NBYTES:
        raise ValueError(f"{NAME}: expected at most {MAX_NBYTES} bytes as uint8, found {data.numel()} of {data.dtype}")
    return decode_json(data.cpu().numpy().tobytes(), Order, NAME)


_client: tuple[tuple[str, int], Any] | None = None  # the address of the last client, and the connection to it


def reply(order: Order, rank: int, answer: Answer) -> None:
    """Send a rank's answer to the client. Raises RuntimeError if it is out of reach.

    The connection is kept for the next answer: torch looks up a host's name at each new one, which may take seconds.
    """
    global _client
    key, value, address = f"{order.id}/{rank}", msgspec.json.encode(answer).decode(), (order.host, order.port)
    known = _client
    if known is not None and known[0] == address:
        try:
            known[1].set(key, value)
            if known[1].check([key]):  # `set` waits for nothing
                return
        except RuntimeError:  # a client that was started again may have the same address
            _client = None
    store = torch.distributed.TCPStore(  # type: ignore[attr-defined]
        *address, is_master=False, timeout=timedelta(seconds=_REPLY_S)
    )
    store.set(key, value)
    _client = address, store


def await_answers(store: Any, order: Order, ranks: int, timeout: float) -> list[Answer]:
    """The answers of all ranks, from the client's TCPStore. Raises TimeoutError if one does not arrive."""
    keys = [f"{order.id}/{rank}" for rank in range(ranks)]
    try:
        store.wait(keys, timedelta(seconds=timeout))
    except DistStoreError as error:
        raise TimeoutError(f"no answer of all {ranks} ranks within {timeout:g} s") from error
    found = [decode_json(store.get(key), Answer, f"the answer of rank {rank}") for rank, key in enumerate(keys)]
    for key in keys:
        store.delete_key(key)
    return found
