"""The small files that come with a model (config.json, a tokenizer), given to workers from the store."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from pulse_rl.checkpoint.shards import INDEX
from pulse_rl.disk import write_stream
from pulse_rl.errors import IntegrityError, ObjectNotFoundError, StoreError, VersionNotFoundError
from pulse_rl.history.log import History
from pulse_rl.history.manifest import Manifest
from pulse_rl.history.search import FaultLog, find_anchors
from pulse_rl.log.objects import ObjectRef, fetch
from pulse_rl.store.base import Store
from pulse_rl.store.patient import PATIENCE_S

if TYPE_CHECKING:
    from pulse_rl.log.signing import PublicKey

MAX_ASSETS_NBYTES = 1 << 30  # of all files together, which are held in memory until all are proved


def load_assets(
    store: Store | str | Path,
    directory: str | Path,
    *,
    version: int | None = None,
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
    history = History(store, public_key=public_key, patience=patience)
    url = history.store.url
    target = history.find(version) if version is not None else history.head()
    if target is None:
        raise VersionNotFoundError(f"{url} holds no version yet", url=url)
    faults = FaultLog()
    for anchor in find_anchors(history, target, faults):
        refs = [ref for ref in anchor.anchor if not (ref.name.endswith(".safetensors") or _file(ref) == INDEX)]
        try:
            contents = _fetch_all(history, anchor, refs)
        except (IntegrityError, StoreError) as error:
            faults.add(anchor.anchor[0].name, error)
            continue
        if not refs:
            raise ObjectNotFoundError(
                f"the anchor of version {anchor.version} in {url} holds no assets: publish(…, assets={{name: bytes}}) "
                "puts them with an anchor; a Transformers model's config.json is added by itself",
                url=url,
            )
        return _write(Path(directory), contents)
    message = f"no anchor of {url} up to version {target.version} can be read: {'; '.join(faults.messages)}"
    if faults.damaged:
        raise IntegrityError(message)
    raise (StoreError if faults.unreachable else ObjectNotFoundError)(message, url=url)


def _fetch_all(history: History, anchor: Manifest, refs: list[ObjectRef]) -> dict[str, bytearray]:
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
    return {_file(ref): fetch(history.store, ref, MAX_ASSETS_NBYTES) for ref in refs}


def _file(ref: ObjectRef) -> str:
    return ref.name.rpartition("/")[2]


def _write(directory: Path, contents: dict[str, bytearray]) -> tuple[Path, ...]:
    directory.mkdir(parents=True, exist_ok=True)
    for name, data in contents.items():
        write_stream(directory / name, [bytes(data)])
    return tuple(directory / name for name in sorted(contents))
