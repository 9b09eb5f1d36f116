"""When a busy server says to try again. No I/O."""

DEFAULT_RETRY_S = 1.0
RETRY_RANGE_S = (0.1, 60.0)


def retry_after_s(header: str | None) -> float:
    """The delay in a Retry-After header; 1 s if it is missing or invalid."""
    least, most = RETRY_RANGE_S
    try:
        return min(most, max(least, float(header or DEFAULT_RETRY_S)))
    except ValueError:
        return DEFAULT_RETRY_S
