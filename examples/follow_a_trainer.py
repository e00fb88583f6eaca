"""A trainer with FP32 masters and a rollout worker in BF16, following it bit for bit through a directory.

Run it: python examples/follow_a_trainer.py
"""

import tempfile

import torch

import pulse_rl as pulse


def network() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(512, 2048), torch.nn.GELU(), torch.nn.Linear(2048, 10))


def main() -> None:
    torch.manual_seed(0)
    masters = network()
    optimizer = torch.optim.AdamW(masters.parameters(), lr=3e-6)
    rollout = network().bfloat16()

    with tempfile.TemporaryDirectory() as directory:
        # On a cluster these two lines run on different machines and name the same store.
        publisher = pulse.Publisher(pulse.open_store(directory), cast="bfloat16")
        subscriber = pulse.Subscriber(pulse.open_store(directory))

        publisher.publish(masters, version=0)
        subscriber.sync(rollout)
        for step in range(1, 6):
            masters(torch.randn(64, 512)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

            sent = publisher.publish(masters, version=step)
            got = subscriber.sync(rollout)
            print(
                f"version {got.version}: {got.changes} of {sent.elements} weights changed, "
                f"{got.fetched_nbytes} bytes instead of {got.full_nbytes} ({got.reduction:.0f}×)"
            )

        cast = {name: tensor.bfloat16() for name, tensor in masters.state_dict().items()}
        assert pulse.digest(rollout) == pulse.digest(cast) == subscriber.digest


if __name__ == "__main__":
    main()
