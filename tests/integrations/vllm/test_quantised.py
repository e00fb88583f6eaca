"""A real vLLM server in FP8 follows a view in place, with the outputs of a fresh one on that view's anchor."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import pytest
import torch

pytest.importorskip("vllm")

import pulse_rl as pulse
from pulse_rl.dtypes import torch_name
from pulse_rl.engines.client import EngineClient
from pulse_rl.errors import EngineError, UnmappedError
from pulse_rl.history.history import History
from pulse_rl.integrations.vllm.modules import derived_of
from pulse_rl.testing.models import tensor_of
from tests.integrations.vllm.world import Server, one_worker, step, tiny_model


def publish(publisher: pulse.Publisher, model: Any, tokenizer: Any, place: Path) -> Path:
    """Publish a version with an anchor. Returns the directory of the view's files, as an engine loads them."""
    tokenizer.save_pretrained(place / "tokenizer")
    assets = {path.name: path.read_bytes() for path in (place / "tokenizer").iterdir()}
    publisher.publish(model, anchor=True, assets=assets)
    anchor = History(place / "store", view="fp8").newest().anchor
    return (place / "store" / anchor[0].name).parent


@pytest.mark.parametrize("block", ["channel", (1, 32)], ids=["rows", "mxfp8"])
def test_fp8_is_followed_in_place(block: Any, tmp_path: Path) -> None:
    """With a scale for each row, and MXFP8, which vLLM multiplies on a CPU by its own emulation."""
    model, tokenizer = tiny_model()
    store = tmp_path / "store"
    publisher = pulse.Publisher(store, views={"fp8": pulse.Fp8(block=block, rule="vllm")})
    followed = Server(publish(publisher, model, tokenizer, tmp_path), tmp_path / "log")
    fresh = None
    try:
        client = EngineClient(followed.wait().url)
        first = followed.outputs()
        with pytest.raises(EngineError, match=r"as of another model|cannot be followed"):
            client.follow(store, wait=True)  # the BF16 weights
        client.follow(store, view="fp8", wait=True)
        for seed in range(3):
            step(model, seed)
            files = publish(publisher, model, tokenizer, tmp_path)
            client.stage()
            assert client.apply().version == seed + 1
        found = followed.outputs()
        assert client.verify() == History(store, view="fp8").newest().digest
        fresh = Server(files, tmp_path / "fresh.log").wait()
        assert found == fresh.outputs()
        assert found != first
    finally:
        for server in filter(None, (followed, fresh)):
            server.kill()


def test_rows_in_int8_are_loaded_and_not_followed(tmp_path: Path) -> None:
    """On a CPU, vLLM repacks them when it loads them: it is refused before anything is written."""
    model, tokenizer = tiny_model()
    view = pulse.Int8()
    publisher = pulse.Publisher(tmp_path / "store", views={"fp8": view})
    server = Server(publish(publisher, model, tokenizer, tmp_path), tmp_path / "log")
    try:
        client = EngineClient(server.wait().url)
        first = server.outputs()
        with pytest.raises(EngineError, match="cannot be followed"):
            client.follow(tmp_path / "store", view="fp8", wait=True)
        assert server.outputs() == first
    finally:
        server.kill()


@pytest.mark.parametrize("format", ["mxfp4", "nvfp4"])
def test_transformers_runs_an_anchor_in_fp4(format: Literal["mxfp4", "nvfp4"], tmp_path: Path) -> None:
    """With compressed-tensors, which gives back the weights that a worker of the kind builtin samples with."""
    from transformers import AutoModelForCausalLM

    from pulse_rl.flow import quantised
    from pulse_rl.weights.views.formats import ViewFormat

    (model, tokenizer), form = tiny_model(), pulse.Fp4(format=format)
    publisher = pulse.Publisher(tmp_path / "store", views={"fp8": form})
    loaded = AutoModelForCausalLM.from_pretrained(publish(publisher, model, tokenizer, tmp_path), dtype="bfloat16")
    subscriber = pulse.Subscriber(tmp_path / "store", view="fp8")
    subscriber.sync(tensors := subscriber.allocate())
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    quantised.write(tensors, ViewFormat(form), model)
    ids = torch.arange(24)[None]
    torch.testing.assert_close(loaded(ids).logits, model(ids).logits, rtol=0.05, atol=0.02)  # one decompresses first
    found = loaded.state_dict()
    changed = [name for name, tensor in model.state_dict().items() if not torch.equal(tensor, before[name])]
    assert len(changed) == 7 * model.config.num_hidden_layers
    assert all(torch.equal(found[name], model.state_dict()[name]) for name in changed)


@pytest.mark.parametrize("format", ["mxfp4", "nvfp4"])
@pytest.mark.filterwarnings("ignore")  # vLLM's own
def test_a_fused_layer_loads_fp4_and_is_not_followed(
    format: Literal["mxfp4", "nvfp4"], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU vLLM 0.32 has no kernels for it, so none is chosen here.

    Its loader puts the tensors of a view where they belong, with one global scale for all three matrices. The layer is
    refused before anything is written.
    """
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.linear import QKVParallelLinear
    from vllm.model_executor.layers.quantization.compressed_tensors import compressed_tensors, schemes

    modules = {"mxfp4": schemes.compressed_tensors_w4a4_mxfp4, "nvfp4": schemes.compressed_tensors_w4a4_nvfp4}
    monkeypatch.setattr(modules[format], f"init_{format}_linear_kernel", lambda **given: None)
    if format == "nvfp4":
        monkeypatch.setattr(modules[format], "expose_input_quant_key", lambda layer, kernel: None)
    at, rows = "model.layers.0.self_attn", {"q": 64, "k": 32, "v": 32}
    live = {f"{at}.{which}_proj.weight": (torch.randn(n, 64) * n).bfloat16() for which, n in rows.items()}
    view = pulse.Quantised(pulse.Fp4(format=format), live).look()
    config = compressed_tensors.CompressedTensorsConfig.from_config(view.config())
    config.packed_modules_mapping = {"qkv_proj": [f"{which}_proj" for which in rows]}
    with one_worker(tmp_path / "rendezvous"), set_current_vllm_config(VllmConfig()):
        layer = QKVParallelLinear(64, 32, 2, 1, bias=False, quant_config=config, prefix=f"{at}.qkv_proj")
        held = dict(layer.named_parameters())
        given: dict[str, list[torch.Tensor]] = {name: [] for name in held}
        for name, parameter in held.items():
            for which in rows:
                bits = view[f"{at}.{which}_proj.{name}"]
                given[name].append(tensor_of(torch_name(bits.dtype), bits.read(0, bits.size).reshape(bits.shape)))
                parameter.weight_loader(parameter, given[name][-1], which)
        assert all(
            torch.equal(held[name].data.view(torch.uint8), torch.cat(given[name]).view(torch.uint8)) for name in held
        )
        assert sorted(given) == sorted({name.rpartition(".")[2] for name in view})
        if format == "nvfp4":
            assert len(held["weight_global_scale"].unique()) == 1
        with pytest.raises(UnmappedError, match="what this quantisation does to the weights is not known"):
            derived_of(torch.nn.ModuleDict({"qkv_proj": layer}), torch.bfloat16)
