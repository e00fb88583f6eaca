"""The summary of a run, printed as a table."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pulse_rl.errors import printable

if TYPE_CHECKING:
    from rich.table import Table


def print_summary(summary: Mapping[str, Any]) -> None:
    """Print a run's summary on stdout."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table(title="Summary", show_header=False, title_justify="left")
    policies, workers = summary["policies"], {worker["id"]: worker for worker in summary["workers"]}
    if stopped := summary["stopped"]:
        table.add_row("stopped early", f"by {stopped['by']}; {escape(printable(stopped['sentence']))}")
    if summary["steps"]:
        table.add_row("steps", f"{summary['steps']}, {summary['seconds']:.0f} s")
    for name, policy in policies.items():
        if len(policies) > 1:
            table.add_section()
            table.add_row("policy", escape(printable(name)))
        _add_policy(table, policy, workers)
    table.add_section()
    if failed := summary["tasks"].get("failed"):
        given_up = summary["tasks"].get("given_up", 0)
        pauses = summary["tasks"].get("paused", 0)  # in which workers wait, as the row below says
        table.add_row(
            "tasks", f"{failed:,} tries failed; {given_up:,} tasks were given up; workers paused {pauses:,} ×"
        )
    for window, found in summary["windows"].items():
        passed = ", ".join(f"pass@{k} {share:.3f}" for k, share in found["pass"].items())
        table.add_row(f"window {escape(printable(window))}", passed or "nothing was played")
    table.add_row("waiting", escape(printable(summary["balance"]["sentence"])))
    directory = Path(summary["run"])
    here = directory.is_relative_to(Path.cwd())
    table.add_row("run", escape(printable(str(directory.relative_to(Path.cwd()) if here else directory))))
    Console().print(table)


def _add_policy(table: "Table", policy: Mapping[str, Any], workers: Mapping[str, Mapping[str, Any]]) -> None:
    """What a policy learned and sent, and who holds its last bits. workers: by name."""
    from rich.markup import escape

    from pulse_rl.units import nbytes

    if sent := policy["patch_nbytes"]:
        table.add_row("reward", reward_change(policy["reward"]))
        if policy["facts"]:
            counted = ", ".join(f"{name} {mean:.3g}" for name, mean in policy["facts"].items())
            table.add_row("counted in a play", escape(printable(counted)))
        unit = "version" if policy["trainer_sync"] else "step"
        density = sum(policy["density"]) / len(sent)
        table.add_row("density", f"{density:.3%} of {policy['elements']:,} weights per {unit}")
        each = nbytes(sum(sent) / len(sent))
        table.add_row("bytes per version", f"{each} instead of {nbytes(policy['full_nbytes'])}")
        table.add_row("reduction", f"{policy['reduction']:.0f}×")
        parts = {
            "waiting for batches": "wait_s",
            "training": "train_s",
            "publishing": "publish_s",
            "the rest": "rest_s",
        }
        spent = " + ".join(f"{policy[key]:.1f} {what}" for what, key in parts.items())
        table.add_row("seconds", f"{policy['total_s']:.1f} = {spent}")
        if policy["warning"]:
            table.add_row("warning", escape(printable(policy["warning"])))
        if policy["trainer_sync"]:
            _add_exchange(table, policy["trainer_sync"])
    if spoilt := policy["nonfinite"]:
        table.add_row("NOT FINITE", f"{spoilt:,} of {policy['elements']:,} weights are NaN or infinite")
    table.add_row("trainer", f"version {policy['trainer_version']}, digest {policy['trainer_digest']}")
    for held in policy["workers"]:
        proof = "bit-identical" if held["verified"] else "NOT IDENTICAL"
        restarts = workers[held["id"]]["restarts"]
        table.add_row(
            escape(printable(held["id"])),
            f"version {held['version']}, digest {held['digest']}: {proof}"
            + f", restarted {restarts} ×" * (restarts > 0),
        )


def _add_exchange(table: "Table", sync: Mapping[str, Any]) -> None:
    """What the trainers sent each other, against DiLoCo's bytes and DDP's in the same steps."""
    from pulse_rl.units import nbytes

    took_part = [len(sent) for sent in sync["sent_nbytes"]]
    each = sum(map(sum, sync["sent_nbytes"])) / sum(took_part)
    fewer = sum(trainers < sync["trainers"] for trainers in took_part)
    same = "the same weights after each" if sync["digests_equal"] else "NOT THE SAME WEIGHTS"
    table.add_row(
        "trainers",
        f"{sync['trainers']}, {sync['mode']}: {sync['rounds']} round{'s' * (sync['rounds'] > 1)}, "
        + f"{fewer} without all of them, " * (fewer > 0)
        + same,
    )
    table.add_row(
        "sent by each", f"{nbytes(each)} per round: {sum(sync['density']) / sync['rounds']:.3%} of the weights"
    )
    table.add_row("instead of", f"DiLoCo's {nbytes(sync['dense_nbytes'])}: {_times(sync['reduction_vs_diloco'])}")
    table.add_row("", f"DDP's {nbytes(sync['ddp_nbytes'])}: {_times(sync['reduction_vs_ddp'])}")


def _times(factor: float) -> str:
    return f"{factor:,.0f}×" if factor >= 100 else f"{factor:.3g}×"


def reward_change(rewards: Sequence[float]) -> str:
    """The mean of the first quarter of the steps and of the last; of fewer than four steps, each reward."""
    if len(rewards) < 4:
        return " → ".join(f"{reward:.3f}" for reward in rewards) + " (each step)" * (len(rewards) > 1)
    quarter = len(rewards) // 4
    head, tail = sum(rewards[:quarter]) / quarter, sum(rewards[-quarter:]) / quarter
    return f"{head:.3f} (first quarter) → {tail:.3f} (last)"
