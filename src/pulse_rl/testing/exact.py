"""Exactness: every bit of every dtype, wherever it lies in memory, in tensors of any size, number and name."""

from typing import NamedTuple

from pulse_rl.codecs.choose import CodecName
from pulse_rl.testing import models
from pulse_rl.testing.memory import Place
from pulse_rl.testing.models import PublishedModel
from pulse_rl.testing.protocol import Adapter, CanStage
from pulse_rl.testing.recorded import record
from pulse_rl.testing.trial import ReceiverTrial


class Exact(NamedTuple):
    """A check of one model: a version is loaded, then some are followed, one by one."""

    about: str
    model: PublishedModel
    codec: CodecName = "gap"
    places: tuple[Place, ...] = ("plain",)  # how the weights lie in memory, in one trial each
    tied_apart: bool = False
    patches: int = 3
    staged: bool = False  # whether patches are staged, by a receiver that can

    def follow(self, adapter: Adapter) -> None:
        recorded = record(self.model, 1 + self.patches, codec=self.codec)
        for place in self.places:
            with ReceiverTrial(adapter, recorded, place=place, tied_apart=self.tied_apart) as trial:
                trial.sync()
                for _ in range(self.patches):
                    trial.source.show()
                    if self.staged and isinstance(trial.receiver, CanStage):
                        trial.apply(trial.stage())
                    else:
                        trial.sync()


CHECKS = {
    "dtypes-1-byte": Exact(
        "Every dtype of 1 byte: booleans, integers, and the kinds of FP8.", models.of_size(1), "context"
    ),
    "dtypes-2-bytes": Exact("Every dtype of 2 bytes: BF16, FP16, integers.", models.of_size(2), "context"),
    "dtypes-4-bytes": Exact("Every dtype of 4 bytes: FP32, integers.", models.of_size(4), "context"),
    "dtypes-8-bytes": Exact(
        "Every dtype of 8 bytes: FP64, complex numbers of two FP32, integers.", models.of_size(8), "context"
    ),
    "zeros": Exact(
        "A zero changes its sign and nothing else: −0 and +0 are equal as numbers, not as bits.", models.ZEROS
    ),
    "nans": Exact(
        "NaNs keep their payloads, turn into numbers and back, and take the place of other NaNs.", models.NANS
    ),
    "patterns": Exact(
        'Every bit pattern of 8 and 16 bits is an old and a new one: none of them stands for "unchanged".',
        models.PATTERNS,
    ),
    "scalars": Exact("Tensors without dimensions.", models.SCALARS),
    "empty-tensors": Exact("Tensors without elements.", models.EMPTY),
    "shapes": Exact("Shapes of one element, of odd sizes, of three dimensions.", models.SHAPES, "context"),
    "dimensions": Exact(
        "Tensors of four and five dimensions, as convolutions have, contiguous and not.",
        models.DIMENSIONS,
        places=("plain", "strided"),
    ),
    "gaps": Exact(
        "Changes that lie 65,535 elements apart and further, and as far from the start; others follow each gap.",
        models.GAPS,
    ),
    "beyond-16-bits": Exact(
        "Tensors of more than 2^16 elements, rows and columns; elements before and beyond change.",
        models.beyond(16),
        "context",
    ),
    "beyond-20-bits": Exact(
        "A tensor of more than 2^20 elements, of which few change, from the first to the last.",
        models.beyond(20),
        patches=1,
    ),
    "beyond-24-bits": Exact(
        "A tensor of more than 2^24 elements, which float32 does not count, of which few change, from first to last.",
        models.beyond(24),
        patches=1,
    ),
    "many-tensors": Exact("Three hundred tensors.", models.MANY, patches=1),
    "names": Exact(
        "Names that are not ASCII, that JSON escapes, that are longer than 255 bytes, or that look alike.",
        models.NAMES,
        "context",
    ),
    "strided": Exact(
        "Weights that are not contiguous; what lies between their elements stays as it is.",
        models.LLM,
        "context",
        ("strided",),
    ),
    "fused": Exact(
        "Weights that are parts of larger tensors, as fused projections are; the padding around them stays as it is.",
        models.LLM,
        places=("fused",),
    ),
    "tied": Exact("Two names of one tensor, as of an embedding and a head.", models.TIED, "context"),
    "tied-apart": Exact(
        "Names that the trainer ties are two tensors of the receiver: both follow.", models.TIED, tied_apart=True
    ),
    "quantised": Exact(
        "Codes and scales of FP8 as a view has them: blocks cut off at the edges, stacks of experts, scales that move.",
        models.QUANTISED["quantised"],
        "context",
        staged=True,
    ),
    "quantised-int8": Exact("INT8 with a scale for each row.", models.QUANTISED["quantised-int8"], "context"),
    "quantised-mxfp4": Exact("FP4, two codes a byte.", models.QUANTISED["quantised-mxfp4"], "context"),
    "quantised-nvfp4": Exact(
        "FP4 with a global scale for each matrix: when it moves, so do all of its other scales.",
        models.QUANTISED["quantised-nvfp4"],
        "context",
    ),
    "no-changes": Exact("Versions in which no bit changes are reported all the same.", models.STILL),
}
