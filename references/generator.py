"""Seeded weights that are the same bytes on any machine, numpy or torch version.

Named generator `philox-irwin-hall-4`: the Philox bit stream (stable by numpy's own promise, unlike its
distributions), keyed by BLAKE2b of the seed and the tensor's name; each 64-bit word gives one number, the sum
of its four 16-bit parts, centred and scaled to mean 0 and standard deviation 1 (|x| < 3.47). Integers and one
float64 product: no libm, no order of summation.
"""

import hashlib
import math
from collections.abc import Callable, Iterator

import numpy as np

NAME = "philox-irwin-hall-4"
_CENTRE = 4 * 65535 / 2
_SCALE = 1 / math.sqrt(4 * (65536**2 - 1) / 12)
_BLOCK = 1 << 22


def unit_normal(seed: int, name: str, count: int) -> Iterator[np.ndarray]:
    """Blocks of float64 (n,) that hold `count` numbers in all, mean 0 and standard deviation 1."""
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=16).digest()
    bits = np.random.Philox(key=int.from_bytes(digest, "little"))
    for start in range(0, count, _BLOCK):
        words = bits.random_raw(min(_BLOCK, count - start))
        total = (words & 0xFFFF) + (words >> 16 & 0xFFFF) + (words >> 32 & 0xFFFF) + (words >> 48)
        yield (total.astype(np.float64) - _CENTRE) * _SCALE


def tensor(seed: int, name: str, shape: tuple[int, ...], *, mean: float, std: float) -> np.ndarray:
    """Seeded numbers of the given mean and standard deviation, float32."""
    return _filled(np.empty(shape, np.float32), seed, name, mean, std, lambda block: block)


def bfloat16_tensor(seed: int, name: str, shape: tuple[int, ...], *, mean: float, std: float) -> np.ndarray:
    """The same as bfloat16 bit patterns (uint16), made block by block: a large tensor never stands in float32."""
    return _filled(np.empty(shape, np.uint16), seed, name, mean, std, bfloat16_bits)


def _filled(
    out: np.ndarray, seed: int, name: str, mean: float, std: float, stored: Callable[[np.ndarray], np.ndarray]
) -> np.ndarray:
    flat, start = out.reshape(-1), 0
    for block in unit_normal(seed, name, out.size):
        flat[start : start + block.size] = stored((block * std + mean).astype(np.float32))
        start += block.size
    return out


def bfloat16_bits(values: np.ndarray) -> np.ndarray:
    """The bfloat16 nearest to each float32, ties to even, as uint16 bit patterns."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)
