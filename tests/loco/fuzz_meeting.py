"""Trainers that meet in a store, killed with SIGKILL at random points and started again, until all rounds are done.

    python -m tests.loco.fuzz_meeting --seeds 200

Of each world, drawn by seed: two or three trainers in a directory, with either straggler rule, anchors and pruning. A
trainer writes a checkpoint after some rounds. It kills itself at its k-th request of the store, before or after that
takes effect, and is started again, with its last checkpoint or without. Where the others go on without a late trainer,
one is also held up for a while; if they have pruned its round meanwhile, its error says to start it again, and that is
done. At the end all hold the same θ, which every commit names, and a newcomer that takes the rounds that are left gets
it too.
"""

import argparse
import os
import random
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any, NamedTuple

import torch

import pulse_rl as pulse
from tests.forked import forking
from tests.loco.ranks import bits
from tests.loco.store_trainers import Trainer

CALLS = ("put", "get", "stream", "list", "delete")
ROUNDS = 6
HELD_S = 1.0  # long enough for the others' rounds without it
LEFT_BEHIND = 3  # exit code of a trainer that is told to start again


class Doom(NamedTuple):
    """What becomes of one life of a trainer, by the number of its request of the store."""

    k: int | None
    done: bool
    held_at: int | None


class Doomed:
    """A store whose process is held up at one request, and kills itself at the k-th, before or after it takes effect.

    None: never.
    """

    def __init__(self, inner: Any, k: int | None, *, done: bool, held_at: int | None) -> None:
        self._inner, self._left, self._done, self._until_held = inner, k or 0, done, held_at or 0

    def __getattr__(self, name: str) -> Any:
        real = getattr(self._inner, name)
        if name not in CALLS:
            return real

        def call(*arguments: Any, **options: Any) -> Any:
            self._left, self._until_held = self._left - 1, self._until_held - 1
            if self._until_held == 0:
                time.sleep(HELD_S)
            if self._left == 0 and not self._done:
                os.kill(os.getpid(), signal.SIGKILL)
            found = real(*arguments, **options)
            if self._left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return found

        return call


def live(folder: str, rank: int, size: int, options: dict[str, Any], doom: Doom, save: int) -> None:
    """One life of a trainer; its error, if it has one, is in the file error-RANK."""
    try:
        train(folder, rank, size, options, doom, save)
    except BaseException as error:
        Path(folder, f"error-{rank}").write_text(traceback.format_exc())
        if isinstance(error, pulse.ExchangeError) and "went on without" in str(error):
            sys.exit(LEFT_BEHIND)
        raise


def train(folder: str, rank: int, size: int, options: dict[str, Any], doom: Doom, save: int) -> None:
    """Rounds until the last one, with a checkpoint after every `save` of them."""
    os.environ["PULSE_THREADS"] = "1"
    torch.set_num_threads(1)
    store = Doomed(pulse.open_store(Path(folder, "store")), doom.k, done=doom.done, held_at=doom.held_at)
    trainer = Trainer(store, rank, size, timeout=120, **options)
    file = Path(folder, f"{rank}.pt")
    if file.exists():
        trainer.load(torch.load(file, weights_only=True))
    with trainer.loco:
        while trainer.loco.round < ROUNDS:
            trainer.rounds()
            if trainer.loco.round % save == 0:
                torch.save(trainer.save(), file.with_suffix(".part"))
                file.with_suffix(".part").replace(file)
    # One that came late to the last round has done another one alone.
    torch.save((trainer.loco.round, trainer.loco.state_dict()["theta"]), Path(folder, f"theta-{rank}"))


def world(seed: int) -> int:
    """Run one world; returns how many trainers were killed in it. Raises AssertionError."""
    draw = random.Random(seed)
    size = draw.choice([2, 2, 3])
    options = {
        "late_after": draw.choice([None, None, 0.0, 0.1]),
        "anchor_every": draw.choice([1, 2, 100]),
        "retain": draw.choice([1, 2, 10]),
    }
    save, context, killed = draw.choice([1, 2, 100]), forking(), 0
    with tempfile.TemporaryDirectory() as folder:

        def start(rank: int, deaths: int) -> Any:
            held_at = draw.randint(1, 60) if options["late_after"] is not None and draw.random() < 0.5 else None
            doom = Doom(draw.randint(1, 60) if deaths < 3 else None, draw.random() < 0.5, held_at)
            if doom.k is not None and draw.random() < 0.1:
                Path(folder, f"{rank}.pt").unlink(missing_ok=True)  # its disk is lost too
            process = context.Process(target=live, args=(folder, rank, size, options, doom, save), daemon=True)
            process.start()
            return process

        deaths = [0] * size
        processes = {rank: start(rank, 0) for rank in range(size)}
        while processes:
            for rank, process in list(processes.items()):
                process.join(0.02)
                if process.exitcode == -signal.SIGKILL:
                    deaths[rank], killed = deaths[rank] + 1, killed + 1
                    processes[rank] = start(rank, deaths[rank])
                elif process.exitcode == LEFT_BEHIND and options["late_after"] is not None:
                    processes[rank] = start(rank, deaths[rank])
                elif process.exitcode is not None:
                    error = Path(folder, f"error-{rank}")
                    assert process.exitcode == 0, (seed, rank, options, error.exists() and error.read_text())
                    del processes[rank]
        check(Path(folder), size, seed)
    return killed


def check(folder: Path, size: int, seed: int) -> None:
    """After a round all θ are the same, and so is a newcomer's; each commit names the θ that the one before led to."""
    ends = [torch.load(folder / f"theta-{rank}") for rank in range(size)]
    found: dict[int, Any] = {}  # by the round after which a trainer ended
    for ended, theta in ends:
        assert found.setdefault(ended, bits(theta)) == bits(theta), seed
    store = pulse.open_store(folder / "store")
    newcomer = Trainer(store, 0, size)
    newcomer.loco.__enter__()
    newcomer.loco.__exit__(None, None, None)
    assert newcomer.loco.round == max(found) >= ROUNDS, seed
    assert newcomer.theta == found[max(found)], seed
    board = newcomer.group._members._meeting.board
    for round in board.committed():
        commit = board.commit(round)
        assert not commit.refused, (seed, commit.refused)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--first", type=int, default=0)
    options = parser.parse_args()
    killed = 0
    for seed in range(options.first, options.first + options.seeds):
        killed += world(seed)
        print(f"seed {seed}: {killed} trainers killed so far", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
