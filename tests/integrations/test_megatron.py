"""Maps learned from converters: layouts as Megatron has them, on one rank and cut among several, bit for bit."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pytest
import torch

from pulse_rl.integrations import megatron
from pulse_rl.integrations.megatron import Learned, learn
from tests.loco.ranks import RANKS, Ranks, good
from tests.weights.held import assemble, flip, held_by_rank

HIDDEN, GROUPS, QUERIES, HEAD, FFN, VOCABULARY, PADDED, EXPERTS = 12, 4, 3, 2, 10, 33, 40, 4

Tensors = dict[str, torch.Tensor]


def to_hugging_face(tensors: Mapping[str, torch.Tensor]) -> Tensors:
    """From whole tensors in Megatron's layout: fused attention by groups, gate and up, experts, a padded vocabulary."""
    qkv = tensors["qkv.weight"].view(GROUPS, QUERIES + 2, HEAD, HIDDEN)
    query, key, value = torch.split(qkv, [QUERIES, 1, 1], dim=1)
    bias = tensors["qkv.bias"].view(GROUPS, QUERIES + 2, HEAD)
    gate, up = tensors["fc1.weight"].chunk(2)
    experts = tensors["experts.weight1"].view(EXPERTS, HIDDEN, 2 * FFN).transpose(1, 2)
    down = tensors["experts.weight2"].view(EXPERTS, FFN, HIDDEN).transpose(1, 2)
    return {
        "embed": tensors["word_embeddings"][:VOCABULARY],
        "lm_head": tensors["word_embeddings"][:VOCABULARY],
        "q": query.reshape(-1, HIDDEN),
        "k": key.reshape(-1, HIDDEN),
        "v": value.reshape(-1, HIDDEN),
        "q_bias": bias[:, :QUERIES].reshape(-1),
        "k_bias": bias[:, QUERIES].reshape(-1),
        "v_bias": bias[:, QUERIES + 1].reshape(-1),
        "gate": gate,
        "up": up,
        "down": tensors["fc2.weight"],
        "norm": tensors["norm"],
        "experts.gate_up": experts.contiguous(),
        **{f"experts.{i}.down": down[i] for i in range(EXPERTS)},
        "scale": tensors["scale"],
    }


def whole(dtype: torch.dtype, seed: int = 0) -> Tensors:
    random = torch.Generator().manual_seed(seed)
    shapes = {
        "word_embeddings": (PADDED, HIDDEN),
        "qkv.weight": (GROUPS * (QUERIES + 2) * HEAD, HIDDEN),
        "qkv.bias": (GROUPS * (QUERIES + 2) * HEAD,),
        "fc1.weight": (2 * FFN, HIDDEN),
        "fc2.weight": (HIDDEN, FFN),
        "norm": (HIDDEN,),
        "experts.weight1": (EXPERTS * HIDDEN, 2 * FFN),
        "experts.weight2": (EXPERTS * FFN, HIDDEN),
        "scale": (),
        "rotary.inv_freq": (5,),
    }
    return {name: torch.randn(shape, generator=random).to(dtype) for name, shape in shapes.items()}


CUT = {  # tensor-parallel dimensions; fc1 is cut in its halves
    "word_embeddings": 0,
    "qkv.weight": 0,
    "qkv.bias": 0,
    "fc2.weight": 1,
}
REPLICATED = ("norm", "scale", "rotary.inv_freq", "experts.weight1", "experts.weight2")


def cut(tensors: Tensors, rank: int, size: int) -> Tensors:
    """What one tensor-parallel rank has of whole tensors."""
    found = {name: tensors[name].clone() for name in REPLICATED}
    for name, dim in CUT.items():
        found[name] = tensors[name].chunk(size, dim)[rank].clone()
    halves = [half.chunk(size)[rank] for half in tensors["fc1.weight"].chunk(2)]
    found["fc1.weight"] = torch.cat(halves)
    return found


def merge(ranks: Sequence[Mapping[str, torch.Tensor]]) -> Tensors:
    """What a framework does before it converts: whole tensors from those of all ranks."""
    found = {name: ranks[0][name] for name in REPLICATED}
    for name, dim in CUT.items():
        found[name] = torch.cat([rank[name] for rank in ranks], dim)
    halves = [rank["fc1.weight"].chunk(2) for rank in ranks]
    found["fc1.weight"] = torch.cat([half for i in (0, 1) for half in [pair[i] for pair in halves]])
    return found


def to_hugging_face_in_floats(tensors: Mapping[str, torch.Tensor]) -> Tensors:
    """Refuses whole numbers, as one that multiplies by matrices of zeros and ones, or normalizes."""
    assert all(tensor.is_floating_point() for tensor in tensors.values())
    return {name: tensor.double().to(tensor.dtype) for name, tensor in to_hugging_face(tensors).items()}


@pytest.mark.parametrize("convert", [to_hugging_face, to_hugging_face_in_floats])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_one_rank(dtype: torch.dtype, convert: Callable[[Any], Any]) -> None:
    layout = learn(convert, whole(dtype))
    tensors = whole(dtype, seed=7)  # other weights than it saw
    held, tied = held_by_rank(layout.shards(tensors), full=to_hugging_face(tensors))
    assert held.keys() == to_hugging_face(tensors).keys() - {"lm_head"}
    for name in held:
        assert (assemble([held], name) == held[name].full).all(), name
    assert tied == {"lm_head": "embed"}
    assert layout.unused == ("rotary.inv_freq",)
    counts = {name: len(views) for name, views in layout.views.items()}
    assert counts["q"] == counts["k"] == counts["v"] == counts["k_bias"] == GROUPS
    assert counts["gate"] == counts["down"] == counts["embed"] == counts["experts.0.down"] == counts["scale"] == 1


def test_writes_arrive_in_the_tensors() -> None:
    tensors = whole(torch.bfloat16)
    before = {name: tensor.view(torch.int16).clone() for name, tensor in tensors.items()}
    flip(learn(to_hugging_face, tensors).shards(tensors))
    for name, tensor in tensors.items():
        changed = (tensor.view(torch.int16) ^ before[name]) & 1
        published = changed[:VOCABULARY] if name == "word_embeddings" else changed
        assert published.all() == (name != "rotary.inv_freq"), name
        assert int(changed.sum()) == (0 if name == "rotary.inv_freq" else published.numel())


def learned(rank: int, size: int, mine: Tensors) -> Learned:
    metas = [
        {name: torch.empty_like(tensor, device="meta") for name, tensor in cut(whole(torch.bfloat16), r, size).items()}
        for r in range(size)
    ]
    return learn(lambda ranks: to_hugging_face(merge(ranks)), mine, ranks=metas, rank=rank, replicated=REPLICATED)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_tensor_parallel_ranks(size: int) -> None:
    tensors = whole(torch.bfloat16, seed=3)
    full = to_hugging_face(tensors)
    held = []
    for rank in range(size):
        mine = cut(tensors, rank, size)
        found, tied = held_by_rank(learned(rank, size, mine).shards(mine), full=full)
        held.append(found)
        assert tied == {"lm_head": "embed"}  # also of a rank whose vocabulary is padding alone
    for name in held[0]:
        assert (assemble(held, name) == held[0][name].full).all(), name
    shares = [sum(bits.size for _, bits in rank["q"].pieces) for rank in held]
    assert shares == [held[0]["q"].full.size // size] * size
    assert all(len(rank["norm"].pieces) == 1 for rank in held)  # a replica on each


def test_a_rank_that_holds_nothing_of_a_tensor() -> None:
    """As with pipeline or expert parallelism: each rank has other names."""
    ranks = [{"first": torch.rand(2, 3).bfloat16()}, {"second": torch.rand(4).bfloat16()}]
    metas = [{name: tensor.to("meta") for name, tensor in rank.items()} for rank in ranks]

    def convert(all_ranks: Any) -> Any:
        return {"a": all_ranks[0]["first"].t(), "b": all_ranks[1]["second"], "c": all_ranks[1]["second"]}

    full = convert(ranks)
    results = [held_by_rank(learn(convert, ranks[i], ranks=metas, rank=i).shards(ranks[i]), full=full) for i in (0, 1)]
    held = [result[0] for result in results]
    assert (held[0]["b"].pieces, held[1]["a"].pieces) == ([], [])
    for name in ("a", "b"):
        assert (assemble(held, name) == held[0][name].full).all()
    assert results[0][1] == results[1][1] == {"c": "b"}


REFUSED: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], str]] = {
    "plus one": (lambda t: t + 1, "computed"),
    "zero-centred": (lambda t: t - 1, "computed|of none"),
    "scaled": (lambda t: t * 2, "computed"),
    "a sum": (lambda t: t + t.flip(0), "computed"),
    "sorted": (lambda t: t.flatten().sort().values, "computed"),
    "rounded": (lambda t: t.to(torch.float8_e4m3fn).to(t.dtype), "computed"),
    "padded": (lambda t: torch.nn.functional.pad(t, (0, 1)), "found 6 of none"),
    "constant": (lambda t: torch.full_like(t, 3), "computed"),
    "another dtype": (lambda t: t.to(torch.bfloat16) if t.dtype == torch.float32 else t, "publish with cast="),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_is_no_rearrangement(kind: str) -> None:
    change, message = REFUSED[kind]
    with pytest.raises(ValueError, match=rf"tensor 'b': .*({message})"):
        learn(lambda t: {"a": t["w"], "b": change(t["w"])}, {"w": torch.zeros(6, 5)})


def test_shuffles_are_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    order = torch.randperm(70_000, generator=torch.Generator().manual_seed(0))
    with pytest.raises(ValueError, match=r"tensor 'b': .*at most 65536 boxes, found (69|70)\d\d\d"):
        learn(lambda t: {"b": t["w"][order]}, {"w": torch.zeros(70_000)})
    few = learn(lambda t: {"b": t["w"][order[order < 500]], "c": t["w"].flip(0)[:9]}, {"w": torch.zeros(70_000)})
    tensors = {"w": torch.rand(70_000)}
    full = {"b": tensors["w"][order[order < 500]], "c": tensors["w"].flip(0)[:9]}
    held, _ = held_by_rank(few.shards(tensors), full=full)
    for name in ("b", "c"):
        assert (assemble([held], name) == held[name].full).all()
    monkeypatch.setattr(megatron, "MAX_BOXES", GROUPS - 1)
    with pytest.raises(ValueError, match="tensor 'q'"):
        learn(to_hugging_face, whole(torch.float32))


def test_tensors_other_than_those_learned() -> None:
    tensors = whole(torch.float32)
    layout = learn(to_hugging_face, tensors)
    for change, message in (
        ({"norm": torch.zeros(5)}, "found shape"),
        ({"fc2.weight": torch.zeros(FFN, HIDDEN).t()}, "expected a contiguous one"),
    ):
        with pytest.raises(ValueError, match=message):
            layout.shards(tensors | change)
    del tensors["norm"]
    with pytest.raises(ValueError, match="tensor 'norm': .* found none"):
        layout.shards(tensors)
    with pytest.raises(TypeError, match="found 'a' → list"):
        learn(lambda t: {"a": [1]}, whole(torch.float32))
    with pytest.raises(ValueError, match=r"ranks\[0\]"):
        learn(to_hugging_face, whole(torch.float32), ranks=[{}])
    with pytest.raises(KeyError, match="lost"):  # the converter's own error
        learn(lambda t: t["lost"], whole(torch.float32))


# megatron-core itself


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    pytest.importorskip("megatron.core")
    with Ranks() as run:
        yield run


def moved(name: str, parts: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """One parameter of megatron-core's GPT, from its tensor-parallel parts, under Hugging Face's names."""
    layer = name.split(".")[2] if "layers" in name else ""
    at = f"model.layers.{layer}."
    if name == "embedding.word_embeddings.weight":
        return {"model.embed_tokens.weight": torch.cat(parts)[:VOCABULARY]}
    if name == "output_layer.weight":
        return {"lm_head.weight": torch.cat(parts)[:VOCABULARY]}
    if "linear_qkv" in name:
        groups = torch.cat(parts).view(4, 3, 4, *parts[0].shape[1:])  # of one query, a key and a value each
        kind = name.split(".")[-1]
        return {f"{at}self_attn.{p}_proj.{kind}": groups[:, i].flatten(0, 1) for i, p in enumerate("qkv")}
    if "linear_proj" in name:
        return {at + "self_attn.o_proj.weight": torch.cat(parts, 1)}
    if "linear_fc1" in name:
        gates, ups = zip(*(part.chunk(2) for part in parts), strict=True)
        return {at + "mlp.gate_proj.weight": torch.cat(gates), at + "mlp.up_proj.weight": torch.cat(ups)}
    if "linear_fc2" in name:
        return {at + "mlp.down_proj.weight": torch.cat(parts, 1)}
    return {name: parts[0]}  # norms and routers


def convert_dense(ranks: Any) -> Tensors:
    found: Tensors = {}
    for name in ranks[0]:
        found |= moved(name, [rank[name] for rank in ranks])
    return found


def convert_experts(ranks: Any) -> Tensors:
    """Of expert-parallel ranks, each with two experts, which are numbered anew on each."""
    found: Tensors = {}
    for block, rank in enumerate(ranks):
        for name, tensor in rank.items():
            local = int(name.split("local_experts.")[1].split(".")[0])
            for to, part in moved(name, [tensor]).items():
                found[to.replace(".mlp.", f".mlp.experts.{2 * block + local}.")] = part
    return found


def gpt(experts: bool) -> Any:
    from megatron.core import parallel_state  # type: ignore[import-not-found, unused-ignore]
    from megatron.core.models.gpt.gpt_layer_specs import (  # type: ignore[import-not-found, unused-ignore]
        get_gpt_layer_local_spec,
    )
    from megatron.core.models.gpt.gpt_model import GPTModel  # type: ignore[import-not-found, unused-ignore]
    from megatron.core.transformer.transformer_config import (  # type: ignore[import-not-found, unused-ignore]
        TransformerConfig,
    )

    parallel_state.destroy_model_parallel()
    parallel: dict[str, Any] = {"tensor_model_parallel_size": 1, "expert_model_parallel_size": 4}
    if not experts:
        parallel = {"tensor_model_parallel_size": 2}
    parallel_state.initialize_model_parallel(**parallel)
    config = TransformerConfig(
        num_layers=2,
        hidden_size=24,
        kv_channels=4,
        num_attention_heads=4,
        num_query_groups=4,
        ffn_hidden_size=20,
        activation_func=torch.nn.functional.silu,
        gated_linear_unit=True,
        add_bias_linear=False,
        add_qkv_bias=True,
        normalization="RMSNorm",
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
        params_dtype=torch.bfloat16,
        bf16=True,
        num_moe_experts=8 if experts else None,
        **parallel,
    )
    layer = get_gpt_layer_local_spec(normalization="RMSNorm", num_experts=8 if experts else None)
    model = GPTModel(config, layer, 40, 8, position_embedding_type="rope", share_embeddings_and_output_weights=False)
    torch.manual_seed(parallel_state.get_tensor_model_parallel_rank())
    expert_rank = parallel_state.get_expert_model_parallel_rank()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".local_experts." in name:
                torch.manual_seed(10 * expert_rank)
            elif not getattr(parameter, "tensor_model_parallel", False):
                torch.manual_seed(99)
            parameter.normal_()
    return model


def gathered(tensors: Tensors, process_group: Any) -> list[Tensors]:
    import torch.distributed as dist

    found: list[Any] = [None] * dist.get_world_size(process_group)
    dist.all_gather_object(found, tensors, group=process_group)
    return found


def read_megatron(group: Any, rank: int, size: int, experts: bool, write: bool) -> Any:
    import torch.distributed as dist
    from megatron.core import parallel_state

    model = gpt(experts)
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
    dense = {name: tensor for name, tensor in parameters.items() if ".local_experts." not in name}
    theirs = {name: tensor for name, tensor in parameters.items() if ".local_experts." in name}
    parts = [(convert_dense, dense, parallel_state.get_tensor_model_parallel_group())]
    if experts:
        parts.append((convert_experts, theirs, group))
    shards: dict[str, Any] = {}
    full: Tensors = {}
    for convert, mine, process_group in parts:
        metas = gathered({name: torch.empty_like(t, device="meta") for name, t in mine.items()}, process_group)
        replicated = [name for name in mine if not getattr(model.get_parameter(name), "partition_dim", -1) >= 0]
        at = dist.get_rank(process_group)
        layout = learn(convert, mine, ranks=metas, rank=at, replicated=replicated if convert is convert_dense else ())
        assert layout.unused == ()
        shards |= layout.shards(mine)
        if write:
            flip(layout.shards(mine))
        full |= convert(gathered(mine, process_group))
    return held_by_rank(shards, full=full)[0], len(parameters)


@pytest.mark.parametrize("write", [False, True])
@pytest.mark.parametrize("experts", [False, True])
def test_megatron_core(ranks: Ranks, experts: bool, write: bool) -> None:
    held = [result[0] for result in good(ranks(read_megatron, RANKS, experts, write))]
    names = held[0].keys()
    assert {"model.embed_tokens.weight", "model.layers.1.self_attn.k_proj.bias"} < names
    mlp = "mlp.experts.7.up_proj" if experts else "mlp.up_proj"
    assert f"model.layers.1.{mlp}.weight" in names
    for name in names:
        assert (assemble(held, name) == held[0][name].full).all(), name
