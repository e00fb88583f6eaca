"""One zstd frame of untrusted bytes, decompressed within a limit."""

import threading

import zstandard

from pulse_rl.errors import FormatError


class _Local(threading.local):
    def __init__(self) -> None:
        self.decompressor = zstandard.ZstdDecompressor()  # a new one takes longer than 60 KB of values


_local = _Local()


def decompress(frame: memoryview, limit: int, what: str) -> bytes:
    """Decompress one zstd frame of at most `limit` bytes.

    The size that the frame declares is checked before memory is allocated. what: a name for the frame, for the error.
    Raises FormatError if the size is missing or over the limit, or if the frame is broken or followed by other bytes.
    """
    try:
        size = zstandard.get_frame_parameters(frame).content_size
        if size == zstandard.CONTENTSIZE_UNKNOWN or size > limit:
            declared = "no size" if size == zstandard.CONTENTSIZE_UNKNOWN else size
            raise FormatError(f"{what}: expected at most {limit} bytes, the frame declares {declared}")
        decompressor = _local.decompressor.decompressobj()
        data = decompressor.decompress(frame)
    except zstandard.ZstdError as error:
        raise FormatError(f"{what}: broken zstd frame: {error}") from None
    if not decompressor.eof or decompressor.unused_data or len(data) != size:
        after = f", and {len(decompressor.unused_data)} bytes after it" if decompressor.unused_data else ""
        raise FormatError(f"{what}: expected one whole zstd frame of {size} bytes, found {len(data)}{after}")
    return data
