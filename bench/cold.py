"""What the first versions cost where no kernel is compiled yet: `python -m bench.cold`.

An anchor and a patch, published and synced by one process; processor time, of all threads.
"""

import tempfile
import time
from pathlib import Path

import torch

import pulse_rl as pulse
from bench.report import CODECS, PatchCodec, fresh_processes
from pulse_rl.kernels.cpu import compiled


def measure(codec: PatchCodec) -> None:
    """Print the seconds of both, and how many kernels were compiled, in a fresh process."""
    random = torch.Generator().manual_seed(0)
    weights = {f"{i}.weight": torch.randn(300, 500, generator=random).mul(0.02).bfloat16() for i in range(8)}
    live = {name: torch.zeros_like(tensor) for name, tensor in weights.items()}
    with tempfile.TemporaryDirectory() as store, compiled.keeping(Path(store) / "kernels"):
        begun = time.process_time()
        publisher = pulse.Publisher(Path(store) / "history", codec=codec)
        subscriber = pulse.Subscriber(publisher.history.store)
        for version in range(2):
            publisher.publish(weights, version=version)
            subscriber.sync(live)
            for tensor in weights.values():
                tensor.view(-1)[::500] *= 1.01
        seconds = time.process_time() - begun
    print(f"{codec}: {seconds:.1f} processor seconds, {compiled.so_far().kernels} kernels compiled")


if __name__ == "__main__":
    with fresh_processes(1) as pool:
        for name in CODECS:
            pool.submit(measure, name).result()
