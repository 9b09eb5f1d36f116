"""Write deploy/redis/users.acl, for the Redis of the compose file: `python scripts/redis_users.py [--check]`."""

import sys
from pathlib import Path

from services.state import users

FILE = Path(__file__).resolve().parent.parent / "deploy" / "redis" / "users.acl"
MESH = "penstock"  # the name in mesh.yaml and deploy/mesh-gpu.yaml


def content() -> str:
    """The users, with the names of environment variables for their passwords."""
    rules = users.rules(MESH, read_only_patterns=True)
    lines = [
        "user default off",
        *(f"user {user} on >${{{user.upper()}_PASSWORD}} {rule}" for user, rule in rules.items()),
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    if "--check" in sys.argv[1:]:
        sys.exit(0 if FILE.read_text() == content() else f"{FILE} is out of date: python scripts/redis_users.py")
    FILE.write_text(content())


if __name__ == "__main__":
    main()
