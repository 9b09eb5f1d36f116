"""Write what deployments know of roles, Redis users and callers: `python -m scripts.access_files [--check]`."""

import sys
from pathlib import Path

from penstock.services.access.roles import PERMISSIONS, SERVICES
from penstock.services.state import users

DEPLOY = Path(__file__).resolve().parent.parent / "deploy"
CHART_FILES = DEPLOY / "helm" / "penstock" / "files"
MESH = "${MESH:-penstock}"  # the environment of the compose file's Redis
ANY_MESH = "MESH"  # the chart replaces it
NOTE = "# Written by scripts/access_files.py.\n"


def compose_users() -> str:
    """The users of the compose file's Redis, with the names of environment variables for their passwords."""
    rules = users.rules(MESH, read_only_patterns=True)
    lines = [f"user {user} on >${{{user.upper()}_PASSWORD}} {rule}" for user, rule in rules.items()]
    return "\n".join(["user default off", *lines]) + "\n"


def chart_users() -> str:
    """The rules of each user of the chart's Redis."""
    rules = users.rules(ANY_MESH, read_only_patterns=True)
    return NOTE + "".join(f'{user}: "{rule}"\n' for user, rule in rules.items())


def callers() -> str:
    """The roles that call the internal port of each service."""
    lines = []
    for service in sorted(role.value for role in SERVICES):
        rpcs = [
            roles
            for rpc, roles in PERMISSIONS.items()
            if rpc.startswith(f"/penstock.{service}.v1.{service.title()}Service/")
        ]
        lines.append(f"{service}: [{', '.join(sorted(role.value for role in frozenset().union(*rpcs) & SERVICES))}]\n")
    return NOTE + "".join(lines)


FILES = {
    DEPLOY / "redis" / "users.acl": compose_users,
    CHART_FILES / "redis-users.yaml": chart_users,
    CHART_FILES / "callers.yaml": callers,
}


def main() -> None:
    for file, content in FILES.items():
        if "--check" not in sys.argv[1:]:
            file.write_text(content())
        elif file.read_text() != content():
            sys.exit(f"{file} is out of date: python -m scripts.access_files")


if __name__ == "__main__":
    main()
