"""An adapter of the plug-in for vLLM: a model of vLLM's layers, its weight transfer engine, the client in process.

Around them vLLM itself is missing: the worker is its method alone, and nothing is generated.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import ColumnParallelLinear, MergedColumnParallelLinear, RowParallelLinear
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.model_loader.weight_utils import default_weight_loader
from vllm.v1.worker.worker_base import WorkerBase

from pulse_rl.integrations.vllm import InProcess
from pulse_rl.integrations.vllm.local import METHOD
from pulse_rl.integrations.vllm.transfer import PulseWeightTransferEngine
from pulse_rl.testing import Held, Source, Unsupported
from tests.testing.clients import Version, save

HEAD, EMBEDDING = "lm_head.weight", "model.embed.weight"


class Model(torch.nn.Module):
    """A part of a transformer, of the published shapes: query and value are one parameter, vocabularies are padded."""

    def __init__(self, weights: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        self.places: dict[str, torch.Tensor] = {}  # published name → where the engine multiplies by it
        self._weights: dict[str, tuple[Any, tuple[int, ...]]] = {}  # the parameter, and what else its loader takes
        self._layers = torch.nn.ModuleList()
        for name, tensor in weights.items():
            if name not in self._weights:
                self._make(name, tensor, weights)

    def _make(self, name: str, tensor: torch.Tensor, weights: Mapping[str, torch.Tensor]) -> None:
        size, kind, prefix = tuple(tensor.shape), name.split(".")[-2], name.removesuffix(".weight")
        options: dict[str, Any] = {"params_dtype": tensor.dtype, "prefix": prefix}
        if kind == "norm":
            self._add(name, RMSNorm(*size, dtype=tensor.dtype), slice(None))
        elif name == HEAD and EMBEDDING in weights and weights[EMBEDDING] is tensor:
            self.places[name], self._weights[name] = self.places[EMBEDDING], self._weights[EMBEDDING]
        elif name == HEAD:
            self._add(name, ParallelLMHead(*size, **options), slice(size[0]))
        elif name == EMBEDDING:
            self._add(name, VocabParallelEmbedding(*size, **options), slice(size[0]))
        elif kind == "q":
            other = name.replace(".q.", ".v.")
            rows = len(weights[other])
            layer = MergedColumnParallelLinear(size[1], [size[0], rows], bias=False, **options)
            self._add(name, layer, slice(size[0]), 0)
            self._add(other, layer, slice(size[0], size[0] + rows), 1)
        else:
            make = RowParallelLinear if kind == "down" else ColumnParallelLinear
            self._add(name, make(size[1], size[0], bias=False, **options), slice(None))

    def _add(self, name: str, layer: Any, rows: slice, *part: int) -> None:
        self._layers.append(layer)
        self.places[name], self._weights[name] = layer.weight.data[rows], (layer.weight, part)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        loaded = set()
        for name, tensor in weights:
            parameter, part = self._weights[name]
            getattr(parameter, "weight_loader", default_weight_loader)(parameter, tensor, *part)
            loaded.add(name)
        return loaded


class _Engine:
    """What the client in process needs of a `vllm.LLM`."""

    def __init__(self, transfer: PulseWeightTransferEngine) -> None:
        self._worker, self._version = SimpleNamespace(weight_transfer_engine=transfer), "default"

    def collective_rpc(self, method: str, args: tuple[Any, ...]) -> list[Any]:
        assert method == METHOD
        return [getattr(WorkerBase, method)(self._worker, *args)]

    def update_weight_version(self, version: str) -> None:
        self._version = version

    def get_weight_version(self) -> str:
        return self._version

    def reset_prefix_cache(self) -> None:
        """Nothing is cached."""


class Following:
    """A worker that follows."""

    def __init__(self, model: Model, files: Any, url: str) -> None:
        self._model, self._files = model, files
        config: Any = SimpleNamespace(
            parallel_config=VllmConfig().parallel_config,
            model_config=SimpleNamespace(model=files.name, dtype=torch.bfloat16),
        )
        transfer_config: Any = SimpleNamespace(backend="pulse")
        self._transfer = PulseWeightTransferEngine(transfer_config, config, torch.device("cpu"), model)
        self._client = InProcess(_Engine(self._transfer))
        self._client.follow(url, patience=0)

    def sync(self, version: int | None = None) -> int:
        return self._client.update(version).version

    def stage(self, version: int | None = None) -> Version:
        prepared = self._client.stage(version).prepared
        assert prepared is not None
        return Version(self, prepared.version)

    def apply(self, version: int) -> float:
        return self._client.apply(version).pause_s

    def held(self) -> list[Held]:
        state = self._client.state()
        return [Held(state.version, self._model.places)]

    def disturb(self) -> None:
        with torch.no_grad():
            next(parameter for parameter in self._model.parameters() if parameter.numel()).zero_()

    def close(self) -> None:
        self._transfer.shutdown()
        self._files.cleanup()


class Workers:
    """The plug-in, on models of vLLM's layers."""

    name = "plug-in for vLLM"
    reads: Literal["url"] = "url"
    remote = False

    def make(self, weights: Mapping[str, torch.Tensor], source: Source) -> Following:
        if not all(name.startswith(("model.", "lm_head.")) for name in weights):
            raise Unsupported("vLLM has no layers of these dtypes and shapes")
        files = tempfile.TemporaryDirectory(prefix="pulse-rl-engine-")
        save(weights, Path(files.name))
        with set_current_vllm_config(VllmConfig()):
            model = Model(weights)
        model.load_weights(weights.items())
        for layer in model.modules():
            method = getattr(layer, "quant_method", None)
            if method is not None:
                method.process_weights_after_loading(layer)
        return Following(model, files, source.url)
