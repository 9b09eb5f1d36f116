"""The users of a mesh's Redis: one per role, each with the keys and commands that the role needs. No I/O."""

import hashlib
import re
from collections.abc import Mapping

from penstock.services.domain.instances import DEFAULT_MESH

OPERATOR = "operator"
"""The user of `penstock up`, which follows the state of the mesh."""
WHOLE = "up"
"""The user of `penstock up` on a Redis that it did not start: all processes of the mesh come in as this one."""

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
    prefix = _escaped(mesh)
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


def _escaped(mesh: str) -> str:
    """A mesh's name in a pattern of keys."""
    return re.sub(r"([][*?\\])", r"\\\1", mesh)


def user_name(mesh: str, role: str) -> str:
    """The name of a user on a Redis that several meshes share. The default mesh's have no prefix."""
    return role if mesh == DEFAULT_MESH else f"{mesh}-{role}"


def shared_rules(mesh: str, *, read_only_patterns: bool) -> dict[str, str]:
    """The rules of a mesh's users by `user_name`, one of them for the whole mesh. See `rules`."""
    whole = f"~{_escaped(mesh)}:* resetchannels -@all {_COMMON_COMMANDS} {_ROUTER_COMMANDS} {_PLANNER_COMMANDS}"
    by_role = rules(mesh, read_only_patterns=read_only_patterns) | {WHOLE: whole}
    return {user_name(mesh, role): rule for role, rule in by_role.items()}


def acl_lines(rules: Mapping[str, str], passwords: Mapping[str, str]) -> str:
    """Lines of an ACL file of Redis: hashes of the passwords, and no user without one."""
    hashes = {user: hashlib.sha256(passwords[user].encode()).hexdigest() for user in rules}
    return "".join(f"user {user} on #{hashes[user]} {rule}\n" for user, rule in rules.items())


def acl_file(rules: Mapping[str, str], passwords: Mapping[str, str]) -> str:
    """The content of an ACL file: no other user comes in."""
    return "user default off\n" + acl_lines(rules, passwords)
