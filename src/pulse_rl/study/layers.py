"""The kind of layer and the depth of a tensor, from its name, as Transformers and its relatives name tensors."""

import re

# The first match counts: an expert's projections would match "mlp", a norm inside attention "attention".
_KINDS = (
    ("norm", r"norm|(^|\.)ln_\w+(\.|$)"),
    ("other", r"(^|\.)(gate|router|shared_expert_gate)(\.|$)"),  # routing of tokens to experts
    ("expert", r"experts?(\.|_|$)"),
    ("attention", r"attn|attention|query_key_value|[qkvo]_proj|qkv"),
    ("mlp", r"mlp|feed_forward|ffn|gate_proj|up_proj|down_proj|(^|\.)(fc|c_fc)\d?(\.|$)"),
    ("head", r"lm_head|embed_out|score|(^|\.)(\w+_head|head|output|output_layer)(\.|$)"),  # v_head is a critic's
    ("embedding", r"embed|wte|wpe"),
)
_DEPTH = r"(?:^|\.)(?:layers?|h|blocks?)\.(\d+)(?:\.|$)"


def kind(name: str) -> str:
    """The kind of layer that a tensor belongs to: norm, expert, attention, mlp, embedding, head or other."""
    name = name.lower()
    return next((kind for kind, pattern in _KINDS if re.search(pattern, name)), "other")


def depth(name: str) -> int | None:
    """The number of the layer that a tensor belongs to, from 0; None outside of layers."""
    found = re.search(_DEPTH, name)
    return int(found[1]) if found else None
