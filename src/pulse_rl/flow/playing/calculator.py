"""The calculator: a tool that computes one expression. Python's parser reads it; nothing of the text is run."""

import ast
import math
import operator
import re
from collections.abc import Callable
from typing import Any

from pulse_rl.flow.playing.tools import ToolError

EXPRESSION = 200  # characters, at most; so its parts are no deeper in each other than a parser can take
DIGITS = 400  # of a number in between
BITS = 4 * DIGITS

_ALIKE = str.maketrans({"×": "*", "÷": "/", "−": "-"})
_CHARACTERS = re.compile(r"[0-9.eE+\-*/%() ]+")
_LEADING_ZEROS = re.compile(r"(?<![\d.])0+(?=\d)")  # which Python does not read
_TOO_LARGE = f"expected numbers of at most {DIGITS} digits"
_NO_EXPRESSION = "expected an expression of numbers, + - * / // % ** and parentheses"
_OPERATORS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}


class Calculator:
    """Computes one expression of numbers, + − * / // % **, and parentheses."""

    async def __call__(self, text: str, /) -> str:
        return calculate(text)


def calculate(text: str) -> str:
    """The value of an expression as text: a whole number as one. Raises ToolError."""
    text = " ".join(text.strip().rstrip("=").translate(_ALIKE).split())
    if not text or len(text) > EXPRESSION:
        raise ToolError(f"expected an expression of 1 to {EXPRESSION} characters, found {len(text)}")
    try:
        if not _CHARACTERS.fullmatch(text):
            raise ToolError(_NO_EXPRESSION)
        value = _value(ast.parse(_LEADING_ZEROS.sub("", text), mode="eval").body)
    except (SyntaxError, MemoryError):  # the latter: of parentheses too deep in each other
        raise ToolError(_NO_EXPRESSION) from None
    except ZeroDivisionError:
        raise ToolError("division by zero") from None
    except OverflowError:
        raise ToolError(_TOO_LARGE) from None
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        value = int(value)
    return f"{value:.12g}" if isinstance(value, float) else str(value)


def _value(node: ast.expr) -> int | float:
    value: int | float | complex
    match node:
        case ast.Constant(int() | float() as number):
            value = number
        case ast.UnaryOp(ast.UAdd(), operand):
            value = _value(operand)
        case ast.UnaryOp(ast.USub(), operand):
            value = -_value(operand)
        case ast.BinOp(left, how, right) if type(how) in _OPERATORS:
            a, b = _value(left), _value(right)
            if isinstance(how, ast.Pow) and isinstance(a, int) and isinstance(b, int) and b * a.bit_length() > BITS:
                raise ToolError(_TOO_LARGE)  # before it is computed: 9**9**9 takes all memory
            value = _OPERATORS[type(how)](a, b)
        case _:
            raise ToolError(_NO_EXPRESSION)
    if isinstance(value, complex):
        raise ToolError("expected a real number")
    if value.bit_length() > BITS if isinstance(value, int) else not abs(value) < math.inf:
        raise ToolError(_TOO_LARGE)
    return value
