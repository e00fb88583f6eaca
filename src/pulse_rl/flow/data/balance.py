"""Who waits for whom: the balance report, and the rule that asks for more or fewer workers.

Time is accounted for where it is lost: a trainer waits from a pull that found no batch until one is given; a worker's
slot is idle while it has no task. Both are shares of the last minutes, in which older time counts less and less.
"""

import math
from typing import Any, NamedTuple

WINDOW = 120.0  # seconds in which past time loses 63 % of its weight


class DutyCycle:
    """The share of recent time that something was on. Every change is O(1)."""

    def __init__(self, window: float = WINDOW) -> None:
        self._window = window
        self._at: float | None = None  # of the last change
        self._level = 0.0
        self._on = 0.0  # weighted seconds
        self._all = 0.0  # weighted seconds

    def set(self, level: float, now: float) -> None:
        """From now on it is on (1), off (0), or in part."""
        self._move(now)
        self._level = level

    def value(self, now: float) -> float:
        """From 0 to 1; 0 before any time has passed."""
        self._move(now)
        return self._on / self._all if self._all else 0.0

    def _move(self, now: float) -> None:
        if self._at is not None and now > self._at:
            kept = math.exp((self._at - now) / self._window)
            new = self._window * (1 - kept)
            self._on = self._on * kept + self._level * new
            self._all = self._all * kept + new
        if self._at is None or now > self._at:
            self._at = now


class _Load:
    """The slots of a region's live workers, and how many have a task."""

    def __init__(self, window: float) -> None:
        self.workers = 0
        self.slots = 0
        self.busy = 0
        self._busy_share = DutyCycle(window)

    def set(self, now: float) -> None:
        self._busy_share.set(self.busy / self.slots if self.slots else 0.0, now)

    def idle(self, now: float) -> float:
        return 1.0 - self._busy_share.value(now) if self.slots else 0.0


class Loads:
    """How busy the workers of each region are. window: of the shares, in seconds."""

    def __init__(self, window: float = WINDOW) -> None:
        self._window = window
        self._regions: dict[str, _Load] = {}

    def change(self, region: str, now: float, *, slots: int = 0, busy: int = 0, workers: int = 0) -> None:
        load = self._regions.setdefault(region, _Load(self._window))
        load.workers += workers
        load.slots += slots
        load.busy += busy
        load.set(now)

    def regions(self, now: float) -> "dict[str, Region]":
        return {
            name: Region(load.workers, load.slots, load.busy, load.idle(now)) for name, load in self._regions.items()
        }


class Region(NamedTuple):
    """The live workers of one region."""

    workers: int
    slots: int
    busy: int  # slots with a task
    idle: float  # share of the slots' recent time


class Balance(NamedTuple):
    """Who waited for whom, of late."""

    at: float  # seconds, by the dataflow's clock
    waits: dict[str, float]  # of each trained policy: the share of time for which its trainer waited for a batch
    regions: dict[str, Region]

    @property
    def wait(self) -> float:
        """Of the trainer that waits most."""
        return max(self.waits.values(), default=0.0)

    @property
    def idle(self) -> float:
        """Of all slots, the share of idle time."""
        slots = sum(region.slots for region in self.regions.values())
        return sum(region.idle * region.slots for region in self.regions.values()) / slots if slots else 0.0

    def sentence(self) -> str:
        """Who waits for whom, in words."""
        waits = ", ".join(f"{name} {wait:.0%}" for name, wait in self.waits.items())
        idles = ", ".join(f"{name or 'workers'} {region.idle:.0%}" for name, region in self.regions.items())
        return f"trainers wait for batches: {waits or 'none runs'}; slots wait for tasks: {idles or 'no worker'}"

    def plain(self) -> dict[str, Any]:
        """For JSON."""
        regions = {name: region._asdict() for name, region in self.regions.items()}
        return {"at": self.at, "waits": self.waits, "regions": regions, "sentence": self.sentence()}


class WaitRule:
    """AstraFlow's rule (arXiv 2605.15565), with limits and damping.

    A trainer that waits for more than `grow` of its time needs ceil(workers / (1 − wait)) workers. One that waits for
    less than `shrink`, while slots are idle, can do with fewer: as many as were busy, and one.

    Damping: after a change nothing changes for `settle` seconds, in which new workers start and the shares follow.
    A step at most doubles, and takes at most a quarter away. A number of workers with which trainers waited is not
    gone back to for `memory` seconds.
    """

    def __init__(
        self,
        *,
        least: int = 1,
        most: int = 8,
        grow: float = 0.10,
        shrink: float = 0.05,
        settle: float = 2 * WINDOW,
        memory: float = 20 * WINDOW,
    ) -> None:
        if not 1 <= least <= most:
            raise ValueError(f"least: expected from 1 to most ({most}), found {least}")
        if not 0 <= shrink < grow < 1:
            raise ValueError(f"grow: expected a share above shrink ({shrink}) and below 1, found {grow}")
        self._least, self._most = least, most
        self._grow, self._shrink = grow, shrink
        self._settle, self._memory = settle, memory
        self._changed: float | None = None  # when
        self._too_few = 0  # the most workers with which trainers waited
        self._too_few_at = -math.inf

    def target(self, balance: Balance, workers: int) -> int:
        """How many workers are wanted. workers: how many there are, those that are only starting included."""
        bounded = min(max(workers, self._least), self._most)
        if bounded != workers:
            self._changed = balance.at
            return bounded
        if self._changed is None:
            self._changed = balance.at  # the shares say little of a run that has just begun
        if balance.at - self._changed < self._settle:
            return workers
        wanted = min(max(self._wanted(balance, workers), self._least), self._most)
        if wanted != workers:
            self._changed = balance.at
        return wanted

    def _wanted(self, balance: Balance, workers: int) -> int:
        if balance.wait > self._grow:
            self._too_few, self._too_few_at = workers, balance.at
            return min(math.ceil(workers / max(1 - balance.wait, 0.5)), 2 * workers)
        if balance.wait >= self._shrink:
            return workers
        needed = math.ceil(workers * (1 - balance.idle)) + 1
        floor = self._too_few + 1 if balance.at - self._too_few_at < self._memory else self._least
        return min(workers, max(needed, math.floor(workers * 0.75), floor))
