"""An SGLang engine without its model's forward pass: SGLang's own weight updater behind its HTTP routes.

    python tests/integrations/sglang/world.py MODEL PORT RANK SIZE RENDEZVOUS

Rank 0 serves the routes that `SGLangEngine` uses and passes each request to all ranks, as SGLang's tokenizer manager
does. What is SGLang's own: the model, its loading from files, `SchedulerWeightUpdaterManager`, `WeightUpdater`, the
deserialiser of named tensors, the process groups. What is not: the loop of its scheduler, the caches, the HTTP server.
"""

import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist


class Engine:
    """One rank: SGLang's manager of weight updates over a model that SGLang has loaded."""

    def __init__(self, model_path: str, rank: int, size: int, rendezvous: str) -> None:
        from sglang.srt.configs.model_config import ModelConfig
        from sglang.srt.distributed import init_distributed_environment, initialize_model_parallel
        from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager
        from sglang.srt.managers.tp_worker import BaseTpWorker
        from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater
        from sglang.srt.runtime_context import SpawnRanks, publish
        from sglang.srt.runtime_context import get_model as settings
        from sglang.srt.server_args import ServerArgs

        arguments = ServerArgs(
            model_path=model_path,
            device="cpu",
            tp_size=size,
            skip_tokenizer_init=True,
            attention_backend="torch_native",
            custom_weight_loader=["pulse_rl.integrations.sglang.load"],
        )
        publish(arguments, role="test", ranks=SpawnRanks(world_rank=rank))
        init_distributed_environment(
            backend="gloo", world_size=size, rank=rank, local_rank=rank, distributed_init_method=rendezvous
        )
        initialize_model_parallel()
        self._config: Any = lambda path: ModelConfig.from_server_args(arguments, model_path=path)
        self.model = self._load(model_path)
        self.rank, self.size, self.paused, self.flushes = rank, size, False, 0
        self.weight_version = "default"
        updater = WeightUpdater(
            tp_rank=rank,
            device="cpu",
            gpu_id=0,
            model_config=self._config(model_path),
            custom_weight_loaders=settings().custom_weight_loader,
            get_model=lambda: self.model,
            update_model_fields=lambda *_, **__: None,
            recapture_cuda_graph=lambda: None,
            get_model_runner=lambda: None,
        )
        runner = SimpleNamespace(weight_updater=updater, model=self.model)
        worker = SimpleNamespace(
            model_runner=runner,
            weight_update_runners=lambda: [("target", runner)],
            deserialize_own_rank=lambda tensors: BaseTpWorker.deserialize_own_rank(None, tensors),
        )
        self.manager = SchedulerWeightUpdaterManager(
            tp_worker=worker,
            draft_worker=None,
            memory_saver_adapter=None,
            flush_cache=self._flush,
            is_fully_idle=lambda **_: True,
            scheduler=SimpleNamespace(record_weight_version_change=lambda new_version: None),
        )

    def _flush(self, **_: Any) -> bool:
        self.flushes += 1
        return True

    def _load(self, model_path: str) -> torch.nn.Module:
        """SGLang's model, as it loads it from files."""
        from sglang.srt.configs.device_config import DeviceConfig
        from sglang.srt.configs.load_config import LoadConfig
        from sglang.srt.model_loader import get_model

        found: torch.nn.Module = get_model(
            model_config=self._config(model_path),
            load_config=LoadConfig(load_format="safetensors"),
            device_config=DeviceConfig("cpu", 0),
        )
        return found

    def _differing(self, checkpoint: str) -> list[str]:
        """The parameters, of any rank, whose bits are not those of a model that is loaded from the files."""
        fresh = dict(self._load(checkpoint).named_parameters())
        own = [
            name
            for name, tensor in self.model.named_parameters()
            if not torch.equal(tensor.view(torch.uint8), fresh[name].view(torch.uint8))
        ]
        everywhere: list[Any] = [None] * self.size
        dist.all_gather_object(everywhere, own)
        return sorted({name for each in everywhere for name in each})

    def call(self, route: str, body: dict[str, Any]) -> dict[str, Any]:
        """Do what a route asks for, on this rank."""
        from sglang.srt.managers import io_struct as requests
        from sglang.srt.utils import common

        if route == "pause_generation":
            self.paused = True
        elif route == "continue_generation":
            self.paused = False
        elif route == "update_weight_version":
            self.weight_version = body["new_version"]
        elif route == "begin_weight_update":
            return _plain(self.manager.begin_weight_update(requests.BeginWeightUpdateReqInput(**body)))
        elif route == "end_weight_update":
            return _plain(self.manager.end_weight_update(requests.EndWeightUpdateReqInput()))
        elif route == "update_weights_from_tensor":
            tensors = common.normalize_serialized_named_tensor_payloads(body.pop("serialized_named_tensors"))
            request = requests.UpdateWeightsFromTensorReqInput(serialized_named_tensors=tensors, **body)
            return _plain(self.manager.update_weights_from_tensor(request))
        elif route == "compare":
            return {"success": True, "differ": self._differing(body["checkpoint"])}
        elif route == "facts":
            return {"paused": self.paused, "flushes": self.flushes, "weight_version": self.weight_version}
        return {"success": True}


def _plain(output: Any) -> dict[str, Any]:
    return {"success": output.success, "message": output.message}


def serve(engine: Engine, model_path: str, port: int) -> None:
    """Rank 0: answer requests, one at a time, each on all ranks."""
    turn = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            found: dict[str, Any] = {"tp_size": engine.size}
            if self.path == "/model_info":
                found = {"model_path": model_path, "weight_version": engine.weight_version}
            self._answer(200, found)

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])) or b"{}")
            with turn:
                request = [(self.path.strip("/"), body)]
                if engine.size > 1:
                    dist.broadcast_object_list(request, src=0)
                found = engine.call(request[0][0], dict(body))
            self._answer(200 if found.get("success", True) else 400, found)

        def _answer(self, status: int, found: dict[str, Any]) -> None:
            data = json.dumps(found).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    print("ready", flush=True)
    server.serve_forever()


def main() -> None:
    model_path, port, rank, size, rendezvous = sys.argv[1:]
    engine = Engine(model_path, int(rank), int(size), rendezvous)
    if rank == "0":
        serve(engine, model_path, int(port))
    while True:
        request: list[Any] = [None]
        dist.broadcast_object_list(request, src=0)
        route, body = request[0]
        engine.call(route, dict(body))


if __name__ == "__main__":
    main()
