"""Print what an image of Penstock installs before Penstock itself: `requirements.py EXTRAS [PYPROJECT]`.

EXTRAS: names of optional dependencies, separated by commas. The output holds the package's dependencies and those of the
extras, one per line, sorted, with extras of the package itself resolved. An image that installs this list in a layer of its
own keeps the layer until the list changes. Needs the standard library only: it runs in a bare Python image.

Raises:
    SystemExit: An extra is not in pyproject.toml; the message names it.
"""

import re
import sys
import tomllib
from collections.abc import Iterable
from pathlib import Path

REFERENCE = re.compile(r"^(?P<name>[A-Za-z0-9._-]+)\[(?P<extras>[A-Za-z0-9._, -]+)\]$")


def requirements(project: dict[str, object], extras: Iterable[str]) -> list[str]:
    """Return the dependencies of a `[project]` table with these extras, sorted."""
    name, optional = project["name"], project.get("optional-dependencies", {})
    assert isinstance(optional, dict)
    needs: set[str] = set(project.get("dependencies", []))  # type: ignore[call-overload]
    pending, resolved = [extra.strip() for extra in extras], set[str]()
    while pending:
        extra = pending.pop()
        if extra in resolved:
            continue
        if extra not in optional:
            raise SystemExit(f"{extra!r} is no extra of {name}: {', '.join(sorted(optional))}")
        resolved.add(extra)
        for need in optional[extra]:
            reference = REFERENCE.match(need)
            if reference and reference["name"] == name:
                pending += [part.strip() for part in reference["extras"].split(",")]
            else:
                needs.add(need)
    return sorted(needs)


if __name__ == "__main__":
    if not 2 <= len(sys.argv) <= 3:
        raise SystemExit(__doc__)
    table = tomllib.loads(Path(sys.argv[2] if len(sys.argv) == 3 else "pyproject.toml").read_text())["project"]
    print("\n".join(requirements(table, sys.argv[1].split(","))))
