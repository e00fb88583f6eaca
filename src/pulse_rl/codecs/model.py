"""The statistics that the context codec starts every segment from, learned from a block and sent with it.

Segments are coded independently, so what they have in common is sent once: for each of at most two classes of segments
(in practice the embedding and the rest, whose rates of change differ by a factor) a threshold and the probability of
every context, as logarithm of its odds in quarters of a bit. All of the learning is integer arithmetic, so that the
same changes give the same bytes on every machine.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pulse_rl.dtypes import Field
from pulse_rl.errors import FormatError
from pulse_rl.kernels.cpu import context
from pulse_rl.kernels.cpu.context import Start
from pulse_rl.kernels.cpu.rangecoder import SEEN, log2

Ints = NDArray[np.int64]

CLASSES = 2
ODDS = 64  # the largest logarithm of odds, in quarters: 2^16 to 1
PRIOR = 60  # bits that an initial probability counts for when a segment adapts it
PLAIN = -1  # in place of a class: of a segment whose stream is its new elements
ROUNDS = 8  # of 2-means; it settles in three or four


def _probability(odds: int) -> int:
    """2^32 times the probability whose odds are 2^(odds / 4), rounded down."""
    power = math.isqrt(math.isqrt(1 << (256 + odds)))  # 2^64 · 2^(odds / 4)
    return (power << 32) // (power + (1 << 64))


PROBABILITIES: Ints = np.array([_probability(odds) for odds in range(-ODDS, ODDS + 1)], np.int64)
# Costs are in 2^-16 bits: there are millions of elements, and a tenth of a percent of them changes.
FINE = 16
_COST_1: Ints = (32 << FINE) - log2(PROBABILITIES, FINE)  # of a 1 and of a 0
_COST_0: Ints = (32 << FINE) - log2((1 << 32) - PROBABILITIES, FINE)


class Model(NamedTuple):
    """The statistics of one class of segments. All odds are in [−ODDS, ODDS]."""

    threshold: int  # elements with a smaller exponent are hot
    activity: Ints  # (E,) odds of a change, by exponent
    levels: Ints  # (LEVELS,) what a row's activity adds to them
    rest: Ints  # (contexts − LEVELS · E,) odds of all other contexts

    def start(self) -> Start:
        """What every segment of the class starts from. The coder changes the states: each segment needs a copy."""
        hot = np.clip(self.activity[:, None] + self.levels, -ODDS, ODDS).reshape(-1)
        states: Ints = (PROBABILITIES[np.concatenate([hot, self.rest]) + ODDS] << SEEN) | PRIOR
        return Start(self.threshold, share(self.activity), states)


def share(activity: Ints) -> Ints:
    """(E,) probability of a change by exponent, in 2^-16."""
    return PROBABILITIES[activity + ODDS] >> 16


def blank(field: Field) -> Model:
    """A model that takes next to no bytes, for a class that no segment starts from."""
    every = context.tables(field.exponents).size
    zeros: Ints = np.zeros(every, np.int64)
    hot = context.LEVELS * field.exponents
    return Model(0, zeros[: field.exponents], zeros[: context.LEVELS], zeros[hot:])


def _odds(ones: Ints, zeros: Ints) -> Ints:
    """The logarithm of ones / zeros (both at least 1) in quarters, rounded to the nearest."""
    of_ones, of_zeros = log2(np.stack([ones, zeros]))  # one call: the arrays are small
    odds: Ints = np.clip((of_ones - of_zeros + 32) >> 6, -ODDS, ODDS)
    return odds


class ExponentCounts(NamedTuple):
    """How many elements of segments have which exponent: only exponents that some have, and they are few."""

    exponents: Ints  # (c,), ascending
    elements: Ints  # (segments, c)
    changes: Ints  # (segments, c), of those that change: at most as many

    def all_of(self, segments: NDArray[np.bool_], exponents: int) -> tuple[Ints, Ints]:
        """The elements of some segments, and those that change, by exponent: (E,) each."""
        every = np.zeros((2, exponents), np.int64)
        every[:, self.exponents] = self.elements[segments].sum(0), self.changes[segments].sum(0)
        return every[0], every[1]


def join(several: Sequence[ExponentCounts]) -> ExponentCounts:
    """The counts of segments one after another."""
    exponents = np.unique(np.concatenate([each.exponents for each in several]))
    counts = np.zeros((2, sum(len(each.elements) for each in several), len(exponents)), np.int64)
    at = 0
    for each in several:
        end = at + len(each.elements)
        counts[:, at:end, np.searchsorted(exponents, each.exponents)] = each.elements, each.changes
        at = end
    return ExponentCounts(exponents, counts[0], counts[1])


def classify(counted: ExponentCounts, exponents: int) -> tuple[Ints, list[Ints]]:
    """Divide segments into at most CLASSES by the rate at which each exponent changes: 2-means over code lengths.

    Returns each segment's class, and each class's activity, (exponents,).
    """
    seen, elements, changes = counted
    total, changed = elements.sum(0), changes.sum(0)
    classes = min(CLASSES, len(elements))
    expected = (elements @ ((changed << 16) // total)) >> 16
    order = np.argsort(((2 * changes.sum(1) + 1) << 20) // (2 * expected + 1), kind="stable")
    reached = np.cumsum(changes.sum(1)[order])
    mine = np.empty(len(elements), np.int64)
    mine[order] = np.minimum(classes - 1, classes * (reached - 1) // reached[-1])
    prior = (128 * changed) // total  # eight elements of the average, in sixteenths
    # Products of float64 are much faster than those of integers, and exact: all of these are whole and below 2^53.
    ones_of, all_of = changes.astype(np.float64), elements.astype(np.float64)
    for _ in range(ROUNDS):
        member = (mine == np.arange(classes)[:, None]).astype(np.float64)
        ones, every = ((member @ each).astype(np.int64) for each in (ones_of, all_of))
        activity = _odds(16 * ones + prior + 1, 16 * (every - ones) + 128 - prior + 1)
        cost_1, cost_0 = (cost[activity + ODDS].T for cost in (_COST_1, _COST_0))
        costs = ones_of @ (cost_1 - cost_0).astype(np.float64) + all_of @ cost_0.astype(np.float64)
        nearest = np.argmin(costs, axis=1)
        if np.array_equal(nearest, mine):
            break
        mine = nearest
    return mine, [_spread(found, seen, exponents) for found in activity]


def _spread(activity: Ints, seen: Ints, exponents: int) -> Ints:
    """The odds of all exponents, from those of the ones that elements have."""
    every = np.full(exponents, _odds(np.array([1]), np.array([129]))[0])
    every[seen] = activity
    return every


def threshold(elements: Ints, changes: Ints, activity: Ints, price: int) -> int:
    """The exponent below which elements are hot: the one with the least cost in bits.

    A hot element costs its decision, and `price` 1/2048 bits for the time that it takes; a cold change costs its place
    among all cold elements, and a tenth of a bit because gaps are coded less well than that.
    """
    hot = changes * _COST_1[activity + ODDS] + (elements - changes) * _COST_0[activity + ODDS]
    hot += elements * (price << FINE >> 11)
    before = np.concatenate([[0], np.cumsum(hot)])
    ones = changes.sum() - np.concatenate([[0], np.cumsum(changes)])
    every = elements.sum() - np.concatenate([[0], np.cumsum(elements)])

    def information(count: Ints) -> Ints:
        return count * log2(np.maximum(count, 1), FINE)

    cold = information(every) - information(ones) - information(every - ones) + ones * (1 << FINE) // 10
    return int(np.argmin(before + cold))


def learn(field: Field, threshold: int, activity: Ints, counts: Ints, all_counts: Ints) -> Model:
    """The model of a class. counts, all_counts: (contexts,) ones << 32 | bits, of the class and of all classes."""
    split = context.LEVELS * field.exponents
    ones, bits = counts >> 32, counts & 0xFFFFFFFF
    shape = (field.exponents, context.LEVELS)
    found, tried = ones[:split].reshape(shape), bits[:split].reshape(shape)
    # The counts, and eight elements at the rate of all classes: the activity that divided the classes is from a thin
    # sample, and far off for the rare small exponents.
    all_hot = all_counts[:split].reshape(shape).sum(1)
    prior = (128 * (all_hot >> 32)) // np.maximum(all_hot & 0xFFFFFFFF, 1)
    every = tried.sum(1)
    counted = _odds(16 * found.sum(1) + prior + 1, 16 * (every - found.sum(1)) + 128 - prior + 1)
    activity = np.where(every > 0, counted, activity)
    activity[threshold:] = activity[threshold - 1] if threshold else 0  # never used: equal entries take no bits
    expected = (share(activity) @ tried) >> 16
    tries = tried.sum(0)
    levels = _odds(2 * found.sum(0) + 1, 2 * (tries - found.sum(0)) + 1)
    levels -= _odds(2 * expected + 1, 2 * (tries - expected) + 1)
    # The other contexts: the counts, and eight bits at the rate of all classes.
    all_ones, all_bits = all_counts[split:] >> 32, all_counts[split:] & 0xFFFFFFFF
    used = all_bits > 0
    ones, bits, all_ones, all_bits = (each[used] for each in (ones[split:], bits[split:], all_ones, all_bits))
    prior = (128 * (5 * all_ones + 2)) // (5 * all_bits + 4)
    rest = np.zeros(len(used), np.int64)
    rest[used] = _odds(16 * ones + prior + 1, 16 * (bits - ones) + 128 - prior + 1)
    at = 0
    for _, (rows, columns) in _tables(field):
        # A context that never occurs repeats the entry above, which takes no bits.
        seen = used[at : at + rows * columns].reshape(rows, columns)
        above = np.maximum.accumulate(np.where(seen, np.arange(rows)[:, None], 0), axis=0)
        table = rest[at : at + rows * columns].reshape(rows, columns)
        table[:] = np.take_along_axis(table, above, axis=0)
        at += rows * columns
    return Model(threshold, activity, np.clip(levels, -ODDS, ODDS), rest)


# Kinds of numbers in a block's head: numbers of one kind share statistics.
THRESHOLD, LEVEL, ACTIVITY, UNARY, SCALE, TOP, GAP, SIGN, CLASS, LENGTH, MEAN = range(11)


def _tables(field: Field) -> list[tuple[int, tuple[int, int]]]:
    """The tables of `Model.rest`, in order: kind, and (rows, columns)."""
    e = field.exponents
    scales = e + context.SCALES
    return [
        (UNARY, (e, context.UNARY)),
        (SCALE, (scales, 1)),
        (TOP, (scales, 3)),
        (GAP, (64, 1)),
        (SIGN, (context.SIGNS, 1)),
    ]


def kinds(field: Field) -> list[int]:
    """The kinds of the numbers that a model is sent as."""
    numbers = [THRESHOLD] + [LEVEL] * context.LEVELS + [ACTIVITY] * field.exponents
    for kind, (rows, columns) in _tables(field):
        numbers += [kind] * (rows * columns)
    return numbers


def zigzag(values: Ints) -> Ints:
    """Map whole numbers to numbers from 0: 0, −1, 1, −2, … become 0, 1, 2, 3, …"""
    return (values << 1) ^ (values >> 63)


def unzigzag(values: Ints) -> Ints:
    """The inverse."""
    return (values >> 1) ^ -(values & 1)


def to_numbers(model: Model, before: Model | None, field: Field) -> list[int]:
    """A model as whole numbers: tables column by column, each entry minus the one above it.

    before: the model sent before this one, whose entries are subtracted first.
    """
    activity, rest = model.activity, model.rest
    if before is not None:
        activity, rest = activity - before.activity, rest - before.rest
    columns = [activity]
    at = 0
    for _, (rows, count) in _tables(field):
        columns += list(rest[at : at + rows * count].reshape(rows, count).T)
        at += rows * count
    coded = [zigzag(np.diff(column, prepend=0)) for column in columns]
    return [model.threshold, *zigzag(model.levels).tolist(), *np.concatenate(coded).tolist()]


def from_numbers(values: Ints, before: Model | None, field: Field) -> Model:
    """The inverse. Raises FormatError for odds or a threshold out of range."""
    threshold = int(values[0])
    values = unzigzag(values)
    at = 1 + context.LEVELS
    activity = np.cumsum(values[at : at + field.exponents])
    at += field.exponents
    parts = []
    for _, (rows, count) in _tables(field):
        parts.append(np.cumsum(values[at : at + rows * count].reshape(count, rows), axis=1).T.reshape(-1))
        at += rows * count
    rest = np.concatenate(parts)
    if before is not None:
        activity, rest = activity + before.activity, rest + before.rest
    model = Model(threshold, activity, values[1 : 1 + context.LEVELS], rest)
    odds = np.concatenate([activity, model.levels, rest])
    if not 0 <= model.threshold <= field.exponents or np.abs(odds).max() > ODDS:
        raise FormatError(
            f"context block: expected a threshold of at most {field.exponents} and odds within ±{ODDS}, "
            f"found {model.threshold} and {int(np.abs(odds).max())}"
        )
    return model


# The head: for each group of segments of one dtype its models, the mean, and class and length of each segment


def group_kinds(field: Field, members: int) -> bytes:
    """The kinds of the head's numbers for a group of this many segments."""
    models = bytes(kinds(field)) * min(CLASSES, members)
    return models + bytes([MEAN]) + bytes([CLASS, LENGTH]) * members


def group_numbers(
    field: Field, changed: Ints, classes: Ints, models: list[Model], streams: Sequence[bytes]
) -> list[int]:
    """The numbers of a group. A stream's length is stated as the difference from what the mean predicts."""
    plain = classes == len(models)
    if plain.all():
        models = [blank(field)] * len(models)
    numbers: list[int] = []
    for before, learned in zip([None, *models], models, strict=False):
        numbers += to_numbers(learned, before, field)
    lengths = np.array(list(map(len, streams)))
    mean = (int(lengths[~plain].sum()) << 8) // max(1, int(changed[~plain].sum()))
    residues = np.where(plain, 0, zigzag(lengths - ((changed * mean) >> 8)))
    return [*numbers, mean, *np.stack([classes, residues], axis=1).reshape(-1).tolist()]


def read_group(numbers: Ints, field: Field, changed: Ints, full: Ints) -> tuple[list[Model], Ints, Ints]:
    """The inverse of `group_numbers`: the models, and the class, or PLAIN, and the bytes of each segment's stream.

    changed, full: (segments,) changes and bytes of each. Raises FormatError for a class or a length out of range.
    """
    width = len(kinds(field))
    models: list[Model] = []
    for place in range(min(CLASSES, len(full))):
        before = models[-1] if models else None
        models.append(from_numbers(numbers[place * width : (place + 1) * width], before, field))
    mean, rest = int(numbers[len(models) * width]), numbers[len(models) * width + 1 :]
    classes, plain = rest[::2], rest[::2] == len(models)
    nbytes = np.where(plain, full, ((changed * mean) >> 8) + unzigzag(rest[1::2]))
    wrong = np.flatnonzero((classes > len(models)) | (nbytes < 0) | (nbytes > full))
    if len(wrong):
        at = wrong[0]
        raise FormatError(
            f"context block: a segment of {full[at]} bytes has class {classes[at]} and {nbytes[at]} bytes"
        )
    return models, np.where(plain, PLAIN, classes), nbytes
