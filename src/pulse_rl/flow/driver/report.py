"""`report.html` of a run: what each policy learned and sent, who waited for whom, where the time went.

It is made from the policies' metrics and the summary alone.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pulse_rl.disk import write_stream
from pulse_rl.flow import metrics
from pulse_rl.flow.directory import POLICIES
from pulse_rl.flow.driver import plots
from pulse_rl.flow.driver.plots import Series, Table
from pulse_rl.flow.driver.summary import PARTS
from pulse_rl.flow.metrics import Records
from pulse_rl.flow.recipe import Recipe
from pulse_rl.html.page import Page
from pulse_rl.units import nbytes
from pulse_rl.watch.store_page import views_table

REPORT = "report.html"
REASONS = {  # why groups are dropped; filters of a user have their own
    "stale": "sampled by weights older than max_staleness allows; more workers or a larger bound make fewer",
    "surplus": "good, but no batch needed them: made for another policy, or on their way when the last batch was full",
    "empty": "the policy made no token in them",
    "no_variance": "the filter found all their rewards equal, so there was nothing to learn from",
}
OF_WORKERS = ("registered", "left", "lost", "suspected", "revived", "paused")  # counts; the others are of tasks


def write(recipe: Recipe, summary: dict[str, Any]) -> Path:
    """Write the run's report into its directory, whole or not at all; return its path.

    Raises MissingExtraError without the extra `study`, OSError if the file cannot be written.
    """
    records: dict[str, Records] = {name: metrics.read(recipe.files(name)) for name in summary["policies"]}
    path = recipe.directory / REPORT
    write_stream(path, [draw(summary, records).html().encode()])
    return path


def draw(
    summary: dict[str, Any],
    records: Mapping[str, Records],
    series: Mapping[str, Series] | None = None,
    now: Callable[[Page], None] = lambda page: None,
) -> Page:
    """The page of a run.

    records: of each policy. series: made of them; None to make them. now: adds what is only known while it goes on.
    """
    policies = summary["policies"]
    played = " on ".join(filter(None, [summary["workflow"], summary["task"]]))
    models = ", ".join(f"{name} ({policy['model']}, {policy['steps']} steps)" for name, policy in policies.items())
    page = Page(
        f"A run of {summary['recipe']}",
        f"{summary['run']}: workflow {played}; {models}; "
        f"{len(summary['workers'])} workers; {summary['seconds']:.0f} s. All numbers are in {_files(records)}.",
    )
    stopped = summary["stopped"]
    warnings = [policy["warning"] for policy in policies.values()]
    page.points([*filter(None, [stopped and stopped["sentence"], *warnings])])
    now(page)
    for name, policy in policies.items():
        of = f" of {name}" if len(policies) > 1 else ""
        page.numbers([(f"{what}{of}", value, remark) for what, value, remark in plots.headline(policy)])
    for name, found in records.items():
        if found:
            page.heading(f"The policy {name}")
            for plot in (series[name] if series else Series(found)).plots():
                page.plot(plot)
            if views := found[-1].get("views"):
                views_table(page, views)
            if sync := policies[name]["trainer_sync"]:
                title = f"What the trainers of {name} sent each other"
                page.table(title, ("", "of the run"), plots.exchange_table(sync))
            last = (
                "Every version" if len(found) <= plots.LISTED else f"The last {plots.LISTED} of {len(found):,} versions"
            )
            page.table(f"{last} of {name}", *plots.versions(found), folded=True)
    page.heading("Where the time went")
    page.table("A trainer of each policy, in seconds", *_trainer_seconds(summary))
    page.table("Workers, in seconds since each was started last", *_worker_seconds(summary))
    page.table("In all", ("", ""), [["who waited for whom", summary["balance"]["sentence"]]])
    page.heading("What was played")
    page.table("Tasks", ("", "tasks"), _counts(summary, of_workers=False))
    page.table("What became of workers", ("", "times"), _counts(summary, of_workers=True))
    page.table("Groups of each policy", *_groups(summary))
    dropped = {reason for policy in policies.values() for reason in policy["dropped"]}
    page.points([f"{reason}: {why}" for reason, why in REASONS.items() if reason in dropped])
    if counted := _facts(summary):
        page.table("What the workflow counted in a play, as means over what each policy trained on", *counted)
    if given_up := summary["given_up"]:
        rows = [[str(task["problem"]), "; ".join(task["errors"])] for task in given_up]
        page.table("Tasks that were given up", ("problem", "errors"), rows)
    if summary["windows"]:
        page.table("Evaluation windows", *_windows(summary))
    page.heading("Weights at the end" if summary["ended"] else "Weights")
    page.table("Trainers and workers", *_weights(summary))
    return page


def _files(records: Mapping[str, Records]) -> str:
    """Where the numbers of each policy are, below the run's directory: as `Recipe.files` says."""
    names = [name for name, found in records.items() if found]
    files = [f"{POLICIES}/{name}/{metrics.METRICS}" for name in names] if len(records) > 1 else [metrics.METRICS]
    return ", ".join(files)


def _trainer_seconds(summary: dict[str, Any]) -> Table:
    columns = ("policy", "trainers", "waiting for batches", "training", "publishing", "the rest", "all", "restarts")
    rows = []
    for name, policy in summary["policies"].items():
        spent = (f"{policy[part]:.1f}" for part in (*PARTS, "rest_s", "total_s"))
        rows.append([name, str(policy["trainers"]), *spent, str(policy["restarts"])])
    return columns, rows


def _worker_seconds(summary: dict[str, Any]) -> Table:
    columns = (
        "worker",
        "pool",
        "host",
        "starting",
        "sampling",
        "taking up weights",
        "without work",
        "the rest",
        "all",
        "tasks",
        "restarts",
        "left",
    )
    rows = []
    for worker in summary["workers"]:
        parts = [worker[name] for name in ("start_s", "sampling_s", "sync_s", "idle_s")]
        rest = max(0.0, worker["seconds"] - sum(parts))
        spent = (f"{part:.1f}" for part in (*parts, rest, worker["seconds"]))
        left = "before the end" if worker["left"] else ""
        rows.append(
            [
                worker["id"],
                worker["pool"],
                worker["host"],
                *spent,
                str(worker["played"]),
                str(worker["restarts"]),
                left,
            ]
        )
    return columns, rows


def _counts(summary: dict[str, Any], *, of_workers: bool) -> list[list[str]]:
    counts = summary["tasks"].items()
    return [[name.replace("_", " "), str(count)] for name, count in counts if (name in OF_WORKERS) == of_workers]


def _groups(summary: dict[str, Any]) -> Table:
    rows = []
    for name, policy in summary["policies"].items():
        dropped = ", ".join(f"{reason} {count}" for reason, count in policy["dropped"].items())
        rows.append([name, str(policy["turns"]), dropped or "none", str(policy["repeated"]), str(policy["replayed"])])
    return ("policy", "turns trained on", "groups dropped", "groups repeated", "groups replayed"), rows


def _facts(summary: dict[str, Any]) -> Table | None:
    rows = [
        [name, fact, f"{mean:.3f}"]
        for name, policy in summary["policies"].items()
        for fact, mean in policy["facts"].items()
    ]
    return (("policy", "what", "in a play"), rows) if rows else None


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
        rows.append(
            [name, "trainer", _or_dash(policy["trainer_version"]), policy["trainer_digest"] or "–", "", "", "", ""]
        )
        for worker in policy["workers"]:
            bits = "proved" if worker["verified"] else "NOT IDENTICAL" if summary["ended"] else "not yet"
            counted = [str(worker["syncs"]), nbytes(worker["fetched_nbytes"]), f"{worker['sync_s']:.1f} s"]
            rows.append([name, worker["id"], _or_dash(worker["version"]), worker["digest"] or "–", bits, *counted])
    return columns, rows


def _or_dash(version: int | None) -> str:
    return "–" if version is None else str(version)
