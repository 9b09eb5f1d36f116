"""Random numbers that depend on a request's seed and an output position only, never on the batch. No I/O.

So a sampled reply is the same alone or in a batch, chunked or preempted, here or on another instance.
"""

DRAW = 0  # the number that draws a token; others are for decisions about it
_MASK = (1 << 64) - 1


def _mixed(x: int) -> int:
    """SplitMix64's finaliser (Steele, Lea and Flood 2014)."""
    x = (x + 0x9E3779B97F4A7C15) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def uniform(seed: int, offset: int, purpose: int = DRAW) -> float:
    """A number in [0, 1), 53 bits of it, for output position `offset`."""
    return (_mixed(_mixed(_mixed(seed) ^ offset) ^ purpose) >> 11) / (1 << 53)
