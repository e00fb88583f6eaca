"""Exactness: every bit of every dtype, wherever it lies in memory, in tensors of any size, number and name."""

from pulse_rl.codecs.choose import CodecName
from pulse_rl.testing import models
from pulse_rl.testing.memory import Place
from pulse_rl.testing.models import PublishedModel
from pulse_rl.testing.protocol import Adapter
from pulse_rl.testing.recorded import record
from pulse_rl.testing.trial import ReceiverTrial


def _follow(
    adapter: Adapter,
    model: PublishedModel,
    *,
    codec: CodecName = "gap",
    place: Place = "plain",
    tied_apart: bool = False,
    patches: int = 3,
) -> None:
    """Load a version, then follow some, one by one."""
    recorded = record(model, 1 + patches, codec=codec)
    with ReceiverTrial(adapter, recorded, place=place, tied_apart=tied_apart) as trial:
        trial.sync()
        for _ in range(patches):
            trial.source.show()
            trial.sync()


def dtypes_of_1_byte(adapter: Adapter) -> None:
    """Every dtype of 1 byte: booleans, integers, and the kinds of FP8."""
    _follow(adapter, models.of_size(1), codec="context")


def dtypes_of_2_bytes(adapter: Adapter) -> None:
    """Every dtype of 2 bytes: BF16, FP16, integers."""
    _follow(adapter, models.of_size(2), codec="context")


def dtypes_of_4_bytes(adapter: Adapter) -> None:
    """Every dtype of 4 bytes: FP32, integers."""
    _follow(adapter, models.of_size(4), codec="context")


def dtypes_of_8_bytes(adapter: Adapter) -> None:
    """Every dtype of 8 bytes: FP64, complex numbers of two FP32, integers."""
    _follow(adapter, models.of_size(8), codec="context")


def zeros(adapter: Adapter) -> None:
    """A zero changes its sign and nothing else: −0 and +0 are equal as numbers, not as bits."""
    _follow(adapter, models.ZEROS)


def nans(adapter: Adapter) -> None:
    """NaNs keep their payloads, turn into numbers and back, and take the place of other NaNs."""
    _follow(adapter, models.NANS)


def patterns(adapter: Adapter) -> None:
    """Every bit pattern of 8 and 16 bits is an old and a new one: none of them stands for "unchanged"."""
    _follow(adapter, models.PATTERNS)


def scalars(adapter: Adapter) -> None:
    """Tensors without dimensions."""
    _follow(adapter, models.SCALARS)


def empty(adapter: Adapter) -> None:
    """Tensors without elements."""
    _follow(adapter, models.EMPTY)


def shapes(adapter: Adapter) -> None:
    """Shapes of one element, of odd sizes, of three dimensions."""
    _follow(adapter, models.SHAPES, codec="context")


def dimensions(adapter: Adapter) -> None:
    """Tensors of four and five dimensions, as convolutions have, contiguous and not."""
    _follow(adapter, models.DIMENSIONS)
    _follow(adapter, models.DIMENSIONS, place="strided")


def gaps(adapter: Adapter) -> None:
    """Changes that lie 65,535 elements apart and further, and as far from the start; others follow each gap."""
    _follow(adapter, models.GAPS)


def beyond_16_bits(adapter: Adapter) -> None:
    """Tensors of more than 2^16 elements, rows and columns; elements before and beyond change."""
    _follow(adapter, models.beyond(16), codec="context")


def beyond_20_bits(adapter: Adapter) -> None:
    """A tensor of more than 2^20 elements, of which few change, from the first to the last."""
    _follow(adapter, models.beyond(20), patches=1)


def beyond_24_bits(adapter: Adapter) -> None:
    """A tensor of more than 2^24 elements, which float32 does not count, of which few change, from first to last."""
    _follow(adapter, models.beyond(24), patches=1)


def many(adapter: Adapter) -> None:
    """Three hundred tensors."""
    _follow(adapter, models.MANY, patches=1)


def names(adapter: Adapter) -> None:
    """Names that are not ASCII, that JSON escapes, that are longer than 255 bytes, or that look alike."""
    _follow(adapter, models.NAMES, codec="context")


def strided(adapter: Adapter) -> None:
    """Weights that are not contiguous; what lies between their elements stays as it is."""
    _follow(adapter, models.LLM, codec="context", place="strided")


def fused(adapter: Adapter) -> None:
    """Weights that are parts of larger tensors, as fused projections are; the padding around them stays as it is."""
    _follow(adapter, models.LLM, place="fused")


def tied(adapter: Adapter) -> None:
    """Two names of one tensor, as of an embedding and a head."""
    _follow(adapter, models.TIED, codec="context")


def tied_apart(adapter: Adapter) -> None:
    """Names that the trainer ties are two tensors of the receiver: both follow."""
    _follow(adapter, models.TIED, tied_apart=True)


def still(adapter: Adapter) -> None:
    """Versions in which no bit changes are reported all the same."""
    _follow(adapter, models.STILL)
