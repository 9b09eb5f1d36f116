"""Which servers of Redis' protocol can hold the state of a mesh. No I/O."""

import re
from collections.abc import Mapping

NEEDED = (6, 2)


def of_hello(reply: Mapping[bytes, object]) -> tuple[str, str]:
    """(server, version) of a reply to HELLO, which Redis before 6 does not know."""
    server, version = reply.get(b"server"), reply.get(b"version")
    if not isinstance(server, bytes) or not isinstance(version, bytes):
        return "", ""
    return server.decode(errors="replace"), version.decode(errors="replace")


def problem(server: str, version: str) -> str:
    """Why a server is too old. Empty if it is not, as no Valkey is, or if its version is unknown."""
    numbers = tuple(int(number) for number in re.findall(r"\d+", version)[:2])
    if server.lower() != "redis" or not numbers or numbers >= NEEDED:
        return ""
    return f"Redis {version} is too old: Redis {'.'.join(map(str, NEEDED))} or later is needed, or Valkey"
