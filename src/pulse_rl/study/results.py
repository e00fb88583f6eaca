"""The result of a study: report.json, as typed records.

Everything is counted on stored bits, exactly, except where a field says that it is predicted. The words:

- A *version* is one of the states that were studied. Its number is the optimizer step, where that is known.
- The *stride* is the commonest distance between neighbouring versions. A *step* leads from a version to the next one, a
  stride later; k steps lead to the version k strides later. Versions at other distances are not compared.
- *Density* is changes / elements; *sparsity* is 1 − density. Both are fractions, never per cent.
- The *distance* of a change counts places in the order of the dtype's values: 1 is the neighbouring value, 1 ULP away.
  −0 and +0 are two places. More than half of all places is counted the short way around. A distance of 2^52 or more,
  which 64-bit elements can have, counts as 2^52 − 1.
- An *exponent* e is that of the old value: |w| is in [2^e, 2^(e+1)). A dtype's lowest, one below that of the smallest
  normal numbers, has its subnormals and zeros; its highest has infinities and NaNs. Whole numbers have one row.

Sizes are in bytes, entropies in bits. A reader must refuse a `format_version` that it does not know.
"""

from typing import Literal

import msgspec

FORMAT = "pulse-rl/study"
FORMAT_VERSION = 1
SPANS = (1, 2, 4, 8, 16, 32)  # k, of the k-step sparsity


class Version(msgspec.Struct, frozen=True, kw_only=True):
    """One state of the weights.

    Attributes:
        number: The version; numbers rise strictly.
        name: The name of the checkpoint's file or directory, or "version N" of a history.
    """

    number: int
    name: str


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """What predictions need to know of Adam.

    Attributes:
        lr: The learning rate.
        betas: Adam's betas.
        warmup: Steps in which the learning rate rises linearly to `lr`. Default: 0, `lr` from the first step.
    """

    lr: float
    betas: tuple[float, float]
    warmup: int = 0


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """One number over time.

    Attributes:
        mean: The mean.
        std: The standard deviation over time, of the population.
        min: The lowest.
        max: The highest.
    """

    mean: float
    std: float
    min: float
    max: float


class KStepSparsity(msgspec.Struct, frozen=True, kw_only=True):
    """The k-step sparsity S_k(t): the fraction of elements with the same bits k steps after t as at t.

    Attributes:
        k: The number of steps.
        bases: Every version t that has a version k steps later; at least one.
        sparsity: S_k(t), by base.
        over_time: The summary of `sparsity`.
    """

    k: int
    bases: tuple[int, ...]
    sparsity: tuple[float, ...]
    over_time: Summary


class Bounds(msgspec.Struct, frozen=True, kw_only=True):
    """Entropies of one step: the fewest bits for its positions and moves under a model, all changes together.

    The frequencies are those of the step itself, and the bits to transmit them are not counted. A *position* is
    whether an element changed, a *move* the direction and distance of a change.

    Attributes:
        positions_uniform: One probability for all elements.
        positions_by_tensor: One for each tensor.
        positions_by_exponent: One for each exponent of a dtype.
        positions: One for each exponent of each tensor.
        moves_by_exponent: Moves, given the exponent, with one table for each dtype.
        moves: Moves, given the exponent, with one table for each tensor.
    """

    positions_uniform: float
    positions_by_tensor: float
    positions_by_exponent: float
    positions: float
    moves_by_exponent: float
    moves: float

    @property
    def total(self) -> float:
        """Positions and moves with tables for each tensor: the bound that `bench codec` compares with."""
        return self.positions + self.moves


class Prediction(msgspec.Struct, frozen=True, kw_only=True):
    """The density of one step by theory: from the histogram of exponents, the learning rate and Adam's betas.

    `study.explain.theory` derives it. Assumed are FP32 masters, and that a version's number is their optimizer step.
    Whole numbers are taken not to change.

    Attributes:
        lr: The learning rate of this step.
        density: With nothing fitted: gradients are independent noise, and masters began as the BF16 weights.
        spread: As `density`, but with masters anywhere in the cells that round to their bits, as in a long run.
        highest: As `spread`, with r as large as Adam can make it, for every element.
        by_rate: As `density`, with moves scaled so that E[r] is the step's `rate`; None without one.
    """

    lr: float
    density: float
    spread: float
    highest: float
    by_rate: float | None


class Visible(msgspec.Struct, frozen=True):
    """What receivers of one precision see of a step, whose weights are cast from these (`study.measure.precision`).

    Attributes:
        elements: The number of elements.
        changed: Elements whose codes differ.
        density: changed / elements; 0 without elements.
        scales: The number of scales: none, one per tensor, or one per row.
        rescaled: Scales that differ.
    """

    elements: int
    changed: int
    density: float
    scales: int = 0
    rescaled: int = 0


class StepStudy(msgspec.Struct, frozen=True, kw_only=True):
    """One step: from a version to the next, a stride later.

    Attributes:
        base: The version before.
        target: The version after.
        changes: Elements whose bits differ.
        density: changes / elements.
        ups: The fraction of the changes that go towards +∞.
        mean_distance: The mean distance of the changes, in places.
        again: The fraction of the elements changed in the step before that change in this one too; None in the first.
        back: Likewise, the fraction that return to the bits that they had before that step.
        kinds: Density by kind of layer.
        bounds: Entropies.
        codecs: Bytes of the whole patch, by codec; empty if codecs were not asked for.
        precisions: What other precisions see, by name of `study.measure.precision`, of the tensors in F32, BF16 and F16
            whose numbers are finite; empty if codecs were not asked for, or without such tensors.
        moved: Mean of |new − old| as values, over all elements of floating-point dtypes; 0 where that is not finite.
        rate: The mean move of the masters, in learning rates per stride: mean |new − old| / lr / stride over the
            exponents at which |new − old| is 1 to 8 ULP in the mean. With a stride of 1 it is E[r], r being Adam's
            update ratio; with a larger stride, moves back and forth cancel. None without a learning rate or such
            exponents.
        prediction: The density by theory; None without a learning rate.
    """

    base: int
    target: int
    changes: int
    density: float
    ups: float
    mean_distance: float
    again: float | None
    back: float | None
    kinds: dict[str, float]
    bounds: Bounds
    codecs: dict[str, int]
    precisions: dict[str, Visible]
    moved: float
    rate: float | None
    prediction: Prediction | None


class TensorStudy(msgspec.Struct, frozen=True, kw_only=True):
    """One tensor over all steps.

    Attributes:
        name: The tensor's name.
        dtype: The dtype, as safetensors spells it.
        shape: The shape.
        kind: The kind of layer: attention, mlp, expert, embedding, norm, head or other.
        depth: The number of the layer; None outside of layers.
        elements: The number of elements.
        changes: Changes, summed over steps.
        density: changes / elements / steps; 0 for an empty tensor.
        min: The lowest density of a step.
        max: The highest density of a step.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    kind: str
    depth: int | None
    elements: int
    changes: int
    density: float
    min: float
    max: float


class TensorGroup(msgspec.Struct, frozen=True, kw_only=True):
    """The tensors of one kind, or of one depth, over all steps.

    Attributes:
        name: The kind; or the depth, as a number, "outside" for tensors outside of layers.
        tensors: The number of tensors.
        elements: The number of elements.
        changes: Changes, summed over steps.
        density: changes / elements / steps.
        min: The lowest density of a step.
        max: The highest density of a step.
        sparsity: The mean of S_k over time, by k as text.
    """

    name: str
    tensors: int
    elements: int
    changes: int
    density: float
    min: float
    max: float
    sparsity: dict[str, float]


class Exponent(msgspec.Struct, frozen=True, kw_only=True):
    """The elements of one dtype and one exponent, summed over all steps.

    Attributes:
        dtype: The dtype, as safetensors spells it.
        exponent: e; None for whole numbers.
        ulp: The distance of neighbouring values; None for whole numbers.
        elements: The number of elements, each counted once per step.
        changes: Elements that changed.
        probability: changes / elements.
        distances: Changes by distance; `Report.distances` has the columns.
        sign_changes: Changes of the sign.
        ups: Changes towards +∞.
        predicted: The probability by theory, mean over steps, as `Prediction.density`; None without a learning rate.
        spread: Likewise, as `Prediction.spread`.
        highest: Likewise, as `Prediction.highest`.
        rate: Mean |new − old| / lr / stride: E[r] where moves are a few ULP; None without a learning rate.
    """

    dtype: str
    exponent: int | None
    ulp: float | None
    elements: int
    changes: int
    probability: float
    distances: tuple[int, ...]
    sign_changes: int
    ups: int
    predicted: float | None
    spread: float | None
    highest: float | None
    rate: float | None


class Recurrence(msgspec.Struct, frozen=True, kw_only=True):
    """How often the same elements change.

    Attributes:
        again: The mean of `StepStudy.again`, weighted by changes; None if no step has one.
        back: Likewise, of `StepStudy.back`.
        expected_again: What `again` would be if changes depended on the exponent and chance alone.
        steps: The length of the longest run: versions that follow each other, a stride apart.
        times: Elements by how often they changed in that run: never, once, twice, …
        returned: Elements that changed in that run and have their first bits again at its end.
    """

    again: float | None
    back: float | None
    expected_again: float | None
    steps: int
    times: tuple[int, ...]
    returned: int


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """A study's result, as in report.json.

    Attributes:
        format: "pulse-rl/study".
        format_version: The version of this format.
        pulse_rl: The version of the library that counted.
        source: What was studied: "checkpoints", "store" or "run".
        location: Its paths or URL, as given.
        versions: The versions, at least two.
        stride: The commonest distance between neighbouring versions.
        elements: Elements of the model.
        full_nbytes: Bytes of the model.
        settings: Adam's settings. None: no learning rate is known, and everything that needs one is None.
        spans: The k-step sparsity, k rising from 1 as far as the versions reach.
        steps: The steps, in order.
        tensors: The tensors, in canonical order.
        kinds: The kinds of layers, most elements first.
        depths: The layers, in order; tensors outside of layers last.
        distances: The largest distance in each column of `Exponent.distances`: 1, 2, 4, 8, …
        exponents: The exponents that occur, by dtype, rising.
        recurrence: How often the same elements change.
        notes: What was left out, and why.
        seconds: The time that the counting took.
    """

    format: str = FORMAT
    format_version: int = FORMAT_VERSION
    pulse_rl: str
    source: Literal["checkpoints", "store", "run"]
    location: str
    versions: tuple[Version, ...]
    stride: int
    elements: int
    full_nbytes: int
    settings: Settings | None
    spans: tuple[KStepSparsity, ...]
    steps: tuple[StepStudy, ...]
    tensors: tuple[TensorStudy, ...]
    kinds: tuple[TensorGroup, ...]
    depths: tuple[TensorGroup, ...]
    distances: tuple[int, ...]
    exponents: tuple[Exponent, ...]
    recurrence: Recurrence
    notes: tuple[str, ...]
    seconds: float

    @property
    def patch_nbytes(self) -> dict[str, float]:
        """Mean bytes of a step's patch, by codec; empty if codecs were not asked for."""
        coded = [step.codecs for step in self.steps if step.codecs]
        return {name: sum(sizes[name] for sizes in coded) / len(coded) for name in coded[0]} if coded else {}

    @property
    def precisions(self) -> dict[str, list[Visible]]:
        """What each other precision sees, step by step, of the steps that have it."""
        names = dict.fromkeys(name for step in self.steps for name in step.precisions)
        return {name: [step.precisions[name] for step in self.steps if step.precisions] for name in names}

    @property
    def density(self) -> Summary:
        """The density of a step, over time."""
        sparsity = self.spans[0].over_time
        return Summary(mean=1 - sparsity.mean, std=sparsity.std, min=1 - sparsity.max, max=1 - sparsity.min)
