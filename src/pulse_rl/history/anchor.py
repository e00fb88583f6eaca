"""Anchors: a full checkpoint, streamed into a store as ordinary sharded safetensors.

The digest is counted over the very bytes that are sent, so a committed anchor holds what its manifest says, even if
the weights were changed while they were published. `restore` reads anchors.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from pulse_rl.checkpoint.shards import INDEX, ShardFile, nbytes_of, plan_shards, stream_shard
from pulse_rl.dtypes import UIntArray
from pulse_rl.errors import IntegrityError
from pulse_rl.history.manifest import is_file_name
from pulse_rl.kernels import cpu
from pulse_rl.log.objects import ObjectRef, hasher, refer
from pulse_rl.observers import LongWork
from pulse_rl.store.base import Store
from pulse_rl.weights import digests
from pulse_rl.weights.bits import Bits
from pulse_rl.weights.names import ModelWeights, unsharded


def put_anchor(
    store: Store, directory: str, tensors: Mapping[str, Bits], digest: str, assets: Mapping[str, bytes]
) -> tuple[ObjectRef, ...]:
    """Write tensors and assets (small files: config.json, a tokenizer) to a directory of a store.

    digest: the digest that the tensors must have. Holds a few segments of a file in memory.
    Returns the files. Raises IntegrityError if other bits were sent, and StoreError; then nothing refers to the files.
    """
    shards, index = plan_shards(tensors)
    refs, found = put_shards(store, directory, tensors, shards)
    check_sent(directory, digest, found + digests.empty_digest(tensors))
    return refs + put_assets(store, directory, index, assets)


def put_shards(
    store: Store, directory: str, tensors: Mapping[str, Bits], shards: Iterable[ShardFile]
) -> tuple[tuple[ObjectRef, ...], int]:
    """Write some files of an anchor. Returns them, and the digest of the elements that were sent."""
    refs, total = [], 0
    shards = list(shards)
    with LongWork(
        f"the upload of {directory}", sum(_elements_nbytes(tensors, shard.tensors) for shard in shards)
    ) as work:
        for shard in shards:
            file = _Upload(tensors, shard.tensors, work)
            store.put(f"{directory}/{shard.name}", file)
            refs.append(file.ref(f"{directory}/{shard.name}"))
            total += file.digest
    return tuple(refs), total & digests.MASK


def check_sent(directory: str, digest: str, total: int) -> None:
    """Raise IntegrityError unless the digest of all that was sent is the version's."""
    check_digest("the anchor", digest, total, ": the weights changed while they were published", name=directory)


def check_digest(what: str, expected: str, total: int, why: str = "", *, name: str | None = None) -> None:
    """Raise IntegrityError unless this sum is the digest that was promised. why: what the message ends with."""
    found = digests.to_hex(total)
    if found != expected:
        message = f"{what}: expected digest {expected}, found {found}{why}"
        raise IntegrityError(message, name=name, expected=expected, found=found)


def put_assets(store: Store, directory: str, index: bytes | None, assets: Mapping[str, bytes]) -> tuple[ObjectRef, ...]:
    """Write an anchor's index, if it has one, and its assets."""
    refs = []
    files = dict(assets) | ({INDEX: index} if index else {})
    for name, data in sorted(files.items()):
        store.put(f"{directory}/{name}", [data])
        refs.append(refer(f"{directory}/{name}", data))
    return tuple(refs)


def _elements_nbytes(tensors: Mapping[str, Bits], names: Sequence[str]) -> int:
    return sum(nbytes_of(tensors[name]) for name in names)


class _Upload:
    """One file's bytes, hashed and counted as they are sent; a store that failed may read them from the beginning."""

    def __init__(self, tensors: Mapping[str, Bits], names: Sequence[str], work: LongWork) -> None:
        self._tensors, self._names, self._work = tensors, names, work

    def __iter__(self) -> Iterator[bytes]:
        self._nbytes, self._hasher = 0, hasher(_elements_nbytes(self._tensors, self._names))
        mine = {name: self._tensors[name] for name in self._names}
        seeds = {name: digests.seed(name, bits.dtype, bits.shape) for name, bits in mine.items()}
        terms = list[int]()

        def count(name: str, start: int, bits: UIntArray) -> None:
            terms.append(cpu.digest_range(seeds[name], start, bits))

        for part in stream_shard(self._tensors, self._names, count):
            self._hasher.update(part)
            self._nbytes += len(part)
            yield part
            self._work.advance(len(part))
        self.digest = sum(terms)  # of the elements that were sent last

    def ref(self, name: str) -> ObjectRef:
        """The object that was sent last."""
        return ObjectRef(name, self._nbytes, self._hasher.hexdigest())


def check_assets(assets: Mapping[str, bytes]) -> None:
    """Raise ValueError or TypeError for files that an anchor's directory cannot hold, or that readers would refuse."""
    if not isinstance(assets, Mapping):
        raise TypeError(f"assets: expected a mapping of file name → bytes, found {type(assets).__name__}")
    for name, data in assets.items():
        if not isinstance(data, bytes | bytearray | memoryview):
            raise TypeError(f"assets: expected bytes for {name!r}, found {type(data).__name__}")
        if not is_file_name(name):
            raise ValueError(
                "assets: expected names of up to 200 ASCII letters, digits and . _ -, not beginning with a dot, "
                f"found {name!r}"
            )
        if name.endswith(".safetensors") or name == INDEX:
            raise ValueError(f"assets: {name!r} is a name of the anchor's own files: choose another")


def model_config(weights: Any, cast: str | None) -> dict[str, bytes]:
    """The config.json of a Transformers model, or of a config, with which anchors load as they are; else nothing."""
    model, name = unsharded(weights.model if isinstance(weights, ModelWeights) else weights)
    config = getattr(model, "config", model)
    if not hasattr(config, "to_json_string"):
        return {}
    document = json.loads(config.to_json_string())
    if config is not model:
        document["architectures"] = [name]
    if cast is not None:
        document["dtype"] = cast
    return {"config.json": json.dumps(document, indent=2, sort_keys=True).encode()}


def read_config(data: bytes, where: str) -> dict[str, Any]:
    """The members of a config.json. where: what messages call it. Raises ValueError for anything but a JSON object."""
    try:
        found = json.loads(data)  # which takes NaN and Infinity, as some models have them there
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where}: expected a JSON object, found no JSON: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{where}: expected a JSON object, found {found!r:.80}")
    return found
