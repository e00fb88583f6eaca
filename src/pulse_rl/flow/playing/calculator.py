"""The calculator: a tool that computes one expression. It parses by itself; nothing of the text is run."""

import math
import operator
import re
from collections.abc import Callable
from typing import Any

from pulse_rl.flow.playing.tools import ToolError

EXPRESSION = 200  # characters, at most
DIGITS = 400  # of a number in between
BITS = 4 * DIGITS
DEPTH = 20  # of parentheses in each other


class Calculator:
    """Computes one expression of numbers, + − * / // % **, and parentheses."""

    async def __call__(self, text: str, /) -> str:
        return calculate(text)


def calculate(text: str) -> str:
    """The value of an expression as text: a whole number as one. Raises ToolError."""
    text = text.strip().rstrip("=").strip()
    if not text or len(text) > EXPRESSION:
        raise ToolError(f"expected an expression of 1 to {EXPRESSION} characters, found {len(text)}")
    try:
        value = _Expression(text).value()
    except ZeroDivisionError:
        raise ToolError("division by zero") from None
    except OverflowError:
        raise ToolError(_TOO_LARGE) from None
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        value = int(value)
    return f"{value:.12g}" if isinstance(value, float) else str(value)


_TOKEN = re.compile(r"\s*(\d+\.?\d*(?:[eE][+-]?\d+)?|\.\d+|\*\*|//|[-+*/%()])")
_ALIKE = str.maketrans({"×": "*", "÷": "/", "−": "-"})
_TOO_LARGE = f"expected numbers of at most {DIGITS} digits"
_NO_EXPRESSION = "expected an expression of numbers, + - * / // % ** and parentheses"
_OPERATORS: dict[str, Callable[[Any, Any], Any]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.truediv,
    "//": operator.floordiv,
    "%": operator.mod,
}


class _Expression:
    """A parser by recursive descent, with Python's precedence. Nothing is evaluated but numbers."""

    def __init__(self, text: str) -> None:
        text = text.translate(_ALIKE)
        self._tokens: list[str] = []
        place = 0
        while place < len(text):
            if not (match := _TOKEN.match(text, place)):
                raise ToolError(_NO_EXPRESSION)
            self._tokens.append(match[1])
            place = match.end()
        self._tokens.append("")  # the end
        self._depth = 0

    def value(self) -> int | float:
        value = self._sum()
        if self._tokens[0]:
            raise ToolError(_NO_EXPRESSION)
        return value

    def _sum(self) -> int | float:
        return self._left(("+", "-"), self._product)

    def _product(self) -> int | float:
        return self._left(("*", "/", "//", "%"), self._signed)

    def _left(self, operators: tuple[str, ...], operand: Callable[[], int | float]) -> int | float:
        value = operand()
        while self._tokens[0] in operators:
            value = _bounded(_OPERATORS[self._tokens.pop(0)](value, operand()))
        return value

    def _signed(self) -> int | float:
        negative = False
        while self._tokens[0] in ("+", "-"):
            negative ^= self._tokens.pop(0) == "-"
        value = self._power()
        return -value if negative else value

    def _power(self) -> int | float:
        base = self._atom()
        if self._tokens[0] != "**":
            return base
        self._tokens.pop(0)
        exponent = self._nested(self._signed)
        if isinstance(base, int) and isinstance(exponent, int) and exponent * base.bit_length() > BITS:
            raise ToolError(_TOO_LARGE)  # before it is computed: 9**9**9 takes all memory
        value = base**exponent
        if isinstance(value, complex):
            raise ToolError("expected a real number")
        return _bounded(value)

    def _atom(self) -> int | float:
        token = self._tokens.pop(0)
        if token == "(":
            value = self._nested(self._sum)
            if self._tokens.pop(0) != ")":
                raise ToolError(_NO_EXPRESSION)
            return value
        if not token or not (token[0].isdigit() or token[0] == "."):
            raise ToolError(_NO_EXPRESSION)
        return _bounded(int(token) if token.isdecimal() else float(token))

    def _nested(self, inner: Callable[[], int | float]) -> int | float:
        self._depth += 1
        if self._depth > DEPTH:
            raise ToolError(f"expected at most {DEPTH} parentheses in each other")
        value = inner()
        self._depth -= 1
        return value


def _bounded(value: int | float) -> int | float:
    if value.bit_length() > BITS if isinstance(value, int) else not abs(value) < math.inf:
        raise ToolError(_TOO_LARGE)
    return value
