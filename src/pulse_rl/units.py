"""Numbers with units: parsed from text, and written for people."""

import math
import re
from collections.abc import Mapping

_PREFIXES = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
COUNTS = {"": 1.0, "k": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}  # as models are named: 7B
FRACTIONS = {"": 1.0, "%": 0.01}
SECONDS = {"": 1.0, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0}
BANDWIDTHS = {f"{p}bit": n for p, n in _PREFIXES.items()} | {f"{p}B": 8 * n for p, n in _PREFIXES.items()}  # bit/s
_NUMBER = re.compile(r"\s*(\d+\.?\d*(?:e[+-]?\d+)?|\.\d+)\s*(.*?)\s*", re.ASCII)


def parse(text: str, units: Mapping[str, float], what: str) -> float:
    """Read a number with one of these units: parse("200Mbit", BANDWIDTHS, …) is 2e8.

    units: unit → factor. what: the setting's name, which the error begins with. Raises ValueError for other text.
    """
    found = _NUMBER.fullmatch(text)
    if found is None or found[2] not in units or math.isinf(float(found[1]) * units[found[2]]):
        known = ", ".join(unit or "none" for unit in units)
        raise ValueError(f"{what}: expected a number and its unit ({known}), found {text!r}")
    return float(found[1]) * units[found[2]]


def parse_bandwidth(text: str, what: str) -> float:
    """Read bits per second: 200Mbit, 200 Mbit/s and 200Mbps are 2e8; 25MB and 25MB/s are bytes, the same.

    what: the setting's name, which the error begins with. Raises ValueError for other text.
    """
    plain = re.sub(r"(bit|B)/s\s*$|bps\s*$", lambda found: found[1] or "bit", text)
    try:
        return parse(plain, BANDWIDTHS, what)
    except ValueError:
        raise ValueError(
            f"{what}: expected bits or bytes per second, as 200Mbit, 200Mbps or 25MB/s, found {text!r}"
        ) from None


def as_bandwidth(value: float | str | None) -> float | None:
    """Bits per second, of a number or of text as `parse_bandwidth` reads it; None for None. Raises ValueError."""
    bits = parse_bandwidth(value, "bandwidth") if isinstance(value, str) else value
    if bits is not None and not (isinstance(bits, int | float) and bits > 0):
        raise ValueError(f"bandwidth: expected more than 0 bits per second, found {value!r}")
    return bits


def check_seconds(what: str, value: float, *, zero: bool = True) -> None:
    """Raise ValueError unless a value is seconds: at least 0, or without zero more than that.

    what: the setting's name, which the error begins with.
    """
    if not isinstance(value, int | float) or not (value >= 0 if zero else value > 0):
        raise ValueError(f"{what}: expected seconds, {'at least' if zero else 'more than'} 0, found {value!r}")


def nbytes(count: float) -> str:
    """A size in decimal units, three digits: 13.4 MB."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


def count(number: int, noun: str) -> str:
    """A number of things: 1 version, 1,200 versions."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def bandwidth(bits: float) -> str:
    """Bit/s in decimal units, three digits: 200 Mbit/s."""
    for unit in ("bit", "kbit", "Mbit", "Gbit"):
        if bits < 1000:
            return f"{bits:.3g} {unit}/s"
        bits /= 1000
    return f"{bits:.3g} Tbit/s"


def seconds(time: float) -> str:
    """Seconds or milliseconds, three digits: 4.32 s."""
    return f"{time:,.0f} s" if time >= 100 else f"{time:.3g} s" if time >= 1 else f"{time * 1e3:.3g} ms"
