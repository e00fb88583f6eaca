"""Models of PEFT: their adapters alone, and merged weights, against PEFT's own checkpoints and merge_and_unload."""

import copy
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import pulse_rl as pulse
from pulse_rl.integrations.peft import adapter_files, adapter_weights, merged_weights
from pulse_rl.weights.layout import layout
from tests.llama import tiny
from tests.loco.ranks import Ranks, good
from tests.weights.held import bits_of

peft = pytest.importorskip("peft")

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


def base(tie: bool = True, dtype: torch.dtype = torch.bfloat16) -> Any:
    torch.manual_seed(0)
    return tiny(tie_word_embeddings=tie).to(dtype)


def adapted(seed: int = 1, model: Any = None, **options: Any) -> Any:
    """With adapters that do something: PEFT's begin as zeros."""
    config = peft.LoraConfig(**{"r": 4, "target_modules": ["q_proj", "down_proj"]} | options)
    model = peft.get_peft_model(model or base(), config)
    change(model, seed)
    return model


def change(model: Any, seed: int) -> None:
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                parameter.copy_(
                    0.1 * torch.randn(parameter.shape, generator=random) + (0.5 if "magnitude" in name else 0)
                )


def bits(weights: Any) -> dict[str, bytes]:
    """The bits of all weights, tied ones too, read as a publisher does."""
    return {name: tensor.read(0, tensor.size).tobytes() for name, tensor in layout(weights).all_names().items()}


# Adapters alone


@pytest.mark.parametrize("options", [{}, {"use_dora": True}, {"modules_to_save": ["norm"]}, {"lora_bias": False}])
def test_adapters_have_the_names_of_their_checkpoints(options: dict[str, Any], tmp_path: Path) -> None:
    from safetensors.torch import load_file

    model = adapted(**options)
    model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "adapter_model.safetensors")
    found = adapter_weights(model)
    assert found.keys() == saved.keys()
    assert bits(found) == bits(saved)
    live = {id(tensor) for tensor in model.state_dict(keep_vars=True).values()}
    assert all(id(tensor) in live for tensor in found.values())
    assert bits(adapter_weights(torch.compile(model))) == bits(found)


def test_workers_follow_adapters_in_place_and_their_folders_load(tmp_path: Path) -> None:
    model, worker = adapted(1), adapted(2)
    store = pulse.open_store(tmp_path / "store")
    publisher, subscriber = pulse.Publisher(store), pulse.Subscriber(store)
    for version in range(3):
        publisher.publish(adapter_weights(model), version=version, assets=adapter_files(model))
        assert subscriber.sync(adapter_weights(worker)).version == version
        assert bits(worker.state_dict()) == bits(model.state_dict())
        (found,) = pulse.mirror(store, tmp_path / "folders", once=True)
        assert sorted(file.name for file in found.folder.iterdir() if file.suffix == ".safetensors") == [
            "adapter_model.safetensors"
        ]
        loaded = peft.PeftModel.from_pretrained(base(), found.folder)
        assert bits(loaded.state_dict()) == bits(model.state_dict())
        change(model, seed=10 + version)


def send_adapters(group: Any, rank: int, size: int) -> list[Any]:
    """Send the adapters of three versions; each rank's model before, and after each version."""
    model, channel = adapted(1 + rank), pulse.Channel(group)
    found: list[Any] = []
    for version in range(3):
        if rank == 0 and version:
            change(model, seed=10 + version)
        weights = adapter_weights(model)
        report = channel.send(weights, version=version) if rank == 0 else channel.receive(weights)
        found.append((report.sent, report.elements, bits(model.state_dict())))
    return found


def test_adapters_arrive_over_a_channel(ranks: Ranks) -> None:
    sent, received = good(ranks(send_adapters, 2))
    assert received == sent  # also the frozen weights, which were not sent
    assert [kind for kind, _, _ in sent] == ["dense", "sparse", "sparse"]
    assert len({str(found) for _, _, found in sent}) == 3
    assert sent[0][1] == sum(tensor.numel() for tensor in adapter_weights(adapted()).values())


def test_adapters_that_are_copied_to_be_saved_are_refused() -> None:
    model = adapted()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            peft, "get_peft_model_state_dict", lambda model, **_: {"a": next(model.parameters()).detach().clone()}
        )
        with pytest.raises(TypeError, match="tensor 'a': expected live memory, found a copy"):
            adapter_weights(model)


# Merged


MERGED: dict[str, dict[str, Any]] = {
    "lora": {},
    "dora": {"use_dora": True},
    "modules to save": {"modules_to_save": ["norm"]},
    "embeddings": {"target_modules": ["q_proj", "embed_tokens"]},
    "head": {"target_modules": ["q_proj", "lm_head"]},
    "trainable tokens": {"trainable_token_indices": [1, 5]},
    "rslora": {"use_rslora": True, "lora_alpha": 7},
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kind", MERGED)
def test_merged_weights_are_those_of_merge_and_unload(kind: str, dtype: torch.dtype) -> None:
    model = adapted(model=base(tie=False, dtype=dtype), **MERGED[kind])
    before = bits(model.state_dict())
    expected = copy.deepcopy(model).merge_and_unload()
    found = merged_weights(model)
    assert bits(found) == bits(expected)
    assert list(found) == list(expected.state_dict())
    assert bits(model.state_dict()) == before
    assert bits(layout(found, "float16")) == bits(layout(expected, "float16"))
    assert pulse.digest(found) == pulse.digest(expected)


def test_plain_workers_follow_merged_weights() -> None:
    model, worker, store = adapted(), base(), pulse.open_store("memory://")
    publisher, subscriber = pulse.Publisher(store), pulse.Subscriber(store)
    weights = merged_weights(model)
    for version in range(3):
        publisher.publish(weights if version == 1 else merged_weights(model), version=version)
        report = subscriber.sync(worker)
        assert (report.version, report.route) == (version, "anchor" if version == 0 else "patches")
        assert bits(worker.state_dict()) == bits(copy.deepcopy(model).merge_and_unload().state_dict())
        change(model, seed=5 + version)  # the same mapping sees it
    with pytest.raises((TypeError, pulse.BaseMismatchError, ValueError)):
        pulse.Subscriber(store).sync(weights)


def test_merged_weights_are_the_same_where_the_caller_s_autocast_is_on() -> None:
    model, worker, store = adapted(model=base(dtype=torch.float32)), base(), pulse.open_store("memory://")
    publisher, subscriber = pulse.Publisher(store, cast="bfloat16"), pulse.Subscriber(store)
    for version in range(2):
        expected = copy.deepcopy(model).merge_and_unload().bfloat16().state_dict()
        with torch.autocast("cpu", torch.bfloat16):
            assert bits(layout(merged_weights(model), "bfloat16")) == bits(expected)
            publisher.publish(merged_weights(model), version=version)
        subscriber.sync(worker)
        assert bits(worker.state_dict()) == bits(expected)
        change(model, seed=5 + version)


def test_a_mapping_of_merged_weights_sees_which_adapters_are_active_and_how_much_of_each_is_added() -> None:
    model = adapted(target_modules=r"model\.layers\.0\.self_attn\.q_proj")  # one layer, which is kept merged
    model.add_adapter("other", copy.deepcopy(model.peft_config["default"]))
    weights = merged_weights(model)
    seen = []
    for adapter, scaling in (("default", 2.0), ("other", 2.0), ("default", 2.0), ("default", 3.0)):
        model.set_adapter(adapter)
        model.base_model.model.model.layers[0].self_attn.q_proj.scaling["default"] = scaling
        seen.append(bits(weights))
        assert seen[-1] == bits(copy.deepcopy(model).merge_and_unload().state_dict())
    assert seen[0] == seen[2]
    assert len({str(each) for each in seen}) == 3


@pytest.mark.parametrize("tied", [False, True])
def test_layers_that_share_a_weight_are_merged_each_by_itself(tied: bool) -> None:
    options: dict[str, Any] = {"target_modules": ["embed_tokens", "lm_head"], "ensure_weight_tying": tied}
    model = adapted(model=base(dtype=torch.float32), **options)
    plain, store = base(tie=False, dtype=torch.float32), pulse.open_store("memory://")
    pulse.Publisher(store).publish(merged_weights(model), version=0)
    pulse.Subscriber(store).sync(plain)
    tokens = torch.arange(12)[None]
    torch.testing.assert_close(plain(tokens).logits, model(tokens).logits)
    assert torch.equal(plain.lm_head.weight, plain.model.embed_tokens.weight) is tied


def test_an_anchor_of_merged_weights_loads_as_a_plain_model(tmp_path: Path) -> None:
    model = adapted()
    pulse.Publisher(tmp_path).publish(merged_weights(model), version=0)
    (anchor,) = (tmp_path / "anchors").iterdir()
    loaded = transformers.AutoModelForCausalLM.from_pretrained(anchor)
    assert bits(loaded.state_dict()) == bits(copy.deepcopy(model).merge_and_unload().state_dict())
    assert type(loaded) is transformers.LlamaForCausalLM
    assert loaded.config.architectures == ["LlamaForCausalLM"]


def test_two_merged_layers_are_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    model = adapted()
    weights = layout(merged_weights(model))
    merged: list[Any] = []
    original = copy.deepcopy

    def counted(*layer: Any) -> Any:
        merged.append(1)
        return original(*layer)

    monkeypatch.setattr("pulse_rl.integrations.peft.copy.deepcopy", counted)
    names = [name for name in weights if "q_proj" in name or "down_proj" in name]
    threads = [threading.Thread(target=weights[names[0]].read, args=(0, 9)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(merged) == 1  # all read one
    for name in names * 2:
        for start in (0, 100):
            whole = weights[name].read(0, weights[name].size)
            assert (weights[name].read(start, start + 50) == whole[start : start + 50]).all()
            part = weights[name].view((slice(1, 5), slice(3, 9)))
            assert (part.read(0, part.size) == whole.reshape(weights[name].shape)[1:5, 3:9].reshape(-1)).all()
            assert part.view((slice(1, 2), slice(0, 2))).read(0, 2).tolist() == part.read(6, 8).tolist()
    assert len(merged) == 2 * len(names)


def test_an_adapter_that_the_model_does_not_have() -> None:
    model = peft.get_peft_model(base(), peft.LoraConfig(target_modules=["q_proj"]), adapter_name="actor")
    for missing in (
        lambda: adapter_weights(model),
        lambda: adapter_files(model),
        lambda: merged_weights(model, adapters=["default"]),
    ):
        with pytest.raises(ValueError, match="expected one of the model's, actor, found 'default'"):
            missing()
    assert len(adapter_weights(model, adapter="actor")) == 4
    with pytest.raises(ValueError, match="expected one of the model's, none, found 'default'"):
        adapter_weights(base())


def test_what_cannot_be_merged() -> None:
    with pytest.raises(ValueError, match=r"layer 'lm_head': .* tied to 'model.embed_tokens.weight'"):
        merged_weights(adapted(target_modules=["lm_head"]))
    with pytest.raises(TypeError, match="adapters that can be merged, found LlamaForCausalLM"):
        merged_weights(base())

    def partitioned(weight: Any) -> None:  # by ZeRO-3
        weight.ds_numel, weight.data = weight.numel(), weight.data.new_empty(0)

    def flat(weight: Any) -> None:  # by FSDP1
        weight._fsdp_flattened, weight.data = True, weight.data.view(-1)[:7]

    for share in (partitioned, flat):
        model = adapted()
        for parameter in model.parameters():
            share(parameter)
        with pytest.raises(TypeError, match=r"layer '.*': expected whole weights to merge, found sharded ones"):
            merged_weights(model)
    weights = layout(merged_weights(adapted()))
    name = next(name for name in weights if "q_proj" in name)
    assert not weights[name].writable
    zeros = bits_of(torch.zeros(2))
    with pytest.raises(TypeError, match="cannot be written"):
        weights[name].write(0, zeros)
    with pytest.raises(TypeError, match="cannot be written"):
        weights[name].scatter(0, zeros, zeros)
