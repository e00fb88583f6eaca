"""The processes of `bench sync`, and the model that other benchmarks take too. `sync` says what is measured and how."""

import gc
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

import pulse_rl as pulse
from bench.report import Stopwatch
from pulse_rl.codecs.choose import CodecName
from pulse_rl.sync.freed import return_freed

LEARNING_RATE = 1e-6
WEIGHT_STD = 0.16  # of the synthetic weights: with it, about 0.15 % of the BF16 bits change a step
MOVE_STD = 0.23  # of |m| / √v for noisy gradients at Adam's β₁ = 0.9: √((1 − β₁) / (1 + β₁))
CHUNK = 1 << 20  # elements moved at a time
SAMPLE_S = 0.002


def shapes(layers: int, width: int = 1, vocab: int = 49152) -> dict[str, tuple[int, ...]]:
    """SmolLM2-135M's tensors, from its Llama configuration; the head is tied to the embedding.

    width: how many times as wide it is.
    """
    hidden, intermediate, heads, kv_heads = 576 * width, 1536 * width, 9, 3
    kv = hidden // heads * kv_heads
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, hidden)}
    for layer in range(layers):
        root = f"model.layers.{layer}"
        found |= {
            f"{root}.self_attn.q_proj.weight": (hidden, hidden),
            f"{root}.self_attn.k_proj.weight": (kv, hidden),
            f"{root}.self_attn.v_proj.weight": (kv, hidden),
            f"{root}.self_attn.o_proj.weight": (hidden, hidden),
            f"{root}.mlp.gate_proj.weight": (intermediate, hidden),
            f"{root}.mlp.up_proj.weight": (intermediate, hidden),
            f"{root}.mlp.down_proj.weight": (hidden, intermediate),
            f"{root}.input_layernorm.weight": (hidden,),
            f"{root}.post_attention_layernorm.weight": (hidden,),
        }
    found["model.norm.weight"] = (hidden,)
    return found


def masters(layers: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """FP32 weights; like an optimizer's masters they are not rounded to BF16."""
    return {
        name: torch.empty(shape).normal_(0.0, WEIGHT_STD, generator=generator) for name, shape in shapes(layers).items()
    }


def step(weights: dict[str, torch.Tensor], generator: torch.Generator, moves: torch.Tensor | None = None) -> None:
    """Move the weights as an Adam step does: each by about a quarter of the learning rate, whatever its magnitude.

    moves: (CHUNK,), memory to work in. Were it allocated here, a publisher's peak would count it.
    """
    moves = torch.empty(CHUNK) if moves is None else moves
    for tensor in weights.values():
        flat = tensor.view(-1)
        for start in range(0, len(flat), CHUNK):
            chunk = flat[start : start + CHUNK]
            move = moves[: len(chunk)].normal_(0.0, MOVE_STD, generator=generator).clamp_(-1.0, 1.0)
            chunk.sub_(move, alpha=LEARNING_RATE)


class Peak:
    """The peak of RssAnon while it is entered, in bytes above what it was when this was made."""

    def __init__(self) -> None:
        gc.collect()
        return_freed()  # by the warm-up
        self._floor = rss_anon()
        self._stop = threading.Event()
        self.nbytes = 0
        self.cpu_s = 0.0  # processor seconds that the sampling itself took

    def __enter__(self) -> "Peak":
        self._stop.clear()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()

    def _sample(self) -> None:
        while True:
            self.nbytes = max(self.nbytes, rss_anon() - self._floor)
            if self._stop.wait(SAMPLE_S):
                self.cpu_s += time.thread_time()
                return


def rss_anon() -> int:
    """This process's private memory in bytes. Linux only."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise OSError("/proc/self/status has no RssAnon")


def warm() -> None:
    """Load every module and compiled kernel that the measured code uses, on all threads."""
    generator = torch.Generator().manual_seed(1)
    small = {"w": torch.empty(1 << 22).normal_(0.0, WEIGHT_STD, generator=generator)}
    store = pulse.open_store("memory://")
    publisher, subscriber = pulse.Publisher(store, cast="bfloat16"), pulse.Subscriber(store)
    live = {"w": torch.zeros(1 << 22, dtype=torch.bfloat16)}
    for version in range(3):
        publisher.publish(small, version=version)
        subscriber.sync(live)
        step(small, generator)


def publisher(directory: Path, versions: int, layers: int, codec: CodecName) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    weights, moves = masters(layers, generator), torch.zeros(CHUNK)  # zeros, so that its pages are there
    warm()
    peak = Peak()
    publisher = pulse.Publisher(directory / "store", cast="bfloat16", anchor_every=10**9, codec=codec)
    reports = []
    for version in range(versions + 1):
        if version:
            step(weights, generator, moves)
        with peak:
            reports.append(publisher.publish(weights, version=version))
    return {
        "elements": reports[0].elements,
        "full_nbytes": reports[0].full_nbytes,
        "codec": reports[-1].codec,
        "seconds": [report.total_s for report in reports],
        "patch_nbytes": [report.patch_nbytes for report in reports[1:]],
        "density": [report.density for report in reports[1:]],
        "digests": [report.digest for report in reports],
        "peak_nbytes": peak.nbytes,
    }


def live_weights(layers: int) -> dict[str, torch.Tensor]:
    return {name: torch.full(shape, 0.5, dtype=torch.bfloat16) for name, shape in shapes(layers).items()}


def subscriber(directory: Path, versions: int, layers: int) -> dict[str, Any]:
    live = live_weights(layers)
    warm()
    peak = Peak()
    subscriber = pulse.Subscriber(pulse.open_store(directory / "store"))
    reports = []
    for version in range(versions + 1):
        with peak:
            reports.append(subscriber.sync(live, version=version))
    subscriber.verify(live)
    return {
        "seconds": [report.total_s for report in reports],
        "digests": [report.digest for report in reports],
        "peak_nbytes": peak.nbytes,
    }


def full_checkpoints(directory: Path, versions: int, layers: int) -> dict[str, Any]:
    """Save and load with torch.save and safetensors, in turns."""
    from safetensors.torch import load_file, save_file

    weights = masters(layers, torch.Generator().manual_seed(0))
    live = live_weights(layers)
    files = {"torch": directory / "full.pt", "safetensors": directory / "full.safetensors"}

    def cast() -> dict[str, torch.Tensor]:
        return {name: tensor.to(torch.bfloat16) for name, tensor in weights.items()}

    def fill(source: dict[str, torch.Tensor]) -> None:
        for name, tensor in source.items():
            live[name].copy_(tensor)

    clock = Stopwatch()
    for _ in range(versions):
        clock.time("torch save", lambda: torch.save(cast(), files["torch"]))
        clock.time("torch load", lambda: fill(torch.load(files["torch"], weights_only=True)))
        clock.time("safetensors save", lambda: save_file(cast(), files["safetensors"]))
        clock.time("safetensors load", lambda: fill(load_file(files["safetensors"])))
    return {
        name: {
            "save_s": clock.median(f"{name} save"),
            "load_s": clock.median(f"{name} load"),
            "nbytes": path.stat().st_size,
        }
        for name, path in files.items()
    }
