"""Adapters of what runs in an engine: the plug-in's `EngineReceiver`, and SGLang's loader behind its client.

The engine is the small one of `engines`: fused and turned parameters, loaded from files by its own loader.
"""

from __future__ import annotations

import base64
import pickle
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import torch
from safetensors.torch import save_file

from pulse_rl.engines.ranks import RankState
from pulse_rl.engines.receiver import EngineReceiver
from pulse_rl.engines.states import Follow
from pulse_rl.engines.views import LiveViews
from pulse_rl.errors import EngineError
from pulse_rl.integrations.sglang import SGLangEngine, loader
from pulse_rl.testing import Held, Source
from pulse_rl.weights.layout import TensorSpec
from tests.testing.engines import Engine

_LOOK_S = 0.0005


def save(weights: Mapping[str, torch.Tensor], directory: Path) -> Path:
    """A checkpoint of weights: the files that an engine is started with. Of tied tensors it has the first."""
    distinct: dict[object, tuple[str, torch.Tensor]] = {}
    for name, tensor in weights.items():
        distinct.setdefault(id(tensor), (name, tensor))
    save_file({name: tensor.contiguous() for name, tensor in distinct.values()}, directory / "model.safetensors")
    return directory


class Version:
    """A version that an engine has staged."""

    def __init__(self, engine: Any, version: int) -> None:
        self._engine, self.version, self._wanted = engine, version, True

    def apply(self) -> float:
        if not self._wanted:
            raise RuntimeError(f"version {self.version} is not wanted any more")
        seconds: float = self._engine.apply(self.version)
        return seconds

    def discard(self) -> None:
        """As a client that ends: the engine keeps what it has staged until the next stage."""
        self._wanted = False


class _Following:
    """An engine that follows."""

    def __init__(self, engine: Engine, files: Any) -> None:
        self.engine, self._files = engine, files

    def sync(self, version: int | None = None) -> int:
        staged = self.stage(version)
        staged.apply()
        return staged.version

    def stage(self, version: int | None = None) -> Version:
        raise NotImplementedError

    def reported(self) -> int | None:
        raise NotImplementedError

    def held(self) -> Sequence[Held]:
        return [Held(self.reported(), self.engine.places)]

    def disturb(self) -> None:
        with torch.no_grad():
            next(parameter for parameter in self.engine.parameters() if parameter.numel()).zero_()

    def close(self) -> None:
        self._files.cleanup()


class _Plugin(_Following):
    """The plug-in's receiver, driven as a worker of an engine drives it."""

    def __init__(self, engine: Engine, files: Any, receiver: EngineReceiver, history: Follow) -> None:
        super().__init__(engine, files)
        self._receiver = receiver
        self._check(receiver.follow(history))

    def _check(self, state: RankState) -> RankState:
        if state.failure is not None:
            raise RuntimeError(f"{state.failure.during}: {state.failure.kind}: {state.failure.message}")
        return state

    def _settled(self) -> RankState:
        while (state := self._receiver.state()).working:
            time.sleep(_LOOK_S)
        return self._check(state)

    def stage(self, version: int | None = None) -> Version:
        self._receiver.stage(version)
        prepared = self._settled().prepared
        assert prepared is not None
        return Version(self, prepared.version)

    def apply(self, version: int) -> float:
        applied = self._receiver.apply(version)
        self._check(applied.state)
        return applied.seconds

    def verify(self) -> None:
        self._receiver.verify()
        self._settled()

    def reported(self) -> int | None:
        return self._receiver.state().version

    def close(self) -> None:
        self._receiver.close()
        super().close()


class Plugins:
    """`EngineReceiver`, as in each worker of vLLM and each rank of SGLang."""

    name = "plug-in of an engine"
    reads: Literal["store"] = "store"
    remote = False

    def make(self, weights: Mapping[str, torch.Tensor], source: Source) -> _Plugin:
        files = tempfile.TemporaryDirectory(prefix="pulse-rl-engine-")
        engine = Engine(weights)

        def find(tensors: dict[str, TensorSpec], tied: dict[str, str]) -> LiveViews:
            return LiveViews.of(engine, engine.load_weights, tensors, tied=tied)

        receiver = EngineReceiver(
            find, checkpoint=save(weights, Path(files.name)), compiles=False, opens=lambda wanted: source.store
        )
        return _Plugin(engine, files, receiver, Follow(store=source.url, patience=0))


class Slot:
    """An SGLang that is nothing but its slot for a loader, with its client. One for all engines, which come in turn."""

    model: torch.nn.Module

    def __init__(self) -> None:
        self.client = SGLangEngine("http://127.0.0.1:9", reply_host="127.0.0.1")
        transport: Any = self.client._transport
        transport._service._engine._ask = self._ask
        self._weight_version = "default"
        self.running = True
        self.routes: list[str] = []
        self.flush_fails = False

    def _ask(self, during: str, route: str, body: dict[str, Any] | None) -> dict[str, Any]:
        self.routes.append(route)
        if route == "pause_generation":
            self.running = False
        elif route == "continue_generation":
            self.running = True
        elif route == "update_weight_version":
            assert body is not None
            self._weight_version = body["new_version"]
        elif route == "update_weights_from_tensor":
            assert body is not None
            assert not self.running
            (order,) = body["serialized_named_tensors"]
            loader.load(self.model, pickle.loads(base64.b64decode(order)))
            if self.flush_fails and body["flush_cache"]:
                raise EngineError("the caches cannot be flushed", during=during, status=400)
        elif route == "server_info":
            return {"tp_size": 1}
        elif route == "model_info":
            return {"model_path": "small", "weight_version": self._weight_version}
        return {}


class Context:
    """What the loader asks SGLang for: one rank, and the files that the model was loaded from."""

    files = ""

    def get_parallel(self) -> Any:
        return SimpleNamespace(tp_rank=0, tp_size=1, pp_size=1)

    def get_model(self) -> Any:
        return SimpleNamespace(model_path=self.files)


CONTEXT = Context()


class _SGLang(_Following):
    """SGLang's loader, driven by its client."""

    def __init__(self, engine: Engine, files: Any, slot: Slot, url: str) -> None:
        super().__init__(engine, files)
        self._client, self._url = slot.client, url
        slot.model = engine
        self._client.state()

    def stage(self, version: int | None = None) -> Version:
        self._client.follow(self._url, patience=0)
        prepared = self._client.stage(version).prepared
        assert prepared is not None
        return Version(self, prepared.version)

    def apply(self, version: int) -> float:
        return self._client.apply(version).pause_s

    def reported(self) -> int | None:
        return self._client.state().version

    def close(self) -> None:
        loader._receivers.pop(id(self.engine)).close()
        super().close()


class SGLangs:
    """The loader for SGLang's slot, and the client that drives it."""

    name = "loader of SGLang"
    reads: Literal["url"] = "url"
    remote = False

    def __init__(self) -> None:
        self._slot: Slot | None = None

    def make(self, weights: Mapping[str, torch.Tensor], source: Source) -> _SGLang:
        files = tempfile.TemporaryDirectory(prefix="pulse-rl-engine-")
        CONTEXT.files = str(save(weights, Path(files.name)))
        self._slot = self._slot or Slot()
        return _SGLang(Engine(weights), files, self._slot, source.url)
