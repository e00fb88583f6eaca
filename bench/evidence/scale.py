"""What a version costs where nothing was run: large models, many ranks, a thousand engines. Calculated, not measured.

Sizes and coding times are the planner's, from measurements on 135 M parameters. A region's engines read a bucket of
their own, to which one process copies each object, and the engines of a host share a cache, so that a host downloads
an object once. Prices are those that Amazon lists for S3 Standard in us-east-1 (November 2026).
"""

from typing import NamedTuple

from bench.evidence.markdown import table
from pulse_rl import plan
from pulse_rl.units import nbytes, seconds

MODELS = {"7B": 7e9, "70B": 70e9, "671B": 671e9}
RANKS = (8, 64, 512)
DENSITY = 0.0031  # of a step at 3e-6: the mean of 400
ENGINES, REGIONS = 1000, 8  # an engine is one host
INTERVAL_S = 60.0  # from version to version
LINK, RANKS_PER_HOST = 10e9, 8  # bit/s of a host
RANK_THREADS, ENGINE_THREADS = 8, 32
POLLS = 29 / 60  # requests a second of a subscriber that waits: docs/operating.md
PUT_USD, GET_USD, REGION_USD = 0.005e-3, 0.0004e-3, 0.02e-9  # a request, a request, a byte to another region


class Version(NamedTuple):
    """One version of one model, published by so many ranks."""

    nbytes: float
    publish_s: float  # coding by each rank, and its host's link
    engine_s: float  # an engine's download, and decoding
    requests: float  # a second, at the bucket of a region
    usd: float  # a day, all regions together


def version(params: float, ranks: int) -> Version:
    """What `context` takes."""
    patch = plan(params=int(params), density=DENSITY, bandwidth=LINK, compute_s=INTERVAL_S).weights[2]
    hosts = max(1, ranks // RANKS_PER_HOST)
    objects = ranks + 3  # parts, their list, a trail, a manifest
    engines = ENGINES / REGIONS
    reads = engines * (objects / INTERVAL_S + POLLS) * REGIONS * 86400
    copies = REGIONS * objects * 86400 / INTERVAL_S
    return Version(
        nbytes=patch.nbytes,
        publish_s=patch.coding_seconds / 2 / ranks / RANK_THREADS + patch.seconds / hosts,
        engine_s=patch.coding_seconds / 2 / ENGINE_THREADS + patch.seconds,
        requests=engines * (objects / INTERVAL_S + POLLS),
        usd=reads * GET_USD + copies * PUT_USD + (REGIONS - 1) * patch.nbytes * REGION_USD * 86400 / INTERVAL_S,
    )


def scale() -> str:
    """The table: models by ranks."""
    rows = []
    for model, params in MODELS.items():
        for ranks in RANKS:
            found = version(params, ranks)
            rows.append(
                [
                    f"{model}, {ranks} ranks",
                    nbytes(round(found.nbytes)),
                    seconds(found.publish_s),
                    seconds(found.engine_s),
                    f"{found.requests:,.0f}",
                    f"${found.usd:,.0f}",
                ]
            )
    return table(("model", "a version", "publish", "an engine", "requests a second and region", "a day"), rows)
