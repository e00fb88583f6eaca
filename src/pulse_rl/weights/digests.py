"""The digest: the fingerprint of a whole state of weights, kept up to date at O(changes).

    digest(state) = Σ over tensors, Σ over elements i:  mix(seed + i·C1 + bits_i·C2)   mod 2^64

`seed` comes from the tensor's name, dtype and shape; `i` is the flat row-major index in the full tensor; an
empty tensor adds mix(seed). Because it is a sum, the changed elements alone update it, and ranks that hold shards of
one tensor can each sum their own elements and add the sums. It detects corruption and drift, not an adversary: payload
hashes do that. `docs/format.md` gives the constants and test vectors.
"""

from typing import Any

from blake3 import blake3

from pulse_rl.kernels import cpu
from pulse_rl.parallel import ordered_map
from pulse_rl.weights.bits import Bits
from pulse_rl.weights.layout import layout
from pulse_rl.weights.segments import segments

MASK = (1 << 64) - 1


def mix(x: int) -> int:
    """The 64-bit finalizer of murmur3: a bijection of 64-bit integers."""
    x = ((x ^ (x >> 33)) * 0xFF51AFD7ED558CCD) & MASK
    x = ((x ^ (x >> 33)) * 0xC4CEB9FE1A85EC53) & MASK
    return x ^ (x >> 33)


def seed(name: str, dtype: str, shape: tuple[int, ...]) -> int:
    """The tensor's seed: the first 8 bytes, little-endian, of BLAKE3("dtype\\0d0,d1,…\\0name") in UTF-8."""
    text = f"{dtype}\0{','.join(map(str, shape))}\0{name}"
    return int.from_bytes(blake3(text.encode()).digest(8), "little")


def state_digest(tensors: dict[str, Bits]) -> int:
    """The digest of a whole state as an integer; segments in parallel."""
    work = []
    total = 0
    for name, bits in tensors.items():
        root = seed(name, bits.dtype, bits.shape)
        if bits.size == 0:
            total += mix(root)
        work += [(root, bits, a, b) for a, b in segments(bits.size)]
    parts = ordered_map(lambda item: cpu.digest_range(item[0], item[2], item[1].read(item[2], item[3])), work)
    return (total + sum(parts)) & MASK


def to_hex(value: int) -> str:
    """16 lower-case hexadecimal digits."""
    return f"{value & MASK:016x}"


def digest(weights: Any) -> str:
    """Compute the fingerprint of all bits of the weights, as 16 hexadecimal digits.

    Two digests are equal exactly when names, dtypes, shapes and bits are equal (but for a chance of about 2^−64).
    Every element is read once: memory-bound up to a few GB/s per core.

    Args:
        weights: A torch module, or a mapping of name → tensor or array. Tied tensors count once, under the first name.

    Returns:
        The digest, such as "0123456789abcdef".

    Raises:
        TypeError: Something is not a tensor or an array, or has a dtype that is not supported.
    """
    return to_hex(state_digest(layout(weights)))
