"""Models in wrappers are published, synced into and anchored under the model's own names."""

import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import accelerate
import pytest
import torch
import torch.distributed as dist
import transformers
from torch._C._distributed_c10d import HashStore
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import pulse_rl as pulse
from pulse_rl.weights import names
from pulse_rl.weights.layout import layout
from tests.llama import tiny


@pytest.fixture(scope="module")
def process_group() -> Iterator[None]:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def llama(seed: int) -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return tiny(tie_word_embeddings=seed % 2 == 0)


def compiled_layers(model: Any) -> Any:
    for number, layer in enumerate(model.model.layers):
        model.model.layers[number] = torch.compile(layer)
    return model


def checkpointed_layers(model: Any) -> Any:
    for number, layer in enumerate(model.model.layers):
        compiled: Any = torch.compile(layer)
        model.model.layers[number] = checkpoint_wrapper(compiled)
    return model


class DeepSpeedEngine(torch.nn.Module):
    """Of the shape of DeepSpeed's, and of its name: a module that holds the model, and passes attributes on to it."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.module = model

    def __getattr__(self, name: str) -> Any:
        modules = self.__dict__["_modules"]
        return modules[name] if name in modules else getattr(modules["module"], name)


DeepSpeedEngine.__module__ = "deepspeed.runtime.engine"


class PipelineEngine(DeepSpeedEngine):
    pass


WRAPPED: dict[str, Any] = {
    "compiled": torch.compile,
    "compiled layers": compiled_layers,
    "compiled layers, compiled": lambda model: torch.compile(compiled_layers(model)),
    "checkpointed, compiled layers": checkpointed_layers,
    "data parallel": torch.nn.DataParallel,
    "DDP": torch.nn.parallel.DistributedDataParallel,
    "DDP of compiled": lambda model: torch.nn.parallel.DistributedDataParallel(torch.compile(model)),
    "compiled DDP": lambda model: torch.compile(torch.nn.parallel.DistributedDataParallel(model)),
    "DeepSpeed": DeepSpeedEngine,
    "DeepSpeed's subclass, compiled": lambda model: torch.compile(PipelineEngine(model)),
    "Accelerate": lambda model: accelerate.Accelerator(cpu=True, dynamo_backend="eager").prepare(model),
}


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("how", WRAPPED)
def test_wrapped_models_are_published_under_their_own_names(how: str, tied: bool, tmp_path: Path) -> None:
    """Their anchors load with from_pretrained, bit for bit; and a wrapped worker follows, whatever its wrapper is."""
    plain = llama(0 if tied else 1)
    expected = pulse.digest(plain)
    wrapped = WRAPPED[how](plain)
    assert pulse.digest(wrapped) == expected
    publisher = pulse.Publisher(tmp_path, anchor_every=2)
    assert publisher.publish(wrapped, version=0).digest == expected
    with torch.no_grad():
        for parameter in wrapped.parameters():
            parameter.view(-1)[::7] += 1e-2
    digest = publisher.publish(wrapped, version=1).digest
    assert digest != expected
    publisher.publish(wrapped, version=2)
    anchors = sorted((tmp_path / "anchors").iterdir())
    for anchor, bits in zip(anchors, (expected, digest), strict=True):
        loaded = transformers.AutoModelForCausalLM.from_pretrained(anchor)
        assert type(loaded) is transformers.LlamaForCausalLM
        assert pulse.digest(loaded) == bits
    for worker in (llama(2 if tied else 3), WRAPPED[how](llama(2 if tied else 3))):
        subscriber = pulse.Subscriber(tmp_path)
        assert subscriber.sync(worker, version=0).digest == expected
        assert subscriber.sync(worker).route == "patches"
        assert subscriber.verify(worker) == digest
        again = subscriber.sync(names.unwrap(worker))  # the same memory: nothing is recognised anew
        assert (again.route, again.recovered) == ("none", None)
        assert pulse.digest(names.unwrap(worker)) == digest


def test_layers_that_are_called_like_a_wrapper_keep_their_names() -> None:
    model = torch.nn.Module()
    model.module = torch.nn.Module()
    model.module._orig_mod = torch.nn.Linear(2, 2)
    assert sorted(layout(model)) == ["module._orig_mod.bias", "module._orig_mod.weight"]
    assert sorted(layout(torch.compile(model))) == ["module._orig_mod.bias", "module._orig_mod.weight"]
    assert names.unwrap(model) is model
    assert sorted(names.named_parameters(torch.compile(model))) == ["module._orig_mod.bias", "module._orig_mod.weight"]


class Counting(torch.nn.Linear):
    """A layer that keeps more than tensors in its state dict, as those of Transformer Engine do."""

    def __init__(self, state: Any) -> None:
        super().__init__(3, 3)
        self.state = state

    def get_extra_state(self) -> Any:
        return self.state if isinstance(self.state, dict) else torch.tensor(self.state)


@pytest.mark.parametrize("state", [{"scale": 1.0}, 7], ids=["dict", "tensor"])
def test_a_modules_extra_state_is_no_tensor_of_it(state: Any) -> None:
    store = pulse.open_store("memory://")
    trained, followed = (torch.nn.Sequential(Counting(state)) for _ in range(2))
    pulse.Publisher(store).publish(trained, version=0)
    assert pulse.Subscriber(store).sync(followed).digest == pulse.digest(dict(trained.named_parameters()))
    assert torch.equal(followed.get_parameter("0.weight"), trained.get_parameter("0.weight"))


def test_partitioned_parameters_of_deepspeed_are_refused() -> None:
    """ZeRO stage 3 leaves nothing of them in the model: without a word, empty tensors would be published."""
    model = torch.nn.Linear(2, 2)
    whole = pulse.digest(model)
    for parameter in model.parameters():
        parameter.ds_numel = parameter.numel()  # type: ignore[attr-defined]
    assert pulse.digest(DeepSpeedEngine(model)) == whole
    model.weight.data = torch.empty(0)
    with pytest.raises(TypeError, match="'weight'.*integrations.deepspeed.shards"):
        pulse.Publisher("memory://").publish(DeepSpeedEngine(model))


def test_two_tensors_of_one_name_are_refused() -> None:
    model = torch.nn.DataParallel(torch.nn.Linear(2, 2))
    model.weight = torch.nn.Parameter(torch.zeros(2))
    with pytest.raises(ValueError, match="'weight' and 'module.weight' have one name, 'weight'"):
        pulse.digest(model)


@pytest.mark.parametrize("prefix", ["_orig_mod.", "module.", "base_model.model."])
def test_a_state_dict_of_wrapped_names_is_published_with_a_warning(
    prefix: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Once; and who syncs the model itself reads why the names differ."""
    layer = "base_layer." if "base_model" in prefix else ""
    state = {f"{prefix}0.{layer}{name}": tensor for name, tensor in torch.nn.Linear(2, 2).state_dict().items()}
    publisher = pulse.Publisher("memory://")
    with caplog.at_level(logging.WARNING):
        publisher.publish(state, version=0)
        publisher.publish(state, version=1)
    (record,) = caplog.records
    assert f"names with the prefix {prefix!r}" in record.message
    with pytest.raises(pulse.BaseMismatchError, match=f"what is missing carries the prefix '{prefix}'"):
        pulse.Subscriber(publisher.history.store).sync(torch.nn.Linear(2, 2))
    caplog.clear()
    pulse.Publisher("memory://").publish({**state, "head": torch.zeros(2)}, version=0)
    adapters = {f"base_model.model.q_proj.lora_{half}.weight": torch.zeros(2, 2) for half in "AB"}
    pulse.Publisher("memory://").publish(adapters, version=0)
    assert not caplog.records


def test_adapters_of_peft_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for its classes: a layer with adapters inside of a model, compiled."""

    class BaseTunerLayer:
        pass

    class Adapted(torch.nn.Linear, BaseTunerLayer):
        pass

    monkeypatch.setitem(sys.modules, "peft.tuners.tuners_utils", SimpleNamespace(BaseTunerLayer=BaseTunerLayer))
    model: Any = torch.compile(torch.nn.Sequential(torch.nn.Linear(2, 2), Adapted(2, 2)))
    publisher = pulse.Publisher("memory://")
    with pytest.raises(TypeError, match="merged_weights"):
        publisher.publish(model, version=0)
    assert publisher.version is None
    publisher.publish(model.state_dict(), version=0)
    pulse.Publisher("memory://").publish(torch.nn.Linear(2, 2), version=0)


def test_nothing_of_torchs_compiler_is_imported() -> None:
    code = (
        "import sys, torch, pulse_rl\npulse_rl.digest(torch.nn.Linear(2, 2))\n"
        "assert 'torch._dynamo.eval_frame' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
