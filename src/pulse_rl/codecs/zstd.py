"""One zstd frame of untrusted bytes, decompressed within a limit."""

import zstandard

from pulse_rl.errors import FormatError


def decompress(frame: memoryview, limit: int, what: str) -> bytes:
    """Decompress one zstd frame of at most `limit` bytes.

    The size that the frame declares is checked before memory is allocated. what: a name for the frame, for the error.
    Raises FormatError if the size is missing or over the limit, or if the frame is broken or followed by other bytes.
    """
    try:
        size = zstandard.get_frame_parameters(frame).content_size
        if size == zstandard.CONTENTSIZE_UNKNOWN or size > limit:
            raise FormatError(f"{what}: expected at most {limit} bytes, the frame declares {size}")
        decompressor = zstandard.ZstdDecompressor().decompressobj()
        data = decompressor.decompress(frame)
    except zstandard.ZstdError as error:
        raise FormatError(f"{what}: broken zstd frame: {error}") from None
    if not decompressor.eof or decompressor.unused_data or len(data) != size:
        raise FormatError(f"{what}: expected one whole zstd frame of {size} bytes, found {len(data)}")
    return data
