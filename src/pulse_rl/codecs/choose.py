"""Which codec: by name, or by choice where the name is "auto"."""

from typing import Literal

from pulse_rl.codecs.base import Codec
from pulse_rl.codecs.gap import GapCodec
from pulse_rl.codecs.raw import RawCodec

CodecName = Literal["auto", "gap", "raw"]

CODECS: dict[str, Codec] = {codec.name: codec for codec in (GapCodec(), RawCodec())}


def choose(name: str) -> Codec:
    """The codec of that name; "auto" is `gap` for now. Raises ValueError for an unknown name."""
    if name == "auto":
        return CODECS["gap"]
    if name not in CODECS:
        raise ValueError(f"codec: expected one of auto, {', '.join(CODECS)}, found {name!r}")
    return CODECS[name]
