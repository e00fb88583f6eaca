"""Finding the manifest of a version, among those numbered by sequence, with few reads."""

from collections.abc import Iterable
from contextlib import suppress

from pulse_rl.errors import IntegrityError, ObjectNotFoundError, VersionNotFoundError, VersionSkewError
from pulse_rl.history.manifest import MAX_MANIFEST_NBYTES, Manifest, manifest_name, parse
from pulse_rl.history.versions import Versions
from pulse_rl.store.base import Store, read_up_to


def find_version(history: Versions, version: int) -> Manifest:
    """See `History.find`."""
    with suppress(IntegrityError, VersionNotFoundError, VersionSkewError):
        newest = history.head()  # the version that is requested most, without listing all of them
        if newest is not None and newest.version == version:
            return newest
    sequences = history.sequences()
    damaged: list[IntegrityError | VersionSkewError] = []
    # Versions rise with sequence numbers, so this bisects sequences[low:high], after a gallop from the newest one.
    low, high, gallop = 0, len(sequences), 1
    while low < high:
        middle = max((low + high) // 2, len(sequences) - gallop)
        gallop *= 2
        # A manifest that cannot be read does not say which half to go on with: the next one that can does.
        after, found = _first_readable(history, range(middle, high), sequences, damaged)
        if found is None or found.version > version:
            high = middle
        elif found.version < version:
            low = after + 1
        else:
            return found
    everything = range(len(sequences))
    _, oldest = _first_readable(history, everything, sequences, damaged)
    _, newest = _first_readable(history, reversed(everything), sequences, damaged)
    held = f"versions {oldest.version} to {newest.version}" if oldest and newest else "no version yet"
    if damaged:
        reason = next((error for error in damaged if isinstance(error, VersionSkewError)), damaged[0])
        reason.add_note(f"no other manifest is version {version}'s: {history.store.url} holds {held}")
        raise reason
    raise VersionNotFoundError(
        f"no version {version} in {history.store.url}: it holds {held}", url=history.store.url, version=version
    )


def holds(store: Store, manifest: Manifest) -> bool:
    """Whether a store still holds a manifest that was committed: one request.

    One that was damaged since counts, as what it said is known. Raises StoreError.
    """
    name = manifest_name(manifest.sequence)
    try:
        data = read_up_to(store, name, MAX_MANIFEST_NBYTES)
    except ObjectNotFoundError:
        return False
    try:
        return parse(data, manifest.sequence, None, f"{name} in {store.url}") == manifest
    except IntegrityError:
        return True


def _first_readable(
    history: Versions, places: Iterable[int], sequences: list[int], damaged: list[IntegrityError | VersionSkewError]
) -> tuple[int, Manifest | None]:
    """The first manifest that can be read, of those at some places of a list, and its place; None without one.

    damaged: the errors of the others are appended.
    """
    place = 0
    for place in places:
        try:
            return place, history.read(sequences[place])
        except VersionNotFoundError:
            pass  # pruned in the meantime
        except (IntegrityError, VersionSkewError) as error:
            damaged.append(error)
    return place, None
