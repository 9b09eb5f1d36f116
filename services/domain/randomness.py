"""Random numbers that depend only on the seed of a request and a position in it. No I/O.

So a sampled reply does not depend on the batch, on chunking, on preemption or on the instance.
"""

DRAW = 0  # for drawing a token; the position is that of the token in the output
_MASK = (1 << 64) - 1


def _mixed(x: int) -> int:
    """SplitMix64's finaliser (Steele, Lea and Flood 2014)."""
    x = (x + 0x9E3779B97F4A7C15) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def uniform(seed: int, offset: int, purpose: int = DRAW) -> float:
    """A number in [0, 1) with 53 random bits for position `offset` of a request with this seed."""
    return (_mixed(_mixed(_mixed(seed) ^ offset) ^ purpose) >> 11) / (1 << 53)
