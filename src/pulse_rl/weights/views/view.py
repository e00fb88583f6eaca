"""What a view is, as a user says it: which tensors are quantised, in which blocks and by which rule."""

import ast
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from pulse_rl.documents import check_view_name
from pulse_rl.weights.views.rules import RULES, BlockKind, RuleKey, RuleName

Scales: TypeAlias = Literal["plain", "sticky"]

# Parts of names whose tensors engines load as they are: embeddings and the head, routers, norms.
IGNORED = ("lm_head", "*embed*", "wte", "wpe", "gate", "router", "shared_expert_gate", "*norm*", "score")
MX_BLOCK = (1, 32)


class View:
    """What views of all kinds have in common."""

    scales: Scales
    keep: float
    ignore: Sequence[str]

    def __post_init__(self) -> None:
        if isinstance(self.ignore, str):
            raise ValueError(f"ignore: expected patterns, as ('lm_head', '*embed*'), found {self.ignore!r}")
        object.__setattr__(self, "ignore", tuple(self.ignore))  # so that equal ones are the same text
        if self.scales not in ("plain", "sticky"):
            raise ValueError(f"scales: expected 'plain' or 'sticky', found {self.scales!r}")
        if not 0 < self.keep < 1:
            raise ValueError(f"keep: expected more than 0 and less than 1, found {self.keep!r}")

    @property
    def key(self) -> RuleKey:
        """Its rule among RULES."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class Fp8(View):
    """A view in FP8 E4M3 with a scale for each block, as checkpoints of engines have it.

    Quantised are the matrices of linear layers (`….weight`, of two dimensions) and stacks of experts (of three, with
    `experts` in the name), of bfloat16; all other tensors are in the view as they are.

    Args:
        block: Rows and columns of a block; (1, 32) are those of MXFP8. "channel": a scale for each row. "tensor": one
            for each matrix.
        rule: Whose arithmetic and names to take, bit for bit: "deepseek" (as slime, verl and SkyRL have it),
            "transformers", "vllm" or "compressed-tensors".
        scales: "plain": recomputed for each version, as the library would. "sticky": kept until a weight of the block
            would overflow or all of them use less than `keep` of the range.
        ue8m0: Round scales up to powers of two. Those of MXFP8 always are.
        keep: With sticky scales, the part of a block's range that its largest weight has to use, between 0 and 1.
        ignore: Patterns of parts of names, between two dots: a tensor with such a part is not quantised.

    Raises:
        ValueError: The rule does not have such blocks or scales; or a setting makes no sense.
    """

    block: tuple[int, int] | Literal["channel", "tensor"] = (128, 128)
    rule: RuleName = "deepseek"
    scales: Scales = "plain"
    ue8m0: bool = False
    keep: float = 0.5
    ignore: Sequence[str] = IGNORED

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.block, list):  # as TOML has it
            object.__setattr__(self, "block", tuple(self.block))
        sides = self.block if isinstance(self.block, tuple) else (self.block,)
        sized = len(sides) == 2 and all(isinstance(side, int) and side > 0 for side in sides)
        if not sized and self.block not in ("channel", "tensor"):
            raise ValueError(f"block: expected rows and columns, 'channel' or 'tensor', found {self.block!r}")
        if self.key not in RULES:
            offered = [rule for rule, *rest in RULES if rest == list(self.key[1:])]
            found = f"block={self.block!r}{' with ue8m0' if self.ue8m0 else ''}"
            if not offered:
                raise ValueError(f"block: expected what some rule has, found {found}: docs/views.md has a table")
            raise ValueError(f"rule: expected one of {', '.join(sorted(offered))} for {found}, found {self.rule!r}")

    @property
    def key(self) -> RuleKey:
        """Its rule among RULES."""
        if isinstance(self.block, str):
            kind: BlockKind = self.block
        else:
            kind = "mx" if self.block == MX_BLOCK else "block"
        return RuleKey(self.rule, kind, self.ue8m0 or kind == "mx", "fp8")


@dataclass(frozen=True, kw_only=True)
class Int8(View):
    """A view in INT8 with a scale for each row, as compressed-tensors' checkpoints for W8A8 have it.

    It quantises the same tensors as `Fp8`.

    Args:
        scales: As of `Fp8`.
        keep: As of `Fp8`.
        ignore: As of `Fp8`.

    Raises:
        ValueError: A setting makes no sense.
    """

    scales: Scales = "plain"
    keep: float = 0.5
    ignore: Sequence[str] = IGNORED

    @property
    def key(self) -> RuleKey:
        """Its rule among RULES."""
        return RuleKey("compressed-tensors", "channel", False, "int8")


@dataclass(frozen=True, kw_only=True)
class Fp4(View):
    """A view in FP4 E2M1, two codes a byte, as compressed-tensors' checkpoints for quantised weights have it.

    It quantises the same tensors as `Fp8`. Activations stay bfloat16.

    Args:
        format: "mxfp4": a power of two for each 32 elements of a row. "nvfp4": an FP8 scale for each 16, times a
            float32 one for each matrix; of matrices that engines fuse, as those for queries, keys and values, one for
            all of them.
        scales: As of `Fp8`. When the scale of a matrix changes, so do those of its blocks.
        keep: As of `Fp8`.
        ignore: As of `Fp8`.

    Raises:
        ValueError: A setting makes no sense.
    """

    format: Literal["mxfp4", "nvfp4"]
    scales: Scales = "plain"
    keep: float = 0.5
    ignore: Sequence[str] = IGNORED

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.format not in ("mxfp4", "nvfp4"):
            raise ValueError(f"format: expected 'mxfp4' or 'nvfp4', found {self.format!r}")

    @property
    def key(self) -> RuleKey:
        """Its rule among RULES."""
        mx = self.format == "mxfp4"
        return RuleKey("compressed-tensors", "mx" if mx else "nv", mx, "fp4")


def view_of(text: str) -> tuple[str, View]:
    """A view by its name, from text as "fp8=Fp8(block='channel', rule='vllm')". Raises ValueError."""
    name, _, form = text.partition("=")
    kinds: dict[str, type[View]] = {kind.__name__: kind for kind in (Fp8, Fp4, Int8)}
    try:
        call = ast.parse(form.strip().removeprefix("pulse."), mode="eval").body
        if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and not call.args):
            raise SyntaxError
        if (kind := kinds.get(call.func.id)) is None:
            raise ValueError(f"expected one of {', '.join(kinds)}, found {call.func.id!r}")
        check_view_name(name)
        return name, kind(**{str(each.arg): ast.literal_eval(each.value) for each in call.keywords})
    except SyntaxError:
        raise ValueError(f"expected NAME=FORM with settings by name, as fp8=Fp8(), found {text!r}") from None
    except (TypeError, ValueError) as error:
        raise ValueError(f"{text}: {error}") from None
