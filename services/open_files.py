"""How many files, and so connections, this process may have open."""

import logging
import resource

_log = logging.getLogger(__name__)

RESERVE = 192
"""Files kept free for what is not a client: links to workers, judges and Redis, libraries, logs."""
FACES = 2  # gRPC and HTTP share what is left
MOST = 1 << 20  # where the hard limit is none at all


def raise_limit() -> None:
    """Raise the soft limit, often 1,024, to the hard one, which is there for those who need it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MOST if hard == resource.RLIM_INFINITY else hard
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def connections(wanted: int) -> int:
    """The connections that one face may have: as many as are wanted, or as the limit on open files leaves it.

    Beyond the limit no connection can be accepted, on either face, and none made to a worker.
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = max(1, (soft - RESERVE) // FACES) if soft != resource.RLIM_INFINITY else wanted
    if most < wanted:
        _log.warning(
            "max_connections: %d for each face, not %d: only %d files may be open (ulimit -n)", most, wanted, soft
        )
    return min(wanted, most)
