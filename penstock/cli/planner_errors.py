"""Errors of the planner, as commands that run it without a mesh report them."""

import math
from collections.abc import Iterator
from contextlib import contextmanager

from penstock.cli.output import fail, print_json


@contextmanager
def planner_error_handling(*, json: bool = False) -> Iterator[None]:
    """End the command with one line on an error of the planner: status 2 for bad input, 3 if no plan meets the target.

    json: then also say on standard output which target binds, and the nearest that can be had.
    """
    from penstock.planner_service.files import FileError
    from penstock.planner_service.routing.solution import Unreachable
    from penstock.services.domain.errors import InvalidRequest

    try:
        yield
    except (FileError, InvalidRequest) as error:
        fail(str(error), 2)
    except Unreachable as error:
        if json:
            known = math.isfinite(error.best)
            nearest = {error.binds.value: error.best} if known and error.binds.value != "gpus" else None
            print_json({"feasible": False, "binds": error.binds.value, "nearest": nearest, "reason": str(error)})
        fail(str(error), 3)
