"""The limit on open files, and thereby on connections, of this process."""

import logging
import resource

_log = logging.getLogger(__name__)

RESERVE = 192
"""Files reserved for other purposes than clients: connections to workers, judges and Redis, libraries, logs."""
SERVERS = 2  # gRPC and HTTP share the rest
MAX_FILES = 1 << 20  # if there is no hard limit


def raise_limit() -> None:
    """Raise the soft limit, often 1,024, to the hard limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = MAX_FILES if hard == resource.RLIM_INFINITY else hard
    if soft != resource.RLIM_INFINITY and soft < limit:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))


def connections(requested: int) -> int:
    """The limit on connections of one server: `requested`, or less if the limit on open files requires it.

    Beyond that limit, no connection could be accepted, and none could be opened to a worker.
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = max(1, (soft - RESERVE) // SERVERS) if soft != resource.RLIM_INFINITY else requested
    if limit < requested:
        _log.warning(
            "max_connections: %d each for gRPC and HTTP instead of %d: only %d files may be open (ulimit -n)",
            limit,
            requested,
            soft,
        )
    return min(requested, limit)
