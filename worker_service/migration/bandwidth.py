"""At which rate KV moves to another worker, by the moves themselves."""

LEAST_MOVED_BYTES = 4 << 20
"""A move of less KV says more about round trips than about bandwidth."""
SMOOTHING = 0.3


class BandwidthEstimate:
    """bytes_per_s: 0 while it is unknown. fixed: of the settings; None: as moves show."""

    def __init__(self, fixed: float | None = None) -> None:
        self._fixed = fixed is not None
        self.bytes_per_s = fixed or 0.0

    def moved(self, size_bytes: int, seconds: float) -> None:
        """Handle a transfer."""
        if self._fixed or size_bytes < LEAST_MOVED_BYTES or seconds <= 0:
            return
        rate = size_bytes / seconds
        self.bytes_per_s += (SMOOTHING if self.bytes_per_s else 1.0) * (rate - self.bytes_per_s)
