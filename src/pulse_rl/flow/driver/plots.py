"""The plots and tables of one policy's metrics: what it learned, what was sent, how far behind its workers were."""

from array import array
from collections.abc import Callable, Iterable, Sequence
from statistics import fmean, median
from typing import Any

import numpy as np

from pulse_rl.flow.metrics import Records
from pulse_rl.html import charts
from pulse_rl.html.charts import BYTES, FRACTION, ChartAxis, Points
from pulse_rl.html.page import Plot
from pulse_rl.units import count, nbytes
from pulse_rl.watch.alarms import lags_of

SMOOTH = 8  # versions over which rewards are averaged
LINES = 6  # workers that have a line each; of more, the one furthest behind, the median and the nearest
LISTED = 100  # versions in the table of all

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
        ("first reward", f"{fmean(rewards[:part]):.3f}", f"mean of {count(part, 'version')}"),
        ("last reward", f"{fmean(rewards[-part:]):.3f}", f"mean of {count(part, 'version')}"),
        ("mean density", f"{fmean(summary['density']):.3%}", "of elements change per version"),
        ("lowest sparsity", f"{1 - max(summary['density']):.3%}", "of all versions"),
        ("bytes per version", nbytes(fmean(sent)), f"instead of {nbytes(summary['full_nbytes'])}"),
        ("reduction", f"{summary['reduction']:,.0f} ×", "fewer bytes than full weights"),
        ("workers proved", f"{proved} of {len(summary['workers'])}", "hold what they were sent, bit for bit"),
    ]
    if spoilt := summary["nonfinite"]:
        found.append(("not finite", f"{spoilt:,}", "weights of the last version are NaN or infinite"))
    if sync := summary["trainer_sync"]:
        found.append(("between trainers", f"{sync['reduction_vs_diloco']:,.3g} ×", "fewer bytes than DiLoCo"))
    return found


def _kept(record: dict[str, Any]) -> dict[str, float]:
    """The numbers of a record that are drawn."""
    lags = lags_of(record).values() or (np.nan,)
    found = {name: record[name] for name in _DRAWN} | {
        "rest_s": max(0.0, record["total_s"] - sum(record[name] for name in ("wait_s", "train_s", "publish_s"))),
        "most": max(lags),
        "middle": median(lags),
        "least": min(lags),
    }
    if (sync := record.get("trainer_sync")) is None:
        return found
    return found | {
        "sent_nbytes": fmean(sync["sent_nbytes"]),
        **{f"sync_{name}": sync[name] for name in ("dense_nbytes", "ddp_nbytes", "density")},
    }


_DRAWN = (
    "step",
    "reward",
    "solved",
    "loss",
    "density",
    "patch_nbytes",
    "reduction",
    "staleness",
    "wait_s",
    "train_s",
    "publish_s",
)


class Series:
    """The numbers of a policy's records that are drawn, in columns that grow with the records."""

    def __init__(self, records: Iterable[dict[str, Any]] = ()) -> None:
        self.last: dict[str, Any] = {}
        self._columns: dict[str, array[float]] = {}
        self._lags: dict[str, list[tuple[float, float]]] = {}
        self._views: dict[str, list[tuple[float, float]]] = {}  # bytes of their patches
        for record in records:
            self.add(record)

    def add(self, record: dict[str, Any]) -> None:
        """Take in the record of the next version."""
        self.last = record
        for name, value in _kept(record).items():
            self._columns.setdefault(name, array("d")).append(value)
        for view in record.get("views", ()):
            if view["patch_nbytes"]:
                self._views.setdefault(view["name"], []).append((record["step"], view["patch_nbytes"]))
        if len(self._lags) <= LINES:
            for name, lag in sorted(lags_of(record).items()):
                self._lags.setdefault(name, []).append((record["step"], lag))

    def of(self, name: str) -> Points:
        """The points of a number over the steps."""
        return self._points(np.array(self._columns[name]))

    def plots(self) -> list[Plot]:
        """All plots of the policy."""
        found = [
            self._reward(),
            Plot(
                "Loss",
                "What a step minimised. It says little by itself: of GRPO it is near 0 where a policy learns well.",
                self._lines("loss", loss="loss"),
            ),
            Plot(
                "Density",
                "The share of the elements whose bits changed from one version to the next. Only these are sent.",
                self._lines("changed elements", FRACTION, density="density"),
            ),
            Plot(
                "Bytes of a patch",
                "What a worker fetches for one version, of the weights or of a view. The full weights are "
                f"{nbytes(self.last['full_nbytes'])}. The size follows the density.",
                charts.lines(
                    {"patch": self.of("patch_nbytes"), **{f"view {name}": of for name, of in self._views.items()}},
                    STEP,
                    ChartAxis("a patch", BYTES, zero=True),
                ),
            ),
            Plot(
                "Reduction",
                "The bytes of the full weights, divided by those of the patch.",
                self._lines("full bytes / patch bytes", reduction="reduction"),
            ),
            self._lag(),
            Plot(
                "Staleness",
                "How many versions old the weights were that made a step's completions, as a mean. The clipped ratio "
                "of probabilities corrects for it. What is too old is dropped: see the groups of each policy.",
                self._lines("versions, mean", staleness="staleness"),
            ),
            self._seconds(),
        ]
        if "trainer_sync" in self.last:
            found += [self._exchanged(), self._exchange_density()]
        return found

    def _points(self, values: np.ndarray[Any, Any]) -> Points:
        points: Points = np.stack([np.array(self._columns["step"]), values], 1)
        return points

    def _lines(self, title: str, form: str = "", **names: str) -> dict[str, Any] | None:
        series = {shown: self.of(name) for shown, name in names.items()}
        return charts.lines(series, STEP, ChartAxis(title, form, zero=True))

    def _reward(self) -> Plot:
        rewards = np.array(self._columns["reward"])
        sums = np.cumsum(np.concatenate([np.zeros(SMOOTH), rewards]))
        counts = np.minimum(np.arange(len(rewards)) + 1, SMOOTH)
        series = {
            "reward": self.of("reward"),
            f"mean of {SMOOTH} versions": self._points((sums[SMOOTH:] - sums[:-SMOOTH]) / counts),
            "solved": self.of("solved"),
        }
        return Plot(
            "Reward",
            "The mean reward of the completions trained on, its mean over the last versions, and the share of correct "
            "completions. Prompts are new at every step, so single steps scatter.",
            charts.lines(series, STEP, ChartAxis("mean reward; share solved", zero=True), dashed=["solved"]),
        )

    def _lag(self) -> Plot:
        few = len(self._lags) <= LINES
        all_of_them = {"furthest behind": "most", "median": "middle", "nearest": "least"}
        series: dict[str, Points] = {**self._lags} if few else {name: self.of(at) for name, at in all_of_them.items()}
        return Plot(
            "Lag of the workers",
            "How many versions each worker's proved weights were behind the newest one, when that was recorded. A "
            "worker takes the next version when it has finished sampling, so 1 is usual. A worker whose line rises is "
            "too slow.",
            charts.lines(series, STEP, ChartAxis("versions behind", zero=True, whole=True)),
        )

    def _exchanged(self) -> Plot:
        series = {
            self.last["trainer_sync"]["mode"]: self.of("sent_nbytes"),
            "DiLoCo": self.of("sync_dense_nbytes"),
            "DDP": self.of("sync_ddp_nbytes"),
        }
        return Plot(
            "Bytes that a trainer sends in a round",
            "The trainers' mean, next to what a trainer sends in the same round by DiLoCo (the whole pseudo-gradient "
            "in FP32) and by DDP (the gradients of every step).",
            charts.lines(series, STEP, ChartAxis("a trainer and round", BYTES, log=True), dashed=["DiLoCo", "DDP"]),
        )

    def _exchange_density(self) -> Plot:
        return Plot(
            "Density between trainers",
            "The share of the pseudo-gradient's elements that a trainer sends in a round: those that the next forward "
            "pass can see. The rest is kept and added in the next round.",
            self._lines("sent elements", FRACTION, density="sync_density"),
        )

    def _seconds(self) -> Plot:
        names = {"waiting": "wait_s", "training": "train_s", "publishing": "publish_s", "the rest": "rest_s"}
        return Plot(
            "Seconds of a version",
            "A trainer's wall time: waiting for completions, training, publishing and the rest. Waiting means that the "
            "rollout workers are slower than the trainer. Publishing is what the weight channel costs the trainer.",
            charts.stacks(
                {shown: self.of(name) for shown, name in names.items()}, STEP, ChartAxis("seconds", zero=True)
            ),
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
    """The last versions."""
    rows = [[form(record[name]) for name, (_, form) in COLUMNS.items()] for record in records[-LISTED:]]
    return [title for title, _ in COLUMNS.values()], rows
