"""`report.html` of a run of a recipe: what each policy learned and sent, who waited for whom, where the time went.

It is made from the policies' metrics and the summary alone. A policy's plots are those of the reference run.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pulse_rl.disk import write_stream
from pulse_rl.flow.training.trainer import directory
from pulse_rl.html.page import Page
from pulse_rl.rl import metrics
from pulse_rl.rl.report import (
    REPORT,
    Table,
    density,
    exchange_density,
    exchange_table,
    exchanged,
    lag,
    reward,
    seconds,
    sent,
    staleness,
    versions,
)
from pulse_rl.units import nbytes

Records = Sequence[dict[str, Any]]


def write(run: Path, summary: dict[str, Any]) -> Path:
    """Write the run's report into its directory, whole or not at all; return its path.

    Raises MissingExtraError without the extra `study`, OSError if the file cannot be written.
    """
    records: dict[str, Records] = {name: metrics.read(directory(run, name)) for name in summary["policies"]}
    write_stream(run / REPORT, [html(summary, records).encode()])
    return run / REPORT


def html(summary: dict[str, Any], records: dict[str, Records]) -> str:
    """The report as one HTML document that refers to nothing outside it. records: of each policy."""
    page = Page(
        f"A run of {summary['recipe']}",
        f"{summary['run']}: workflow {summary['workflow']}, {len(summary['policies'])} policies, "
        f"{len(summary['workers'])} workers, {summary['seconds']:.0f} s. All numbers are in policies/*/metrics.jsonl.",
    )
    page.numbers(_headline(summary))
    page.heading("Where the time went")
    page.table("A trainer of each policy, in seconds", *_trainer_seconds(summary))
    page.table("Workers, in seconds since each was started last", *_worker_seconds(summary))
    page.table("At the end", ("", ""), [["who waits for whom", summary["balance"]["sentence"]]])
    page.heading("What was played")
    page.table("Tasks", ("", "tasks"), [[name.replace("_", " "), str(n)] for name, n in summary["tasks"].items()])
    page.table("Groups of each policy", *_groups(summary))
    if summary["windows"]:
        page.table("Evaluation windows", *_windows(summary))
    for name, found in records.items():
        if found:
            page.heading(f"The policy {name}")
            for plot in (reward, density, sent, lag, staleness, seconds):
                page.plot(plot(found))
            if sync := summary["policies"][name]["trainer_sync"]:
                page.plot(exchanged(found))
                page.plot(exchange_density(found))
                page.table(f"What the trainers of {name} sent each other", ("", "of the run"), exchange_table(sync))
            page.table(f"Every version of {name}", *versions(found), folded=True)
    page.heading("Weights at the end")
    page.table("Trainers and workers", *_weights(summary))
    return page.html()


def _headline(summary: dict[str, Any]) -> list[tuple[str, str, str]]:
    found = []
    for name, policy in summary["policies"].items():
        if rewards := policy["reward"]:
            part = max(1, len(rewards) // 4)
            first, last = sum(rewards[:part]) / part, sum(rewards[-part:]) / part
            found.append((f"reward of {name}", f"{first:.3f} → {last:.3f}", f"first and last {part} of its versions"))
            found.append(
                (f"bytes a version of {name}", nbytes(sum(policy["patch_nbytes"]) / len(rewards)), "sent to a worker")
            )
            if sync := policy["trainer_sync"]:
                less = f"{sync['reduction_vs_diloco']:,.3g} ×"
                found.append((f"between the trainers of {name}", less, "fewer bytes than DiLoCo"))
    held = [worker for policy in summary["policies"].values() for worker in policy["workers"]]
    proved = sum(worker["verified"] for worker in held)
    found.append(("weights proved", f"{proved} of {len(held)}", "of workers, one for each policy that they hold"))
    return found


def _trainer_seconds(summary: dict[str, Any]) -> Table:
    columns = ("policy", "trainers", "waiting for batches", "training", "publishing", "the rest", "restarts")
    rows = []
    for name, policy in summary["policies"].items():
        parts = [policy["wait_s"], policy["train_s"], policy["publish_s"]]
        rest = max(0.0, policy["total_s"] - sum(parts))
        spent = (f"{part:.1f}" for part in (*parts, rest))
        rows.append([name, str(policy["trainers"]), *spent, str(policy["restarts"])])
    return columns, rows


def _worker_seconds(summary: dict[str, Any]) -> Table:
    columns = (
        "worker",
        "pool",
        "starting",
        "sampling",
        "taking up weights",
        "without work",
        "all",
        "tasks",
        "restarts",
        "left",
    )
    rows = [
        [
            worker["id"],
            worker["pool"],
            *(f"{worker[name]:.1f}" for name in ("start_s", "sampling_s", "sync_s", "idle_s", "seconds")),
            str(worker["played"]),
            str(worker["restarts"]),
            "before the end" if worker["left"] else "",
        ]
        for worker in summary["workers"]
    ]
    return columns, rows


def _groups(summary: dict[str, Any]) -> Table:
    rows = []
    for name, policy in summary["policies"].items():
        dropped = ", ".join(f"{reason} {count}" for reason, count in policy["dropped"].items())
        rows.append([name, str(policy["turns"]), dropped or "none", str(policy["repeated"]), str(policy["replayed"])])
    return ("policy", "turns trained on", "groups dropped", "groups repeated", "groups replayed"), rows


def _windows(summary: dict[str, Any]) -> Table:
    rows = [
        [
            name,
            ", ".join(f"{policy} {version}" for policy, version in window["versions"].items()),
            ", ".join(f"{policy} {reward:.3f}" for policy, reward in window["rewards"].items()),
            ", ".join(f"@{k} {share:.3f}" for k, share in window["pass"].items()),
        ]
        for name, window in summary["windows"].items()
    ]
    return ("window", "versions", "mean rewards", "pass"), rows


def _weights(summary: dict[str, Any]) -> Table:
    columns = ("policy", "who", "version", "digest", "bits", "syncs", "fetched", "syncing")
    rows = []
    for name, policy in summary["policies"].items():
        rows.append([name, "trainer", str(policy["trainer_version"]), policy["trainer_digest"], "", "", "", ""])
        for worker in policy["workers"]:
            bits = "proved" if worker["verified"] else "NOT IDENTICAL"
            counted = [str(worker["syncs"]), nbytes(worker["fetched_nbytes"]), f"{worker['sync_s']:.1f} s"]
            rows.append([name, worker["id"], str(worker["version"]), worker["digest"], bits, *counted])
    return columns, rows
