"""What a link asks of a run: bytes, seconds and GPU use of full checkpoints and of patches, before anything is built.

    U = Tc / (Tc + S / B)

A trainer computes for Tc seconds, then everybody waits while S bits go over a link of B bit/s (arXiv 2602.03839, with
whose two points `docs/plan.md` and the tests compare). Sizes come from what this library's patches were measured to
take (bench/README.md, "Codecs" and "Trainers"), as bits a change: the entropy of where changes are, and a constant.
`docs/plan.md` has the formulas beside the measurements, and what they leave out.
"""

import math
from typing import NamedTuple

import msgspec

BF16, FLOAT32 = 2, 4  # bytes
SHARE = 0.9  # the GPU use that the needed bandwidth is told for


class Rates(NamedTuple):
    """What a change takes, in bits, and a byte of the model, in seconds of one thread for coding and applying."""

    positions: float  # at most; where changes are evenly spread it is their entropy, if that is less
    rest: float  # new values or moves, and the container
    fixed_s: float
    each_s: float  # more of it where all elements change


RATES = {
    # 19.5 to 25.5 bits at densities of 0.14 to 5.5 %, within 0.6 of this.
    "gap": Rates(math.inf, 14.4, 1.34e-10, 9.5e-9),
    # 5.6 to 6.0 bits for a step once a run is under way; given the old exponents, positions do not depend on density.
    "context": Rates(4.2, 1.6, 6.3e-10, 8.9e-8),
}
SENT = Rates(1.9, 27.0, 0.0, 0.0)  # of PULSELoCo, 27.4 to 28.9 bits: values are float32, and their exponents are alike


class Way(msgspec.Struct, frozen=True):
    """One way to bring a version from the trainer to the rollout workers."""

    name: str  # full, gap or context
    nbytes: int  # of a version
    reduction: float  # against full
    seconds: float  # over one link: the trainer's to a store, or a worker's from it
    utilization: float  # U with these seconds
    bandwidth_needed: float  # bit/s of that link for U = SHARE
    direct_seconds: float  # from the trainer's link to every worker, without a store between
    direct_utilization: float
    coding_seconds: float  # of one thread, encode and apply together; not in `seconds`
    dense_density: float | None  # from here on full is there sooner, coding counted; None: at no density


class Round(msgspec.Struct, frozen=True):
    """One way for trainers to stay together, over as many steps as PULSELoCo takes between two exchanges."""

    name: str  # ddp, diloco or pulseloco
    nbytes: int  # that one trainer receives; it sends as many
    reduction: float  # against DDP
    seconds: float
    utilization: float
    bandwidth_needed: float  # bit/s of each trainer's link for U = SHARE


class Plan(msgspec.Struct, frozen=True):
    """What was asked, and what it comes to."""

    params: int
    density: float
    bandwidth: float  # bit/s
    compute_s: float  # of a step
    workers: int
    trainers: int
    sync_every: int
    loco_density: float
    weights: tuple[Way, ...]
    rounds: tuple[Round, ...]  # none with one trainer


def utilization(compute_s: float, transfer_s: float) -> float:
    """The share of time that is spent computing."""
    return compute_s / (compute_s + transfer_s)


def bandwidth_needed(compute_s: float, nbytes: float) -> float:
    """Bit/s at which the utilization is SHARE."""
    return 8 * nbytes * SHARE / (1 - SHARE) / compute_s


def bits(rates: Rates, density: float) -> float:
    """Bits an element of the model, changed or not: changes times positions and rest."""
    entropy = -sum(p * math.log2(p) for p in (density, 1 - density) if p)
    return min(entropy, rates.positions * density) + rates.rest * density


def plan(
    *,
    params: int,
    density: float,
    bandwidth: float,
    compute_s: float,
    workers: int = 1,
    trainers: int = 1,
    sync_every: int = 8,
    loco_density: float = 0.03,
) -> Plan:
    """Calculate all of it. A version is published after every step.

    params: of the model, published in BF16. density: of a version's changes. bandwidth: bit/s of every link, each way.
    compute_s: seconds of a step. sync_every: steps between exchanges of DiLoCo and PULSELoCo; loco_density: of what
    PULSELoCo sends in one. Raises ValueError for what makes no sense.
    """
    whole = {"params": params, "workers": workers, "trainers": trainers, "sync_every": sync_every}
    for name, count in whole.items():
        if count < 1:
            raise ValueError(f"{name}: expected at least 1, found {count}")
    for name, amount in (("bandwidth", bandwidth), ("compute", compute_s)):
        if not 0 < amount < math.inf:
            raise ValueError(f"{name}: expected more than 0, found {amount:g}")
    for name, fraction in (("density", density), ("loco_density", loco_density)):
        if not 0 < fraction <= 1:
            raise ValueError(f"{name}: expected a fraction above 0, at most 1, found {fraction:g}")
    return Plan(
        **whole,
        density=density,
        bandwidth=bandwidth,
        compute_s=compute_s,
        loco_density=loco_density,
        weights=tuple(_way(name, params, density, bandwidth, compute_s, workers) for name in ("full", *RATES)),
        rounds=_rounds(params, bandwidth, sync_every * compute_s, trainers, sync_every, loco_density),
    )


def _way(name: str, params: int, density: float, bandwidth: float, compute_s: float, workers: int) -> Way:
    full = params * BF16
    rates = RATES.get(name)
    nbytes = full if rates is None else params * bits(rates, density) / 8
    seconds = 8 * nbytes / bandwidth
    return Way(
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
    """Seconds of one thread for a byte of the model."""
    return rates.fixed_s + rates.each_s * density


def _dense_density(rates: Rates, bandwidth: float) -> float | None:
    """The density, in tenths of a per cent, from which a patch takes longer to code and send than the model to send."""
    full_s = 8 * BF16 / bandwidth  # for one parameter
    densities = (k / 1000 for k in range(1001))
    later = (d for d in densities if bits(rates, d) / bandwidth + BF16 * _coding(rates, d) >= full_s)
    return next(later, None)


def _rounds(
    params: int, bandwidth: float, compute_s: float, trainers: int, sync_every: int, density: float
) -> tuple[Round, ...]:
    """compute_s: of a round's steps."""
    if trainers == 1:
        return ()
    others = trainers - 1
    dense = 2 * others / trainers * params * FLOAT32  # a ring: ranges to be added up, then their sums
    union = 1 - (1 - density) ** trainers
    payload, sums = (params * bits(SENT, d) / 8 for d in (density, union))
    ways = {
        "ddp": sync_every * dense,
        "diloco": dense,
        # All payloads, or those of an own range and then all sums: `loco.exchange` takes what is less.
        "pulseloco": min(others * payload, others / trainers * (payload + sums)),
    }
    return tuple(
        Round(
            name=name,
            nbytes=round(nbytes),
            reduction=ways["ddp"] / nbytes,
            seconds=8 * nbytes / bandwidth,
            utilization=utilization(compute_s, 8 * nbytes / bandwidth),
            bandwidth_needed=bandwidth_needed(compute_s, nbytes),
        )
        for name, nbytes in ways.items()
    )
