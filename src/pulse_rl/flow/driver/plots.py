"""The plots and tables of one policy's metrics: what it learned, what was sent, how far behind its workers were."""

from collections.abc import Callable, Sequence
from typing import Any

from pulse_rl.html import charts
from pulse_rl.html.charts import BYTES, FRACTION, ChartAxis, Points
from pulse_rl.html.page import Plot
from pulse_rl.units import nbytes

SMOOTH = 8  # versions over which rewards are averaged

Records = Sequence[dict[str, Any]]
Table = tuple[Sequence[str], list[list[str]]]
STEP = ChartAxis("optimizer step", whole=True)


def headline(summary: dict[str, Any]) -> list[tuple[str, str, str]]:
    """Name, value and remark of the most important numbers. summary: of the policy."""
    rewards, sent = summary["reward"], summary["patch_nbytes"]
    if not rewards:
        return []
    part = max(1, len(rewards) // 4)
    proved = sum(worker["verified"] for worker in summary["workers"])
    found = [
        ("first reward", f"{_mean(rewards[:part]):.3f}", f"mean of {_count(part, 'version')}"),
        ("last reward", f"{_mean(rewards[-part:]):.3f}", f"mean of {_count(part, 'version')}"),
        ("mean density", f"{_mean(summary['density']):.3%}", "of elements change per version"),
        ("lowest sparsity", f"{1 - max(summary['density']):.3%}", "of all versions"),
        ("bytes per version", nbytes(_mean(sent)), f"instead of {nbytes(summary['full_nbytes'])}"),
        ("reduction", f"{summary['reduction']:,.0f} ×", "fewer bytes than full weights"),
        ("workers proved", f"{proved} of {len(summary['workers'])}", "hold the trainer's last bits"),
    ]
    if spoilt := summary["nonfinite"]:
        found.append(("not finite", f"{spoilt:,}", "weights of the last version are NaN or infinite"))
    if sync := summary["trainer_sync"]:
        found.append(("between trainers", f"{sync['reduction_vs_diloco']:,.3g} ×", "fewer bytes than DiLoCo"))
    return found


def plots(records: Records) -> list[Plot]:
    """All plots of a policy's metrics."""
    found = [each(records) for each in (reward, density, sent, reduction, lag, staleness, seconds)]
    if "trainer_sync" in records[-1]:
        found += [exchanged(records), exchange_density(records)]
    return found


def reward(records: Records) -> Plot:
    rewards = [record["reward"] for record in records]
    smooth = [_mean(rewards[max(0, at + 1 - SMOOTH) : at + 1]) for at in range(len(rewards))]
    series: dict[str, Points] = {
        "reward": _series(records, "reward"),
        f"mean of {SMOOTH} versions": list(zip(_steps(records), smooth, strict=True)),
        "solved": _series(records, "solved"),
    }
    return Plot(
        "Reward",
        "The mean reward of the completions trained on, its mean over the last versions, and the share of correct "
        "completions. Prompts are new at every step, so single steps scatter.",
        charts.lines(series, STEP, ChartAxis("mean reward; share solved", zero=True), dashed=["solved"]),
    )


def density(records: Records) -> Plot:
    return Plot(
        "Density",
        "The share of the elements whose bits changed from one version to the next. Only these are sent.",
        charts.lines(
            {"density": _series(records, "density")}, STEP, ChartAxis("changed elements", FRACTION, zero=True)
        ),
    )


def sent(records: Records) -> Plot:
    return Plot(
        "Bytes of a patch",
        "What a worker fetches for one version. The full weights are "
        f"{nbytes(records[-1]['full_nbytes'])}. The size follows the density.",
        charts.lines({"patch": _series(records, "patch_nbytes")}, STEP, ChartAxis("a patch", BYTES, zero=True)),
    )


def reduction(records: Records) -> Plot:
    return Plot(
        "Reduction",
        "The bytes of the full weights, divided by those of the patch.",
        charts.lines(
            {"reduction": _series(records, "reduction")}, STEP, ChartAxis("full bytes / patch bytes", zero=True)
        ),
    )


def lag(records: Records) -> Plot:
    series: dict[str, list[tuple[float, float | None]]] = {}
    for record in records:
        for name, held in sorted(record["workers"].items()):
            if held is not None:  # None: it has proved no version yet
                series.setdefault(name, []).append((record["step"], record["version"] - held))
    return Plot(
        "Lag of the workers",
        "How many versions each worker's proved weights were behind the newest one, when that was recorded. A worker "
        "takes the next version when it has finished sampling, so 1 is usual. A worker whose line rises is too slow.",
        charts.lines(series, STEP, ChartAxis("versions behind", zero=True, whole=True)),
    )


def staleness(records: Records) -> Plot:
    return Plot(
        "Staleness",
        "How many versions old the weights were that made a step's completions, as a mean. The clipped ratio of "
        "probabilities corrects for it. What is too old is dropped: see the groups of each policy.",
        charts.lines({"staleness": _series(records, "staleness")}, STEP, ChartAxis("versions, mean", zero=True)),
    )


def exchanged(records: Records) -> Plot:
    rounds = [(record["step"], record["trainer_sync"]) for record in records]
    series: dict[str, Points] = {
        records[-1]["trainer_sync"]["mode"]: [(step, _mean(one["sent_nbytes"])) for step, one in rounds],
        "DiLoCo": [(step, one["dense_nbytes"]) for step, one in rounds],
        "DDP": [(step, one["ddp_nbytes"]) for step, one in rounds],
    }
    return Plot(
        "Bytes that a trainer sends in a round",
        "The trainers' mean, next to what a trainer sends in the same round by DiLoCo (the whole pseudo-gradient in "
        "FP32) and by DDP (the gradients of every step).",
        charts.lines(series, STEP, ChartAxis("a trainer and round", BYTES, log=True), dashed=["DiLoCo", "DDP"]),
    )


def exchange_density(records: Records) -> Plot:
    series = {"density": [(record["step"], record["trainer_sync"]["density"]) for record in records]}
    return Plot(
        "Density between trainers",
        "The share of the pseudo-gradient's elements that a trainer sends in a round: those that the next forward pass "
        "can see. The rest is kept and added in the next round.",
        charts.lines(series, STEP, ChartAxis("sent elements", FRACTION, zero=True)),
    )


def seconds(records: Records) -> Plot:
    series: dict[str, Points] = {
        "waiting": _series(records, "wait_s"),
        "training": _series(records, "train_s"),
        "publishing": _series(records, "publish_s"),
        "the rest": [
            (r["step"], max(0.0, r["total_s"] - r["wait_s"] - r["train_s"] - r["publish_s"])) for r in records
        ],
    }
    return Plot(
        "Seconds of a version",
        "A trainer's wall time: waiting for completions, training, publishing and the rest. Waiting means that the "
        "rollout workers are slower than the trainer. Publishing is what the weight channel costs the trainer.",
        charts.stacks(series, STEP, ChartAxis("seconds", zero=True)),
    )


def exchange_table(sync: dict[str, Any]) -> list[list[str]]:
    """What all rounds together have sent. sync: of the summary."""
    sent = sum(map(sum, sync["sent_nbytes"]))
    return [
        ["trainers", str(sync["trainers"])],
        ["steps a round", str(sync["sync_every"])],
        ["rounds", str(sync["rounds"])],
        ["sent by all", nbytes(sent)],
        ["fewer bytes than DiLoCo", f"{sync['reduction_vs_diloco']:,.3g} ×"],
        ["fewer bytes than DDP", f"{sync['reduction_vs_ddp']:,.3g} ×"],
        ["the same weights after each round", "yes" if sync["digests_equal"] else "NO"],
    ]


COLUMNS: dict[str, tuple[str, Callable[[Any], str]]] = {  # of the table of versions
    "step": ("step", str),
    "version": ("version", str),
    "reward": ("reward", "{:.3f}".format),
    "solved": ("solved", "{:.0%}".format),
    "loss": ("loss", "{:+.4f}".format),
    "grad_norm": ("gradient norm", "{:.3g}".format),
    "clipped": ("clipped", "{:.2%}".format),
    "tokens": ("tokens", "{:,.0f}".format),
    "staleness": ("staleness", "{:.2f}".format),
    "density": ("density", "{:.4%}".format),
    "patch_nbytes": ("patch", nbytes),
    "codec": ("codec", str),
    "reduction": ("reduction", "{:,.0f} ×".format),
    "wait_s": ("waiting, s", "{:.2f}".format),
    "train_s": ("training, s", "{:.2f}".format),
    "publish_s": ("publishing, s", "{:.2f}".format),
    "total_s": ("total, s", "{:.2f}".format),
}


def versions(records: Records) -> Table:
    rows = [[form(record[name]) for name, (_, form) in COLUMNS.items()] for record in records]
    return [title for title, _ in COLUMNS.values()], rows


def _series(records: Records, name: str) -> Points:
    return [(record["step"], record[name]) for record in records]


def _steps(records: Records) -> list[int]:
    return [record["step"] for record in records]


def _mean(numbers: Sequence[float]) -> float:
    return sum(numbers) / len(numbers)


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'s' * (number != 1)}"
