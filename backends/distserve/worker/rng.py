"""Random numbers that depend on (seed, position) only, so that neither batch nor instance changes what is
sampled.

SplitMix64 (Steele, Lea and Flood, OOPSLA 2014) as a counter-based generator: the counter is the position,
the seed picks the stream.
"""

from __future__ import annotations

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


def uniform(seed: int, position: int) -> float:
    """In [0, 1), 53 random bits; `seed` is taken modulo 2**64, `position` is the sampled token's place
    (from 0).
    """
    stream = _mix((seed + _GOLDEN) & _MASK)
    return (_mix((stream + (position + 1) * _GOLDEN) & _MASK) >> 11) * 2.0**-53


def _mix(x: int) -> int:
    """SplitMix64's finaliser: a bijection of 64 bits in which every input bit reaches every output bit."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)
