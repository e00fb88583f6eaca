"""How checkpoints of a view look: which tensors have codes, how their scales are called and shaped, and the config.

What engines load is what the tools write that were there first: `weight_scale_inv` with DeepSeek's config for blocks,
`weight_scale` with that of compressed-tensors for rows, for MXFP8 and for INT8.
"""

from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from math import prod
from typing import Any

from pulse_rl.dtypes import ITEMSIZES
from pulse_rl.kernels.cpu.quantising import BlockGrid
from pulse_rl.weights.boxes import Box, Shape
from pulse_rl.weights.views.rules import BlockKind, RuleTable, rule_table
from pulse_rl.weights.views.view import MX_BLOCK, View

DTYPES = {"fp8": "F8_E4M3", "int8": "I8"}


class ViewFormat:
    """The format of a view.

    table: the arithmetic of its rule. codes: their dtype, as safetensors spells it. ranges: as `RuleTable.ranges`.
    """

    def __init__(self, view: View) -> None:
        self.view = view
        self.table: RuleTable = rule_table(*view.key)
        self.codes = DTYPES[view.codes]
        self.ranges = self.table.ranges
        # What checkpoints call scales depends on who wrote them first.
        self._named_scale = view.rule == "compressed-tensors" or view.kind == "mx"
        self._named_scale |= view.rule == "vllm" and view.kind != "block"

    def quantises(self, name: str, shape: Shape) -> bool:
        """Whether a tensor is quantised."""
        parts = name.split(".")
        if any(fnmatchcase(part, pattern) for part in parts for pattern in self.view.ignore):
            return False
        stacked = len(shape) == 3 and "experts" in parts
        return prod(shape) > 0 and (stacked or (len(shape) == 2 and parts[-1] == "weight"))

    def grid(self, shape: Shape) -> BlockGrid:
        """How a tensor is cut into blocks. Raises ValueError if it cannot be."""
        height, columns = shape[-2], shape[-1]
        if self.view.kind == "mx" and columns % MX_BLOCK[1]:
            raise ValueError(f"MXFP8: expected a multiple of 32 columns, found the shape {list(shape)}")
        sizes = {"channel": (1, columns), "tensor": (height, columns)}
        block = self.view.block
        return BlockGrid(*(sizes[block] if isinstance(block, str) else block), height)

    def blocks(self, box: Box, shape: Shape) -> Box:
        """The blocks that a part of a tensor consists of, as a part of its scales.

        Raises ValueError unless they all lie within the part.
        """
        grid = self.grid(shape)
        steps = (1,) * (len(shape) - 2) + (grid.rows, grid.columns)
        for begin, size, step, whole in zip(box.offset, box.sizes, steps, shape, strict=True):
            if begin % step or (begin + size != whole and size % step):
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
        return (shape[:-2] or (1,)) if self._named_scale and self.view.kind == "tensor" else found

    def scale_name(self, name: str) -> str:
        """The name of a tensor's scales."""
        return name + ("_scale" if self._named_scale else "_scale_inv")

    @property
    def scale_itemsize(self) -> int:
        """Bytes of a scale."""
        return ITEMSIZES[self.table.dtype]

    def config(self, shapes: Mapping[str, Shape]) -> dict[str, Any]:
        """The `quantization_config` of a checkpoint's config.json. shapes: of all tensors, by name."""
        kept = [name for name, shape in shapes.items() if len(shape) > 1 and not self.quantises(name, shape)]
        modules = sorted(name.removesuffix(".weight") for name in kept if name.endswith(".weight"))
        if not self._named_scale or (self.view.rule == "vllm" and self.view.kind == "tensor"):
            return self._fp8_config(modules)
        return self._compressed_config(modules)

    def _fp8_config(self, modules: Iterable[str]) -> dict[str, Any]:
        found = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
        block = {"weight_block_size": list(self.view.block)} if self.view.kind == "block" else {}
        scales = {"scale_fmt": "ue8m0"} if self.view.ue8m0 else {}
        return {**found, **block, **scales, "modules_to_not_convert": list(modules)}

    def _compressed_config(self, modules: Iterable[str]) -> dict[str, Any]:
        kind = "int" if self.view.codes == "int8" else "float"
        eight = {"num_bits": 8, "type": kind, "symmetric": True}
        fields: dict[BlockKind, dict[str, Any]] = {
            "channel": {"strategy": "channel"},
            "tensor": {"strategy": "tensor"},
            "block": {"strategy": "block", "block_structure": list(self.view.block)},
            "mx": {"strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"},
        }
        weights = {**eight, **fields[self.view.kind], "dynamic": False}
        inputs = {**eight, "strategy": "token", "dynamic": True}
        if self.view.kind == "block":
            inputs |= {"strategy": "group", "group_size": self.grid((1, 1)).columns}
        if self.view.kind == "mx":
            inputs |= fields["mx"]
        form = "mxfp8-quantized" if self.view.kind == "mx" else f"{kind}-quantized"
        group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "format": form}
        return {
            "quant_method": "compressed-tensors",
            "format": form,
            "quantization_status": "compressed",
            "config_groups": {"group_0": group},
            "ignore": list(modules),
        }
