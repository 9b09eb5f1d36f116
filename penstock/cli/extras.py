"""Commands that need packages beyond the SDK's, and their error when these are missing."""

from collections.abc import Iterator
from contextlib import contextmanager

from penstock.cli.output import fail

DISTRIBUTION = "penstock-mesh"


@contextmanager
def needs_extra(command: str, extra: str) -> Iterator[None]:
    """Decorate `command`: if a package of `extra` is missing, it ends with status 2 and one line that names the extra.

    Such commands import these packages in their body, so that other commands start without them.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        package = "penstock-demo" if error.name == "penstock.demo_data" else (error.name or "").partition(".")[0]
        if package == "penstock":
            raise  # a bug of Penstock: no extra would help
        needed = f'penstock {command} needs the {extra} extra: pip install "{DISTRIBUTION}[{extra}]"'
        fail(f"{needed} ({package} is not installed)", 2)
