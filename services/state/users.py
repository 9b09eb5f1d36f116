"""The users of a mesh's Redis: one per role, each with the keys and commands that the role needs. No I/O."""

import hashlib
import re
from collections.abc import Mapping

OPERATOR = "operator"
"""The user of `penstock up`, which follows the state of the mesh."""

# Connection, transactions, the registry, the plan and spans: what every service does.
_COMMON_COMMANDS = (
    "+auth +hello +ping +select +multi +exec +discard +watch +unwatch "
    "+get +mget +set +del +smembers +sadd +hset +hdel +hgetall +hmget +time +evalsha +script|load +xadd"
)
_ROUTER_COMMANDS = "+xrevrange +xtrim +eval +hincrby +hincrbyfloat +pexpire"
_PLANNER_COMMANDS = "+xrange"


def rules(mesh: str, *, read_only_patterns: bool) -> dict[str, str]:
    """The rules (ACL) of each user of a mesh's Redis, by user name, without passwords.

    mesh: the name of the mesh, which prefixes its keys. read_only_patterns: the server knows patterns of keys that may only
        be read (Redis 7). With Redis 6 only the commands are limited, not what they may do to plans.
    """
    prefix = re.sub(r"([][*?\\])", r"\\\1", mesh)
    read = "%R~" if read_only_patterns else "~"
    registry = f"~{prefix}:instance:* ~{prefix}:groups ~{prefix}:load:* ~{prefix}:snapshot:*"
    common = f"{registry} ~{prefix}:spans resetchannels -@all {_COMMON_COMMANDS}"
    plans = f"{read}{prefix}:plan:*"
    counted = " ".join(f"~{prefix}:{name}" for name in ("workload", "requests", "prompts", "limits:*", "usage:*"))
    return {
        "router": f"{plans} {counted} {common} {_ROUTER_COMMANDS}",
        "worker": f"{plans} {common}",
        "judge": f"{plans} {common}",
        "planner": f"~{prefix}:plan:* {read}{prefix}:workload {common} {_PLANNER_COMMANDS}",
        OPERATOR: f"{plans} {common}",
    }


def acl_file(rules: Mapping[str, str], passwords: Mapping[str, str]) -> str:
    """The content of an ACL file of Redis: hashes of the passwords, and no user without one."""
    lines = ["user default off"]
    for user, rule in rules.items():
        digest = hashlib.sha256(passwords[user].encode()).hexdigest()
        lines.append(f"user {user} on #{digest} {rule}")
    return "\n".join(lines) + "\n"
