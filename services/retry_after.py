"""When a busy HTTP server says to try again."""

from collections.abc import Mapping

DEFAULT_S = 1.0
LEAST_S, MOST_S = 0.1, 60.0


def retry_after_s(headers: Mapping[str, str]) -> float:
    """The seconds of a Retry-After header, within limits; DEFAULT_S if it is missing or something else."""
    try:
        seconds = float(headers.get("Retry-After", ""))
    except ValueError:  # a date, or nothing
        return DEFAULT_S
    return min(MOST_S, max(LEAST_S, seconds)) if seconds >= 0 else DEFAULT_S  # NaN, too
