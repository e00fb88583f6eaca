"""What a link costs a run: bytes, seconds and GPU use of full checkpoints and of patches, before anything is built.

    U = Tc / (Tc + S / B)

A trainer computes for Tc seconds, then everybody waits while S bits are sent over a link of B bit/s (arXiv 2602.03839;
`docs/plan.md` and the tests compare with its two points). Sizes are bits per change: the entropy of where changes are,
plus a constant, fitted to measurements: of patches to a run of 400 steps (`bench/evidence/`), of payloads to
`bench/loco/payloads.tsv`. `docs/plan.md` compares the formulas with them and lists what they leave out.
"""

import math
from typing import NamedTuple

import msgspec

from pulse_rl import units

BF16, FLOAT32 = 2, 4  # bytes
TARGET_USE = 0.9  # the GPU use for which the needed bandwidth is calculated
LARGEST_COUNT = 10**18  # of parameters, workers, trainers or steps: so that no product of them overflows


class Rates(NamedTuple):
    """The cost of a change, in bits, and of a byte of the model, in seconds of one thread that codes and applies."""

    positions: float  # at most, for where a change is; their entropy if that is less
    rest: float  # for new values or moves, and the container
    fixed_s: float = 0.0
    per_density_s: float = 0.0  # more, times the density
    entropy: float = 1.0  # the share of the entropy of positions that is paid


RATES = {
    # Measured 17.0 to 22.4 bits at densities of 4.3 to 0.26 %, within 0.8 of this.
    "gap": Rates(math.inf, 11.8, 1.4e-10, 2.1e-8),
    # Given the old exponents, positions cost about the same at any density. Measured 4.8 bits in a run's first twenty
    # steps, 6.0 in the next, and 6.4 to 7.6 from then on.
    "context": Rates(5.4, 1.6, 6e-10, 2.5e-7),
}
# A view in FP8 with a scale for each row, by `context`: 80.3 kB of BF16's 421 kB; one in blocks took 0.33 of a publish
# on top (docs/views.md: one run of a model of 135M, whose embedding, a fifth of it, stays BF16).
VIEW = "fp8 view"
VIEW_SHARE, VIEW_TIME = 80.3 / 421, 0.33
VIEW_RATES = RATES["context"]._replace(
    positions=VIEW_SHARE * RATES["context"].positions,
    rest=VIEW_SHARE * RATES["context"].rest,
    fixed_s=(1 + VIEW_TIME) * RATES["context"].fixed_s,
    per_density_s=(1 + VIEW_TIME) * RATES["context"].per_density_s,
)
# PULSELoCo. What a trainer sends by default (`value_dtype="log8"`): 4.4 to 5.3 bits at densities of 18 to 5 %, from 5 %
# below to 13 % above this ("The default's payloads" in bench/measured.md). A value is its sign and a little more;
# positions are coded given θ's exponents and the momentum, and take less than their entropy.
SENT_RATES = Rates(math.inf, 1.05, entropy=0.82)
# The means that trainers gather in a split, float32 values with similar exponents: measured 27.4 to 30 bits.
MEANS_RATES = Rates(1.9, 27.0)


class WeightTransfer(msgspec.Struct, frozen=True):
    """The weights of one version, from the trainer to the rollout workers: as a full checkpoint or as a patch.

    Attributes:
        name: "full", "gap", "context", or "fp8 view": by `context`, for workers that sample in FP8.
        nbytes: Bytes of a version.
        reduction: The bytes of "full", divided by these.
        seconds: The time over one link: the trainer's to a store, or a worker's from it.
        utilization: The share of time that the GPUs compute, with these seconds.
        bandwidth_needed: The bandwidth of that link for a utilization of 90 %, bits per second.
        direct_seconds: The time over the trainer's link if it sends to every worker itself, without a store.
        direct_utilization: The utilization with these seconds.
        coding_seconds: The time of one thread to encode and to apply; not included in `seconds`.
        dense_density: The lowest density at which "full" arrives sooner, coding included; None: at none.
    """

    name: str
    nbytes: int
    reduction: float
    seconds: float
    utilization: float
    bandwidth_needed: float
    direct_seconds: float
    direct_utilization: float
    coding_seconds: float
    dense_density: float | None


class Round(msgspec.Struct, frozen=True):
    """The traffic between trainers in one round: the steps from one exchange of PULSELoCo to the next.

    Attributes:
        name: "ddp", "diloco" or "pulseloco".
        nbytes: Bytes that one trainer receives; it sends as many.
        reduction: The bytes of "ddp", divided by these.
        seconds: The time over one trainer's link.
        utilization: The share of time that the GPUs compute.
        bandwidth_needed: The bandwidth of each trainer's link for a utilization of 90 %, bits per second.
    """

    name: str
    nbytes: int
    reduction: float
    seconds: float
    utilization: float
    bandwidth_needed: float


class Plan(msgspec.Struct, frozen=True):
    """The result of `plan`, and the settings that it is for.

    Attributes:
        params: Parameters of the model.
        density: The fraction of elements that change from version to version.
        bandwidth: Bits per second of each link, each way.
        compute_s: Seconds of a step.
        workers: The number of rollout workers.
        trainers: The number of trainers.
        sync_every: Steps of a round.
        loco_density: The fraction of elements that PULSELoCo sends in a round.
        weights: A full checkpoint, a patch by each codec, and one of a view.
        rounds: The traffic between trainers, by method; empty with one trainer.
    """

    params: int
    density: float
    bandwidth: float
    compute_s: float
    workers: int
    trainers: int
    sync_every: int
    loco_density: float
    weights: tuple[WeightTransfer, ...]
    rounds: tuple[Round, ...]


def plan(
    *,
    params: int,
    density: float,
    bandwidth: float | str,
    compute_s: float,
    workers: int = 1,
    trainers: int = 1,
    sync_every: int = 8,
    loco_density: float = 0.1,
) -> Plan:
    """Calculate what links cost a run: bytes, seconds and GPU use of full checkpoints and of patches.

    A version is published after every step, and everybody waits for it. Sizes of patches follow measurements;
    docs/plan.md has the formulas and what they leave out.

    Args:
        params: Parameters of the model, which is published in BF16.
        density: The fraction of elements that change from version to version.
        bandwidth: Bits per second of each link, each way; a number, or text with a unit: "200Mbit", "25MB/s".
        compute_s: Seconds of a step, without its sync.
        workers: The number of rollout workers. Default: 1.
        trainers: The number of trainers. Default: 1, which exchanges nothing.
        sync_every: Steps between two exchanges of DiLoCo or PULSELoCo. Default: 8.
        loco_density: The fraction of elements that PULSELoCo sends in an exchange. Default: 0.1.

    Returns:
        The plan.

    Raises:
        ValueError: A count below 1 or above 10^18, a time or bandwidth not above 0, or a fraction outside (0, 1].
    """
    if isinstance(bandwidth, str):
        bandwidth = units.parse_bandwidth(bandwidth, "bandwidth")
    counts = {"params": params, "workers": workers, "trainers": trainers, "sync_every": sync_every}
    for name, count in counts.items():
        if not 1 <= count <= LARGEST_COUNT:
            raise ValueError(f"{name}: expected 1 to {LARGEST_COUNT:.0e}, found {min(count, 1e300):.3g}")
    for name, amount in (("bandwidth", bandwidth), ("compute_s", compute_s)):
        if not 0 < amount < math.inf:
            raise ValueError(f"{name}: expected more than 0, found {amount:g}")
    for name, fraction in (("density", density), ("loco_density", loco_density)):
        if not 0 < fraction <= 1:
            raise ValueError(f"{name}: expected a fraction above 0, at most 1, found {fraction:g}")
    return Plan(
        **counts,
        density=density,
        bandwidth=bandwidth,
        compute_s=compute_s,
        loco_density=loco_density,
        weights=tuple(
            _transfer(name, params, density, bandwidth, compute_s, workers) for name in ("full", *RATES, VIEW)
        ),
        rounds=_rounds(params, bandwidth, sync_every * compute_s, trainers, sync_every, loco_density),
    )


def utilization(compute_s: float, transfer_s: float) -> float:
    """The share of time spent computing."""
    return compute_s / (compute_s + transfer_s)


def bandwidth_needed(compute_s: float, nbytes: float) -> float:
    """The bandwidth, bit/s, at which the utilization is TARGET_USE."""
    return 8 * nbytes * TARGET_USE / (1 - TARGET_USE) / compute_s


def bits(rates: Rates, density: float) -> float:
    """Bits per element of the model, changed or not."""
    entropy = -sum(p * math.log2(p) for p in (density, 1 - density) if p)
    return min(rates.entropy * entropy, rates.positions * density) + rates.rest * density


def _transfer(
    name: str, params: int, density: float, bandwidth: float, compute_s: float, workers: int
) -> WeightTransfer:
    full = params * BF16
    rates = VIEW_RATES if name == VIEW else RATES.get(name)
    nbytes = full if rates is None else params * bits(rates, density) / 8
    seconds = 8 * nbytes / bandwidth
    return WeightTransfer(
        name=name,
        nbytes=round(nbytes),
        reduction=full / nbytes,
        seconds=seconds,
        utilization=utilization(compute_s, seconds),
        bandwidth_needed=bandwidth_needed(compute_s, nbytes),
        direct_seconds=workers * seconds,
        direct_utilization=utilization(compute_s, workers * seconds),
        coding_seconds=full * _coding(rates, density) if rates else 0.0,
        dense_density=_dense_density(rates, bandwidth) if rates else None,
    )


def _coding(rates: Rates, density: float) -> float:
    """Seconds of one thread per byte of the model."""
    return rates.fixed_s + rates.per_density_s * density


def _dense_density(rates: Rates, bandwidth: float) -> float | None:
    """The lowest density, in tenths of a per cent, at which coding and sending a patch takes as long as the model."""
    full_s = 8 * BF16 / bandwidth  # per parameter
    densities = (k / 1000 for k in range(1001))
    slower = (d for d in densities if bits(rates, d) / bandwidth + BF16 * _coding(rates, d) >= full_s)
    return next(slower, None)


def _rounds(
    params: int, bandwidth: float, compute_s: float, trainers: int, sync_every: int, density: float
) -> tuple[Round, ...]:
    """The traffic of a round by each method. compute_s: of the round's steps."""
    if trainers == 1:
        return ()
    others = trainers - 1
    dense = 2 * others / trainers * params * FLOAT32  # a ring: first ranges to be added up, then their means
    union = 1 - (1 - density) ** trainers
    payload, means = params * bits(SENT_RATES, density) / 8, params * bits(MEANS_RATES, union) / 8
    sizes = {
        "ddp": sync_every * dense,
        "diloco": dense,
        # Every payload whole, or each trainer's range of every payload and then all means: `loco.exchange` chooses.
        "pulseloco": min(others * payload, others / trainers * (payload + means)),
    }
    return tuple(
        Round(
            name=name,
            nbytes=round(nbytes),
            reduction=sizes["ddp"] / nbytes,
            seconds=8 * nbytes / bandwidth,
            utilization=utilization(compute_s, 8 * nbytes / bandwidth),
            bandwidth_needed=bandwidth_needed(compute_s, nbytes),
        )
        for name, nbytes in sizes.items()
    )
