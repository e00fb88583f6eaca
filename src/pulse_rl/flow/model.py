"""The model of a run: FP32 masters that start at BF16 values, and the tokenizer.

`model_name` lists the names. smollm2's file is dequantised by Transformers; tiny, for tests, has a tokenizer of
characters. A rollout worker builds the same model from `assets` (the configuration and the tokenizer's files) and takes
its weights from the store.
"""

import string
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError

from pulse_rl.errors import one_line, require
from pulse_rl.flow.model_name import check, smollm2_file, source_of
from pulse_rl.flow.products import widen

GGUF_BLOCK = 32  # weights that share a scale, both in Q4_1 and in Q8_0
Q4_LEVELS = 15  # steps between a Q4_1 block's least and greatest value
CHARACTERS = ("<pad>", "<eos>", *(c for c in string.printable if c not in "\r\x0b\x0c"))  # of tiny's tokenizer
Q8_LEVELS = 127  # steps from 0 to a Q8_0 block's greatest magnitude


class Loaded(NamedTuple):
    """A model and its tokenizer, as Transformers loads them."""

    model: Any  # PreTrainedModel
    tokenizer: Any  # PreTrainedTokenizerBase, padding on the left


def load(name: str, *, seed: int, dither: int | None = None) -> Loaded:
    """Load a model by name.

    seed: for the random weights of "tiny". dither: a seed; spread the weights of a quantised file uniformly within
    their quantisation step, because a trained model's weights do not lie on 16 levels per block.
    Raises ValueError as `model_name.check` does, OSError if Transformers cannot load the model.
    """
    check(name, dither=dither)
    transformers = require("transformers", "run")
    transformers.utils.logging.disable_progress_bar()
    if name == "tiny":
        loaded = _tiny(seed)
    elif name == "smollm2" and (gguf := smollm2_file()):
        loaded = _from_gguf(gguf, dither)
    else:
        source = source_of(name)
        try:
            loaded = Loaded(
                transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32),
                transformers.AutoTokenizer.from_pretrained(source),
            )
        except (OSError, ValueError, SafetensorError) as error:
            raise OSError(f"model: Transformers cannot load {source}: {one_line(error, 300)}") from error
    with torch.no_grad():
        for parameter in loaded.model.parameters():
            parameter.copy_(parameter.bfloat16().float())
    widen(loaded.model)
    loaded.tokenizer.padding_side = "left"
    if loaded.tokenizer.pad_token_id is None:
        loaded.tokenizer.pad_token = loaded.tokenizer.eos_token
    return loaded


def shapes(name: str, config: Any) -> dict[str, tuple[int, ...]]:
    """The shapes of a model's tensors, by name. None of its weights is read.

    config: as `model_name.require_config` returns it.
    """
    transformers = require("transformers", "run")
    if name == "tiny":
        config = _tiny_config()
    elif config is None and (gguf := smollm2_file()) is not None:
        config = transformers.AutoConfig.from_pretrained(gguf.parent, gguf_file=gguf.name)
    with torch.device("meta"):
        found = transformers.AutoModelForCausalLM.from_config(config)
    return {key: tuple(tensor.shape) for key, tensor in found.state_dict().items()}


def _from_gguf(path: Path, dither: int | None) -> Loaded:
    require("gguf", "run")
    transformers = require("transformers", "run")
    source = {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
    quantised = transformers.AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(**source)
    # A plain Llama with the same weights: without the quantiser's settings it can be saved and loaded.
    settings = quantised.config.to_dict()
    settings.pop("quantization_config", None)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**settings))
    model.load_state_dict(quantised.state_dict())
    if dither is not None:
        generator = torch.Generator().manual_seed(dither)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.ndim == 2:
                    parameter += _spread(parameter, "embed_tokens" in name, generator)
    return Loaded(model, tokenizer)


def _spread(weight: torch.Tensor, eight_bit: bool, generator: torch.Generator) -> torch.Tensor:
    """Noise within half a quantisation step of each weight; the values of its block of 32 give the step.

    weight: (rows, columns). Q4_1 divides a block from its least to its greatest value into 15 steps. Q8_0, which the
    file uses for the embedding, divides from 0 to the greatest magnitude into 127.
    """
    blocks = weight.view(-1, GGUF_BLOCK)
    if eight_bit:
        step = blocks.abs().amax(1, keepdim=True) / Q8_LEVELS
    else:
        step = (blocks.amax(1, keepdim=True) - blocks.amin(1, keepdim=True)) / Q4_LEVELS
    noise = torch.rand(blocks.shape, generator=generator) - 0.5
    return (noise * step).view(weight.shape)


def _tiny(seed: int) -> Loaded:
    transformers = require("transformers", "run")
    tokenizers = require("tokenizers", "run")
    core = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({c: i for i, c in enumerate(CHARACTERS)}, unk_token="<pad>")
    )
    core.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex(r"[\s\S]"), "isolated")
    core.decoder = tokenizers.decoders.Fuse()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", eos_token="<eos>")
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = transformers.LlamaForCausalLM(_tiny_config())
    return Loaded(model, tokenizer)


def _tiny_config() -> Any:
    return require("transformers", "run").LlamaConfig(
        vocab_size=len(CHARACTERS),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=True,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )


def assets(loaded: Loaded) -> dict[str, bytes]:
    """The small files from which `build` makes the same model: config.json (as BF16) and the tokenizer's."""
    with tempfile.TemporaryDirectory() as scratch:
        config = loaded.model.config.__class__(**{**loaded.model.config.to_dict(), "dtype": "bfloat16"})
        config.architectures = [type(loaded.model).__name__]
        config.save_pretrained(scratch)
        loaded.tokenizer.save_pretrained(scratch)
        return {path.name: path.read_bytes() for path in sorted(Path(scratch).iterdir()) if path.is_file()}


def import_early() -> None:
    """Import what `build` needs. It takes seconds, which a process may spend while it waits for a first version."""
    require("transformers.modeling_utils", "run")


def build(files: dict[str, bytes]) -> Loaded:
    """A BF16 model with random weights and its tokenizer, from `assets`; a subscriber then loads the weights."""
    transformers = require("transformers", "run")
    with tempfile.TemporaryDirectory() as scratch:
        for name, data in files.items():
            (Path(scratch) / Path(name).name).write_bytes(data)
        config = transformers.AutoConfig.from_pretrained(scratch)
        tokenizer = transformers.AutoTokenizer.from_pretrained(scratch, padding_side="left")
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    widen(model)
    return Loaded(model.eval(), tokenizer)
