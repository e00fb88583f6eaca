"""A Llama as small as one can be."""

from typing import Any


def tiny(**changed: int) -> Any:
    """Of two layers with a tied head, but for what is changed; its weights by torch's seed."""
    import transformers

    sizes = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "tie_word_embeddings": True}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**(sizes | heads | changed)))
