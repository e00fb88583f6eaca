"""The settings of a run: one flat record, written to `config.toml` in the run's directory."""

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

import msgspec

from pulse_rl.disk import read_file
from pulse_rl.errors import require
from pulse_rl.rl import model_name

FILE = "config.toml"
RECIPE = "recipe.toml"  # in its place, where the run is one of a recipe


class RunConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Every setting of a run. The defaults are those of `make train`."""

    out: str = "runs/main"  # the run's directory
    store: str | None = None  # URL of the history; None: `store` in the run's directory
    model: str = "smollm2"  # "smollm2", "tiny", or a directory or hub id for Transformers
    dither: int | None = None  # seed; adds noise to dequantised weights, within their quantisation step
    task: str = "chain_sum"  # a reasoning-gym dataset, with settings: "chain_sum:max_terms=3"
    steps: int = 40  # optimizer steps of each trainer
    workers: int = 2  # rollout workers
    engine: Literal["builtin", "vllm"] = "builtin"  # what they sample with
    trainers: int = 1
    trainer_sync: Literal["pulse", "published", "diloco", "ddp"] = "pulse"  # what several trainers exchange
    trainer_store: str | None = None  # URL of the store through which trainers exchange; None: over the network
    sync_every: int = 8  # steps per round, and so per version, with several trainers
    prompts: int = 8  # per step and trainer
    group_size: int = 8  # completions per prompt
    chunk: int = 4  # prompts that a worker samples at a time
    max_new_tokens: int = 8
    temperature: float = 1.0
    lr: float = 3e-6  # the paper's
    warmup: int = 0  # steps in which the learning rate rises linearly to lr
    betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: float = 0.0
    clip: float = 0.2  # of the probability ratio, on both sides
    grad_clip: float = 1.0  # largest norm of the gradient
    max_staleness: int = 1  # versions by which a completion may lag behind the newest
    deterministic: bool = False  # synchronous: the same seed gives the same bits, whatever the timing
    seed: int = 0
    sync: Literal["patch", "full"] = "patch"  # what workers read: patches, or a full checkpoint per version
    codec: str = "context"  # the smallest: workers may be anywhere, though "auto" finds the default store fast
    anchor_every: int = 50  # versions
    checkpoint_every: int = 100  # steps; the end and Ctrl-C write one too
    threads: int = 1  # torch threads of each trainer and of each worker
    address: str | None = None  # a Ray cluster's address; None: this machine

    @property
    def directory(self) -> Path:
        return Path(self.out).absolute()

    @property
    def store_url(self) -> str:
        if self.store is None:
            return (self.directory / "store").as_uri()
        return str(absolute_store(self.store))

    def with_absolute_paths(self) -> "RunConfig":
        """The same settings for processes elsewhere, which have other working directories."""
        stores = {"store": self.store and self.store_url, "trainer_store": absolute_store(self.trainer_store)}
        return msgspec.structs.replace(self, out=str(self.directory), **stores)

    @property
    def chunks(self) -> int:
        """Chunks per step of one trainer."""
        return self.prompts // self.chunk

    @property
    def round_steps(self) -> int:
        """Steps from one version to the next."""
        return 1 if self.trainers == 1 else self.sync_every


def absolute_store(store: str | None) -> str | None:
    """A store's URL as it is, a path as an absolute one: processes elsewhere have other working directories."""
    return store if store is None or "://" in store else str(Path(store).absolute())


def check(config: RunConfig) -> RunConfig:
    """Return the settings. Raises ValueError that names the first bad one."""
    positive = ("steps", "workers", "prompts", "group_size", "chunk", "max_new_tokens", "anchor_every")
    for name in (*positive, "checkpoint_every", "threads", "trainers", "sync_every"):
        if getattr(config, name) < 1:
            raise ValueError(f"{name}: expected at least 1, found {getattr(config, name)}")
    for name in ("lr", "temperature", "clip", "grad_clip"):
        if not 0 < getattr(config, name) < math.inf:
            raise ValueError(f"{name}: expected more than 0, found {getattr(config, name)}")
    if not all(0 <= beta < 1 for beta in config.betas):
        raise ValueError(
            f"betas: expected two numbers from 0 to below 1, found {config.betas[0]} and {config.betas[1]}"
        )
    if config.warmup < 0:
        raise ValueError(f"warmup: expected at least 0 steps, found {config.warmup}")
    if not 0 <= config.weight_decay < math.inf:
        raise ValueError(f"weight_decay: expected at least 0, found {config.weight_decay}")
    if config.prompts % config.chunk:
        raise ValueError(f"prompts: expected a multiple of chunk ({config.chunk}), found {config.prompts}")
    if config.group_size < 2:
        raise ValueError("group_size: expected at least 2, or no advantage can be computed, found 1")
    if config.max_staleness < 0:
        raise ValueError(f"max_staleness: expected at least 0, found {config.max_staleness}")
    if config.sync not in ("patch", "full"):
        raise ValueError(f"sync: expected patch or full, found {config.sync!r}")
    for name in ("store", "trainer_store"):
        if (getattr(config, name) or "").startswith("memory:"):
            raise ValueError(
                f"{name}: expected a directory that every process reaches; memory:// lives in one process only"
            )
    model_name.check(config.model, dither=config.dither)
    if config.engine not in ("builtin", "vllm"):
        raise ValueError(f"engine: expected builtin or vllm, found {config.engine!r}")
    if config.engine == "vllm" and config.deterministic:
        raise ValueError("--deterministic needs --engine builtin: vLLM's results depend on what it has cached")
    if config.engine == "vllm" and config.sync == "full":
        raise ValueError("--sync full needs --engine builtin: vLLM follows by patches")
    _check_trainers(config)
    return config


def _check_trainers(config: RunConfig) -> None:
    if config.trainer_sync not in ("pulse", "published", "diloco", "ddp"):
        raise ValueError(f"trainer_sync: expected pulse, published, diloco or ddp, found {config.trainer_sync!r}")
    if config.trainers == 1:
        for name in ("trainer_sync", "trainer_store", "sync_every"):
            if getattr(config, name) != getattr(RunConfig(), name):
                raise ValueError(f"--{name.replace('_', '-')} needs --trainers 2 or more, found 1")
    if config.trainer_store is not None and config.trainer_sync == "ddp":
        raise ValueError(
            "--trainer-store needs --trainer-sync pulse, published or diloco, found ddp, which exchanges every step"
        )
    if config.steps % config.round_steps:
        raise ValueError(
            f"steps: expected whole rounds with several trainers, a multiple of sync_every ({config.sync_every}), "
            f"found {config.steps}"
        )


def save(config: RunConfig) -> None:
    """Write config.toml, whole or not at all. TOML has no null, so settings that are None are left out."""
    from pulse_rl.disk import write_stream  # keeps --help fast

    tomli_w = require("tomli_w", "run")
    document = {k: v for k, v in msgspec.to_builtins(config).items() if v is not None}
    write_stream(config.directory / FILE, [tomli_w.dumps(document).encode()])


def remove(config: RunConfig) -> None:
    """Remove config.toml: the run has not begun."""
    (config.directory / FILE).unlink()


def begun(directory: Path) -> bool:
    """Whether a run has begun there: its settings are written just before its first version."""
    return any((directory / name).is_file() for name in (FILE, RECIPE))


def load(directory: Path) -> RunConfig:
    """Read a run's config.toml. Raises FileNotFoundError if there is no run, ValueError if it is broken."""
    path = directory / FILE
    if not path.is_file():
        raise FileNotFoundError(f"no run in {directory}: expected a {FILE} there")
    try:
        return msgspec.toml.decode(read_file(path), type=RunConfig)
    except msgspec.DecodeError as error:
        raise ValueError(f"{path}: {error}") from None


def resumed(directory: Path, given: dict[str, object]) -> RunConfig:
    """The settings with which a run continues. given: settings that change; only some may.

    Raises ValueError for a setting that would make it another run.
    """
    config = load(directory)
    free = {"steps", "workers", "threads", "address", "checkpoint_every"}
    if fixed := sorted(given.keys() - free - {"out"}):
        raise ValueError(
            f"--resume keeps the settings of the run in {directory}: only {_options(free)} may be given with it, found "
            f"{_options(fixed)}"
        )
    changes = {name: value for name, value in given.items() if name in free} | {"out": str(directory)}
    return check(msgspec.structs.replace(config, **changes))


def _options(names: Iterable[str]) -> str:
    """Settings as options of the command line."""
    return ", ".join(f"--{name.replace('_', '-')}" for name in sorted(names))
