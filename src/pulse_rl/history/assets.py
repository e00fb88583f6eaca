"""The small files that come with a model (config.json, a tokenizer), given to workers from the store."""

from __future__ import annotations

from pathlib import Path

from pulse_rl.checkpoint.shards import INDEX
from pulse_rl.disk import read_file, write_stream
from pulse_rl.errors import IntegrityError, ObjectNotFoundError, StoreError
from pulse_rl.history.history import History
from pulse_rl.history.manifest import Manifest
from pulse_rl.history.reading import FaultLog
from pulse_rl.history.search import find_anchors
from pulse_rl.log.objects import ObjectRef, fetch, refer
from pulse_rl.log.signing import PublicKey
from pulse_rl.store.base import Store
from pulse_rl.store.patient import PATIENCE_S

MAX_ASSETS_NBYTES = 1 << 30  # of all files together, which are held in memory until all are proved


def load_assets(
    store: Store | str | Path,
    directory: str | Path,
    *,
    version: int | None = None,
    view: str | None = None,
    public_key: PublicKey | None = None,
    patience: float = PATIENCE_S,
) -> tuple[Path, ...]:
    """Write the assets of a history's newest anchor to a directory: config.json, a tokenizer, whatever was published.

    Each file is compared with its hash, and nothing is written before all are there. Then
    `AutoTokenizer.from_pretrained(directory)` and `AutoModel.from_config(AutoConfig.from_pretrained(directory))` give a
    worker on another machine what `Subscriber.sync` needs.

    Args:
        store: A Store, or the URL or path of one.
        directory: Where to write; created if it does not exist. Files of the same names are replaced, others stay.
        version: A version: then the newest anchor up to it. None: up to the newest version.
        view: A quantised view, whose config.json says how its weights are quantised. None: the weights as published.
        public_key: As in `Subscriber`.
        patience: As in `Subscriber`.

    Returns:
        The files, by name.

    Raises:
        VersionNotFoundError: If the history is empty, or does not hold that version.
        ObjectNotFoundError: If the anchor was published without assets, or they are missing.
        IntegrityError: If they are damaged.
        StoreError: If the store cannot be read.
    """
    history = History(store, public_key=public_key, patience=patience, view=view)
    url = history.store.url
    target = history.find(version) if version is not None else history.newest()
    contents = read_assets(history, target)
    if not contents:
        raise ObjectNotFoundError(
            f"the newest anchor up to version {target.version} in {url} holds no assets: "
            "publish(…, assets={name: bytes}) puts them with an anchor; a Transformers model's config.json is added by "
            "itself",
            url=url,
        )
    return _write(Path(directory), contents)


def read_assets(history: History, target: Manifest, known: Path | None = None) -> dict[str, bytes]:
    """Read the assets of the newest anchor at or before a version, by name, proved; empty if it has none.

    known: a directory with such files: one that has the hash is read there. Raises as `load_assets`.
    """
    faults = FaultLog()
    for anchor in find_anchors(history, target, faults):
        refs = [ref for ref in anchor.anchor if not (ref.name.endswith(".safetensors") or _file(ref) == INDEX)]
        try:
            return _read_all(history, anchor, refs, known)
        except (IntegrityError, StoreError) as error:
            faults.add(anchor.anchor[0].name, error)
    message = f"no anchor of {history.store.url} up to version {target.version} can be read: " + "; ".join(
        faults.messages
    )
    raise faults.failure(message, history.store.url)


def _read_all(history: History, anchor: Manifest, refs: list[ObjectRef], known: Path | None) -> dict[str, bytes]:
    """The files, by name, proved."""
    total = sum(ref.nbytes for ref in refs)
    if total > MAX_ASSETS_NBYTES:
        raise IntegrityError(
            f"the assets of version {anchor.version}: expected at most {MAX_ASSETS_NBYTES} bytes, its manifest says "
            f"{total}",
            name=refs[0].name,
            expected=MAX_ASSETS_NBYTES,
            found=total,
        )
    return {
        _file(ref): (known and _known(known / _file(ref), ref)) or bytes(fetch(history.store, ref, MAX_ASSETS_NBYTES))
        for ref in refs
    }


def _known(path: Path, ref: ObjectRef) -> bytes | None:
    """The bytes of a file, if they are those of an object."""
    try:
        data = read_file(path) if path.stat().st_size == ref.nbytes else b""
    except OSError:
        return None
    return data if refer(ref.name, data) == ref else None


def _file(ref: ObjectRef) -> str:
    return ref.name.rpartition("/")[2]


def _write(directory: Path, contents: dict[str, bytes]) -> tuple[Path, ...]:
    directory.mkdir(parents=True, exist_ok=True)
    for name, data in contents.items():
        write_stream(directory / name, [data])
    return tuple(directory / name for name in sorted(contents))
