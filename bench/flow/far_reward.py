"""A reward that a random model's answers differ in."""

from typing import Any


def vowels(task: Any, problem: Any, text: str) -> float:
    """The share of vowels."""
    return sum(map("aeiouAEIOU".__contains__, text)) / max(1, len(text))
