"""Commands that need packages beyond the SDK's, and their error when these are missing."""

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from penstock.cli.output import fail

DISTRIBUTION = "penstock-mesh"

_P = ParamSpec("_P")
_R = TypeVar("_R")


def needs_extra(command: str, extra: str) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Decorate `command`: if a package of `extra` is missing, it ends with status 2 and one line that names the extra.

    Such commands import these packages in their body, so that other commands start without them.
    """

    def decorate(run: Callable[_P, _R]) -> Callable[_P, _R]:
        @functools.wraps(run)
        def checked(*arguments: _P.args, **options: _P.kwargs) -> _R:
            try:
                return run(*arguments, **options)
            except ModuleNotFoundError as error:
                package = (
                    "penstock-demo" if error.name == "penstock.demo_data" else (error.name or "").partition(".")[0]
                )
                if package == "penstock":
                    raise  # a bug of Penstock: no extra would help
                needed = f'penstock {command} needs the {extra} extra: pip install "{DISTRIBUTION}[{extra}]"'
                fail(f"{needed} ({package} is not installed)", 2)

        return checked

    return decorate
