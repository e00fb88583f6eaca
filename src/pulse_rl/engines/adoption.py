"""The proof, before the first write, that an engine's memory holds the published tensors where the map says.

The map comes from the loader: it says where the loader puts each element, so geometry needs no data, and a tensor of
ones everywhere is mapped as any other. It cannot say what the engine has done to that memory since. A kernel that packs
experts permutes them at the same shape, and the same parameter then holds other elements at each place. So the bits are
compared once: with the checkpoint's files that the engine has loaded, or, by digest, with the versions of the history.
Memory that was permuted, padded or converted differs from both, unless all elements that it exchanged are equal.

What remains unproved is what the engine computes elsewhere from its weights: see `derived`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pulse_rl.checkpoint.files import open_checkpoint
from pulse_rl.errors import FormatError, UnmappedError, one_line
from pulse_rl.group.ranks import Ranks
from pulse_rl.history.anchor_share import prove_files, read_headers, read_share
from pulse_rl.history.history import History
from pulse_rl.history.manifest import Manifest
from pulse_rl.history.reading import Reading
from pulse_rl.history.restore import scratch
from pulse_rl.sync.subscribe.held import HeldWeights
from pulse_rl.sync.subscribe.loading import copy_bits
from pulse_rl.sync.subscribe.proof import recognise
from pulse_rl.weights.bits import as_bits, differ
from pulse_rl.weights.layout import Layout, as_tensor
from pulse_rl.weights.memory import LiveWeights
from pulse_rl.weights.pieces import pieces_of, place_view


def prove(
    views: Mapping[str, Any], kept: Mapping[str, Any], history: History, checkpoint: Path | None, ranks: Ranks
) -> int | None:
    """Prove that views hold what their names say. A collective of the ranks.

    views: of live memory. kept: tensors in host memory for what the engine does not hold; filled here. checkpoint: the
    files that the engine has loaded. Returns the version of the history that they hold; None if they are proved by the
    files. Raises UnmappedError where neither holds, IntegrityError where that is the anchor's fault.
    """

    def compare() -> tuple[str, bool]:
        different = "the files that it was loaded from are not known"
        if checkpoint is not None:
            different = _difference(views, checkpoint)
        return different, bool(different)

    different, differing = ranks.do_and_share("compare the weights with the files", compare, bool, alike=True)
    source = None if any(differing) else checkpoint  # files that the rest differs from are of another version
    head = ranks.lead("find the newest version", history.newest, Manifest)
    filled = ranks.do("fill in what the engine does not hold", lambda: _fill(kept, history, head, source), alike=True)
    if not any(differing):
        return None
    live = HeldWeights(LiveWeights({**views, **kept}), ranks, None, {})
    state = recognise(Reading(history, ranks), live, head)
    if state is None:

        def prove_anchor() -> None:  # what was read of it is proved by the digest alone, which the others share
            if filled is not None:
                prove_files(history.store, filled)

        ranks.do("prove the anchor", prove_anchor, alike=True)
        files = different or "another rank's differ from the files"
        reason = f"they hold no version of {history.store.url} that patches lead from, and {files}"
        raise UnmappedError(f"the engine's weights are not those that the map says: {reason}", reason=reason)
    return state.version


def _difference(views: Mapping[str, Any], checkpoint: Path) -> str:
    """How views differ from the files; "" if they are the same."""
    try:
        files = open_checkpoint(checkpoint)
    except (FileNotFoundError, FormatError) as error:
        return f"the files that it was loaded from cannot be read: {one_line(error, 200)}"
    compared: set[object] = set()
    for name, view in views.items():
        bits = as_tensor(view)
        if name not in files:
            if bits.storage not in compared:  # a tied name has the memory of one that was compared
                return f"{checkpoint} has no tensor {name!r}"
        elif (files[name].dtype, tuple(files[name].shape)) != (bits.dtype, tuple(bits.shape)):
            found = f"{files[name].dtype} {list(files[name].shape)}"
            return f"tensor {name!r} is {found} in {checkpoint}, not {bits.dtype} {list(bits.shape)}"
        elif any(differ(piece.bits, place_view(files[name], piece.box)) for piece in pieces_of(bits)):
            return f"tensor {name!r} differs from that in {checkpoint}"
        compared.add(bits.storage)
    return ""


def _fill(kept: Mapping[str, Any], history: History, head: Manifest, checkpoint: Path | None) -> Manifest | None:
    """Fill in what the engine does not hold: from these files, or from the newest anchor, which is returned then."""
    targets = {name: as_bits(tensor) for name, tensor in kept.items()}
    if checkpoint is not None and targets:
        files = open_checkpoint(checkpoint)
        for name in [name for name in targets if name in files]:
            found = files[name]
            if (found.dtype, tuple(found.shape)) == (targets[name].dtype, tuple(targets[name].shape)):
                copy_bits(found, targets.pop(name))
    if targets:
        anchor = history.read(head.anchor_sequence)
        stored, _ = read_headers(history.store, anchor)
        with scratch() as directory:
            read, _ = read_share(history.store, stored, Layout(targets), directory)
            for name, target in targets.items():
                for piece in pieces_of(read[name]):
                    copy_bits(piece.bits, target)
        return anchor
    return None
