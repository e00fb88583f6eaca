"""What a simulated dataflow is given, and what came of it."""

import random

import msgspec

PLAYS = 8  # of a problem


class Setup(msgspec.Struct, frozen=True, kw_only=True):
    """What is simulated. Times are in seconds."""

    workers: int = 100
    slots: int = 4  # of each
    policies: int = 1
    staleness: int = 2  # versions
    lockstep: bool = False  # all policies go from version to version together
    hours: float = 1.0
    load: float = 1.0  # of the workers, if trainers never waited and nothing were dropped
    median_s: float = 20.0  # of a play
    sigma: float = 0.8  # standard deviation of its logarithm
    growth: float = 1.0  # plays take so many times as long at the end
    base_workers: int = 0  # for which batches are made; 0: workers
    train_s: float = 60.0  # of a step of the first policy; each further one is a tenth faster
    sync_s: float = 0.5  # from a published version to a worker that has proved it
    far: float = 0.0  # share of the workers in another region
    far_sync_s: float = 30.0
    far_slowness: float = 2.0  # plays take so many times as long there
    mtbf_s: float = 0.0  # mean time between deaths of a worker; 0: none dies
    restart_s: float = 60.0
    noticed: float = 0.5  # share of deaths that the driver sees; others are found by silence
    errors: float = 0.0  # share of tasks that fail
    broken: float = 0.0  # share of the workers on which every task fails
    trainer_mtbf_s: float = 0.0
    heartbeat_s: float = 5.0
    autoscale: bool = False
    most: int = 0  # workers, for autoscaling; 0: twice as many as at the start
    journal: bool = False
    seed: int = 0

    @property
    def play_s(self) -> float:
        """The mean time of a group, found once by drawing."""
        draw = random.Random(0)
        times = [max(draw.lognormvariate(0, self.sigma) for _ in range(PLAYS)) for _ in range(4000)]
        return self.median_s * sum(times) / len(times)

    @property
    def groups(self) -> int:
        """Of a batch, so that the workers have that load at the beginning."""
        speed = (
            (self.base_workers or self.workers)
            * (1 - self.far + self.far / self.far_slowness)
            * self.slots
            / self.play_s
        )
        return max(1, round(self.load * speed * self.train_s))


class Outcome(msgspec.Struct, frozen=True):
    """What came of it."""

    steps: int  # of all policies together
    steps_per_hour: float  # of the slowest policy
    utilisation: float  # share of the slots' time that went into groups that a policy trained on
    busy: float  # share of the slots' time with a task
    wait: float  # share of its time that the first policy's trainer waits, after the first step
    staleness: float  # mean, versions
    stalest: int  # at most, versions
    parts: int  # of groups, for all policies together
    dropped: dict[str, int]
    tasks: dict[str, int]
    lost: int  # tasks that are in no place; must be 0
    worker_hours: float
    workers: list[int]  # at each decision of autoscaling
    calls: int  # of the dataflow
    cpu_s: float  # processor seconds of all this, simulated engines included, for each simulated hour
    journal_nbytes: int  # written, for each simulated hour
