"""What a study finds: `report.json`, as typed records.

Everything is counted on stored bits, exactly; what is predicted says so. The words:

- a *version* is one of the states that were studied, by its number: the optimizer step, where that is known;
- the *stride* is the commonest distance of two neighbouring versions. A *step* leads from a version to the one a stride
  later, and k steps to the one k strides later. Versions that lie otherwise are not compared;
- *density* is changes / elements, *sparsity* is 1 − density; both are fractions, never per cent;
- the *distance* of a change is how many places the new bits are from the old in the order of the dtype's values:
  1 is the neighbouring value, 1 ULP away. −0 and +0 are two places, and what is more than half of all places away is
  counted the short way around. From 2^52 on (of 64-bit elements) a distance counts as 2^52 − 1;
- an *exponent* e is that of the old value, |w| in [2^e, 2^(e+1)); a dtype's lowest, 1 below that of the smallest normal
  numbers, has its subnormals and zeros, its highest infinities and NaNs. Whole numbers have one row.

Sizes are bytes, entropies bits. A reader must refuse a `format_version` that it does not know.
"""

from typing import Literal

import msgspec

FORMAT = "pulse-rl/study"
FORMAT_VERSION = 1
SPANS = (1, 2, 4, 8, 16, 32)  # k, of the k-step sparsity


class Version(msgspec.Struct, frozen=True, kw_only=True):
    """One state of the weights."""

    number: int  # strictly rising
    name: str  # of the checkpoint's file or directory, or "version N" of a history


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """What of the optimizer the prediction needs, as given or as the run says."""

    lr: float
    betas: tuple[float, float]
    warmup: int = 0  # steps in which the learning rate rises to lr, by equal parts


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """Of one number over time."""

    mean: float
    std: float  # the standard deviation over time, of the population
    min: float
    max: float


class Span(msgspec.Struct, frozen=True, kw_only=True):
    """The k-step sparsity S_k(t): which fraction of elements has the same bits at t + k steps as at t."""

    k: int
    bases: tuple[int, ...]  # every version number t for which there is a version k steps later; never empty
    sparsity: tuple[float, ...]  # S_k(t), as long as bases
    over_time: Summary  # of sparsity


class Bounds(msgspec.Struct, frozen=True, kw_only=True):
    """Entropies of one step: what its positions and moves cost at least under a model, bits of all changes together.

    Empirical, with the frequencies of the step itself, so telling the frequencies is not counted.
    """

    positions_uniform: float  # changed or not, one probability for all elements
    positions_by_tensor: float  # one for each tensor
    positions_by_exponent: float  # one for each exponent of a dtype
    positions: float  # one for each exponent of each tensor
    moves_by_exponent: float  # direction and distance of the changes, given the exponent, of a dtype
    moves: float  # likewise of each tensor

    @property
    def total(self) -> float:
        """The bound that `bench codec` compares with: tables for each tensor."""
        return self.positions + self.moves


class Prediction(msgspec.Struct, frozen=True, kw_only=True):
    """The density of one step by theory: from the histogram of exponents, the learning rate and Adam's betas.

    `study.theory` derives it. Assumed are FP32 masters, and that a version's number is the optimizer steps they took.
    Whole numbers are taken to stay as they are.
    """

    lr: float  # of this step
    density: float  # nothing is fitted: gradients that are independent noise, masters that began as the BF16 weights
    spread: float  # likewise, but masters lie anywhere in the cells that round to their bits: so it is in the long run
    highest: float  # as spread, with r as large as Adam can make it for every element
    by_rate: float | None  # as density, with moves stretched so that E[r] is Step.rate; None without one


class Visible(msgspec.Struct, frozen=True):
    """What a receiver of one precision sees of a step, whose weights are cast from these: `study.precision`."""

    elements: int
    changed: int  # elements whose codes differ
    density: float  # changed / elements; 0 without elements
    scales: int = 0  # how many there are: none, one a tensor, or one a row
    rescaled: int = 0  # how many of them differ


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """From one version to the next."""

    base: int  # version number
    target: int
    changes: int
    density: float
    ups: float  # fraction of the changes that go towards +∞
    mean_distance: float  # of the changes, in places
    again: float | None  # of the elements changed in the step before: the fraction changed in this one; None at first
    back: float | None  # likewise: the fraction that this step gives the bits which they had before that step
    kinds: dict[str, float]  # density by kind of layer
    bounds: Bounds
    codecs: dict[str, int]  # bytes of the whole patch by codec; empty where codecs were not asked for
    # By precision.PRECISIONS, of the tensors in F32, BF16 and F16 whose numbers are finite; empty where codecs were not
    # asked for, or without such tensors.
    precisions: dict[str, Visible]
    moved: float  # mean of |new − old| as values, over all elements of floating-point dtypes; what is not finite: 0
    # How far masters have come, in learning rates a stride: mean |new − old| / lr / stride over the exponents at which
    # that mean is 1 to 8 ULP. With a stride of 1 that is E[r], r the size of Adam's update ratio; with a larger one
    # moves back and forth cancel. None without an lr or such exponents.
    rate: float | None
    prediction: Prediction | None  # None without an lr


class TensorStudy(msgspec.Struct, frozen=True, kw_only=True):
    """One tensor over all steps."""

    name: str
    dtype: str  # as safetensors spells it
    shape: tuple[int, ...]
    kind: str  # attention, mlp, expert, embedding, norm, head or other
    depth: int | None  # number of the layer; None outside of layers
    elements: int
    changes: int  # summed over steps
    density: float  # changes / elements / steps; 0 for an empty tensor
    min: float  # of one step
    max: float


class Group(msgspec.Struct, frozen=True, kw_only=True):
    """Tensors of one kind, or of one depth, over all steps."""

    name: str  # the kind; the depth as a number, or "outside" of all layers
    tensors: int
    elements: int
    changes: int  # summed over steps
    density: float  # changes / elements / steps
    min: float  # of one step
    max: float
    sparsity: dict[str, float]  # by k, as text: mean of S_k over t


class Exponent(msgspec.Struct, frozen=True, kw_only=True):
    """What happened to the elements of one dtype and one exponent, summed over all steps."""

    dtype: str
    exponent: int | None  # e; None for whole numbers
    ulp: float | None  # the distance of neighbouring values at it; None for whole numbers
    elements: int  # once for each step
    changes: int
    probability: float  # changes / elements
    distances: tuple[int, ...]  # changes by distance, as `Report.distances` says
    sign_changes: int
    ups: int
    predicted: float | None  # probability by theory, mean over steps: as Prediction.density; None without an lr
    spread: float | None  # likewise, as Prediction.spread
    highest: float | None  # likewise, as Prediction.highest
    rate: float | None  # mean |new − old| / lr / stride: E[r] where moves are of a few ULP; None without an lr


class Recurrence(msgspec.Struct, frozen=True, kw_only=True):
    """How often the same elements change."""

    again: float | None  # mean of Step.again over steps that have one, weighed by changes; None without any
    back: float | None  # likewise
    expected_again: float | None  # what `again` would be if only the exponent mattered, and chance
    steps: int  # of the longest run of versions that follow each other by a stride
    times: tuple[int, ...]  # elements of that run by how often they changed in it: never, once, twice, …
    returned: int  # elements that changed in it and have their first bits again at its end


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """A study: report.json."""

    format: str = FORMAT
    format_version: int = FORMAT_VERSION
    pulse_rl: str  # the version of the library that counted
    source: Literal["checkpoints", "store", "run"]
    location: str  # as it was given
    versions: tuple[Version, ...]  # two at least
    stride: int  # in version numbers
    elements: int
    full_nbytes: int
    settings: Settings | None  # None: no learning rate is known; what needs one, and predictions, are None then
    spans: tuple[Span, ...]  # k rising, as far as the versions reach; the first is k = 1
    steps: tuple[Step, ...]
    tensors: tuple[TensorStudy, ...]  # in canonical order
    kinds: tuple[Group, ...]  # most elements first
    depths: tuple[Group, ...]  # rising; "outside" last
    distances: tuple[int, ...]  # the largest distance in each column of Exponent.distances: 1, 2, 4, 8, …
    exponents: tuple[Exponent, ...]  # those that occur; by dtype, rising
    recurrence: Recurrence
    notes: tuple[str, ...]  # what was left out, and why
    seconds: float  # that the counting took

    @property
    def patch_nbytes(self) -> dict[str, float]:
        """Mean bytes of a step's patch by codec, over the steps that were coded."""
        coded = [step.codecs for step in self.steps if step.codecs]
        return {name: sum(sizes[name] for sizes in coded) / len(coded) for name in coded[0]} if coded else {}

    @property
    def precisions(self) -> dict[str, list[Visible]]:
        """Step.precisions by precision, of the steps that have them."""
        names = dict.fromkeys(name for step in self.steps for name in step.precisions)
        return {name: [step.precisions[name] for step in self.steps if step.precisions] for name in names}

    @property
    def density(self) -> Summary:
        """Of one step, over time."""
        sparsity = self.spans[0].over_time
        return Summary(mean=1 - sparsity.mean, std=sparsity.std, min=1 - sparsity.max, max=1 - sparsity.min)
