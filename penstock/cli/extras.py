"""Which commands need more than the SDK, and what they say where it is not installed."""

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from penstock.cli.output import fail

DISTRIBUTION = "penstock-mesh"
OUR_PACKAGES = ("penstock", "services", "worker_service", "router_service", "planner_service", "judge_service")

_P = ParamSpec("_P")
_R = TypeVar("_R")


def needs_extra(command: str, extra: str) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Decorate `command`: where a package of `extra` is missing, it ends with status 2 and one line that names the extra.

    Such commands import what they need in their body, so that the others start without it.
    """

    def decorate(run: Callable[_P, _R]) -> Callable[_P, _R]:
        @functools.wraps(run)
        def checked(*arguments: _P.args, **options: _P.kwargs) -> _R:
            try:
                return run(*arguments, **options)
            except ModuleNotFoundError as error:
                package = (error.name or "").partition(".")[0]
                if package in OUR_PACKAGES:
                    raise  # a fault of ours: no extra would help
                needed = f'penstock {command} needs the {extra} extra: pip install "{DISTRIBUTION}[{extra}]"'
                fail(f"{needed} ({package} is not installed)", 2)

        return checked

    return decorate
