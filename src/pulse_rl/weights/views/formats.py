"""How checkpoints of a view look: which tensors have codes, how their scales are called and shaped, and the config.

What engines load is what the tools write that were there first: `weight_scale_inv` with DeepSeek's config for blocks,
`weight_scale` with that of compressed-tensors for rows, for MXFP8, for INT8 and, with `weight_packed`, for FP4.
"""

from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from math import prod
from typing import Any

from pulse_rl.kernels.cpu.quantising import BlockGrid
from pulse_rl.weights.boxes import Box, Shape, whole
from pulse_rl.weights.views.rules import BlockKind, RuleTable, rule_table
from pulse_rl.weights.views.view import Fp8, View

DTYPES = {"fp8": "F8_E4M3", "int8": "I8", "fp4": "U8"}
GROUPS: dict[BlockKind, int] = {"mx": 32, "nv": 16}  # columns of blocks of one row
# Matrices that engines fuse, by the last parts of their names: with NVFP4, those of one module share a global scale.
_FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("w1", "w3"), ("q_a_proj", "kv_a_proj_with_mqa"))


class ViewFormat:
    """The format of a view.

    key: its rule. table: the arithmetic of that; of one global scale, where matrices have some. codes: their dtype, as
    safetensors spells it.
    """

    def __init__(self, view: View) -> None:
        self.view, self.key = view, view.key
        self.table: RuleTable = rule_table(self.key)
        self.codes = DTYPES[self.key.codes]
        # What checkpoints call scales depends on who wrote them first.
        self._named_scale = self.key.rule == "compressed-tensors" or self.key.kind == "mx"
        self._named_scale |= self.key.rule == "vllm" and self.key.kind != "block"

    @property
    def has_global(self) -> bool:
        """Whether each matrix has a global scale, by which the scales of its blocks are multiplied."""
        return self.key.kind == "nv"

    @property
    def packed(self) -> int:
        """Codes in a byte."""
        return 2 if self.key.codes == "fp4" else 1

    def quantised(self, shapes: Mapping[str, Shape], tied: Mapping[str, str]) -> set[str]:
        """Which tensors are quantised: each by all of its names, or not at all.

        shapes: of the tensors, by name. tied: further names of these or of others → the name that stands for them.
        """
        kept = {name for alias, name in tied.items() if name in shapes and not self.quantises(alias, shapes[name])}
        return {name for name, shape in shapes.items() if name not in kept and self.quantises(name, shape)}

    def quantises(self, name: str, shape: Shape) -> bool:
        """Whether a tensor of this name alone is quantised."""
        parts = name.split(".")
        if any(fnmatchcase(part, pattern) for part in parts for pattern in self.view.ignore):
            return False
        stacked = len(shape) == 3 and "experts" in parts
        return prod(shape) > 0 and (stacked or (len(shape) == 2 and parts[-1] == "weight"))

    def check_any(self, shapes: Mapping[str, Shape], tied: Mapping[str, str]) -> None:
        """Raise ValueError unless some tensors of a whole model are quantised."""
        if not self.quantised(shapes, tied):
            raise ValueError(f"expected matrices to quantise, named ….weight, found none in {len(shapes)} tensors")

    def check(self, shapes: Mapping[str, Shape]) -> None:
        """Raise ValueError unless whole tensors of these shapes, by name, can be cut into blocks."""
        for name in sorted(self.quantised(shapes, {})):
            try:
                self.grid(shapes[name])
            except ValueError as error:
                raise ValueError(f"tensor {name!r}: {error}") from None

    def grid(self, shape: Shape) -> BlockGrid:
        """How a tensor is cut into blocks. Raises ValueError if it cannot be."""
        height, columns = shape[-2], shape[-1]
        group = GROUPS.get(self.key.kind, 1)
        if columns % group:
            raise ValueError(
                f"expected a multiple of {group} columns to quantise by {self.view!r}, found the shape {list(shape)}: "
                "ignore= leaves tensors out"
            )
        if isinstance(self.view, Fp8) and self.key.kind == "block":
            rows, across = self._sides
            return BlockGrid(min(rows, height), min(across, columns), height)
        return BlockGrid(height if self.key.kind == "tensor" else 1, group if group > 1 else columns, height)

    @property
    def _sides(self) -> tuple[int, int]:
        assert isinstance(self.view, Fp8)
        assert not isinstance(self.view.block, str)
        return self.view.block

    def blocks(self, box: Box, shape: Shape) -> Box:
        """The blocks that a part of a tensor consists of, as a part of its scales.

        Raises ValueError unless they all lie within the part.
        """
        grid = self.grid(shape)
        steps = (1,) * (len(shape) - 2) + (grid.rows, grid.columns)
        if self.has_global and (box.offset[-2:], box.sizes[-2:]) != ((0, 0), shape[-2:]):
            raise ValueError(
                f"expected whole matrices, each of which has a global scale, found {list(box.sizes)} at "
                f"{list(box.offset)} of {list(shape)}: shard by tensors or experts, or take pulse.Fp4(format='mxfp4')"
            )
        for begin, size, step, end in zip(box.offset, box.sizes, steps, shape, strict=True):
            if begin % step or (begin + size != end and size % step):
                raise ValueError(
                    f"expected parts that consist of whole blocks of {list(steps[-2:])}, found {list(box.sizes)} at "
                    f"{list(box.offset)} of {list(shape)}: shard it otherwise, or take "
                    "block='channel' where rows stay whole"
                )
        offset = tuple(begin // step for begin, step in zip(box.offset, steps, strict=True))
        return Box(offset, tuple(-(-size // step) for size, step in zip(box.sizes, steps, strict=True)))

    def scale_shape(self, shape: Shape) -> Shape:
        """The shape of a tensor's scales."""
        rows, columns, height = self.grid(shape)
        found = (*shape[:-2], -(-height // rows), -(-shape[-1] // columns))
        return (shape[:-2] or (1,)) if self._named_scale and self.key.kind == "tensor" else found

    def code_box(self, box: Box) -> Box:
        """Where the codes of a part of a tensor lie, whose columns are whole bytes."""
        first, width = box.offset[-1] // self.packed, box.sizes[-1] // self.packed
        return Box((*box.offset[:-1], first), (*box.sizes[:-1], width))

    def code_name(self, name: str) -> str:
        """The name of a tensor's codes."""
        return name + ("_packed" if self.packed > 1 else "")

    def scale_name(self, name: str) -> str:
        """The name of a tensor's scales."""
        return name + ("_scale" if self._named_scale else "_scale_inv")

    def global_name(self, name: str) -> str:
        """The name of the global scales of a tensor's matrices, where the form has them."""
        return name + "_global_scale"

    def tensors(self, name: str, shape: Shape) -> dict[str, tuple[str, Shape]]:
        """The dtypes and shapes of what a tensor becomes: codes, scales, and global scales where the form has them."""
        found = {
            self.code_name(name): (self.codes, self.code_box(whole(shape)).sizes),
            self.scale_name(name): (self.table.dtype, self.scale_shape(shape)),
        }
        return found | ({self.global_name(name): ("F32", (*shape[:-2], 1))} if self.has_global else {})

    def family(self, name: str) -> str:
        """What tensors have in common whose matrices share a global scale."""
        parts = name.removesuffix(".weight").split(".")
        fused = next((names for names in _FUSED if parts[-1] in names), parts[-1:])
        return ".".join([*parts[:-1], "+".join(fused)])

    def config(self, shapes: Mapping[str, Shape], tied: Mapping[str, str]) -> dict[str, Any]:
        """The `quantization_config` of a checkpoint's config.json. shapes, tied: as for `quantised`, of all tensors."""
        stands = {name: name for name in shapes} | dict(tied)
        quantised = self.quantised(shapes, tied)
        kept = [name for name, own in stands.items() if own not in quantised and len(shapes[own]) > 1]
        modules = sorted(name.removesuffix(".weight") for name in kept if name.endswith(".weight"))
        if not self._named_scale or (self.key.rule == "vllm" and self.key.kind == "tensor"):
            return self._fp8_config(modules)
        return self._compressed_config(modules)

    def _fp8_config(self, modules: Iterable[str]) -> dict[str, Any]:
        found = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
        block = {"weight_block_size": list(self._sides)} if self.key.kind == "block" else {}
        scales = {"scale_fmt": "ue8m0"} if self.key.powers else {}
        return {**found, **block, **scales, "modules_to_not_convert": list(modules)}

    def _compressed_config(self, modules: Iterable[str]) -> dict[str, Any]:
        kind, codes = self.key.kind, self.key.codes
        number = {"num_bits": 8 // self.packed, "type": "int" if codes == "int8" else "float", "symmetric": True}
        fields: dict[BlockKind, dict[str, Any]] = {
            "channel": {"strategy": "channel"},
            "tensor": {"strategy": "tensor"},
            "mx": {"strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"},
            "nv": {"strategy": "tensor_group", "group_size": 16, "scale_dtype": "torch.float8_e4m3fn"},
        }
        inputs: dict[str, Any] = {**number, "strategy": "token", "dynamic": True}
        if kind == "block":
            fields["block"] = {"strategy": "block", "block_structure": list(self._sides)}
            inputs |= {"strategy": "group", "group_size": self._sides[1]}
        if kind == "mx":
            inputs |= fields["mx"]
        form = {"int8": "int-quantized", "fp8": "float-quantized", "fp4": f"{kind}fp4-pack-quantized"}[codes]
        form = "mxfp8-quantized" if (kind, codes) == ("mx", "fp8") else form
        weights = {**number, **fields[kind], "dynamic": False}
        group: dict[str, Any] = {"targets": ["Linear"], "weights": weights, "format": form}
        if codes != "fp4":  # inputs of NVFP4 would need a scale that is calibrated
            group["input_activations"] = inputs
        return {
            "quant_method": "compressed-tensors",
            "format": form,
            "quantization_status": "compressed",
            "config_groups": {"group_0": group},
            "ignore": list(modules),
        }
