"""The examples in the docstrings of the SDK run against a mesh and give what they show, in both clients."""

import ast
import asyncio
import dataclasses
import doctest
import inspect
import io
import traceback
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest

from penstock import client as sdk
from penstock.client.connection import DEFAULT_TARGET
from tests.conftest import FAST
from tests.support.mesh import TestMesh
from tests.support.questions import replan_question

COMPUTED = ("plan_cascade", "plan_stages", "simulate_deployment")
"""Methods whose work is done in a process of the planner's, which takes seconds to start."""


def documented() -> dict[str, Any]:
    """The clients, and the public functions of the SDK, by name."""
    found = dict[str, Any]()
    for name in sdk.NAMES:
        value = getattr(sdk, name)
        if inspect.isfunction(value) or name.endswith("Client"):
            found[name] = value
        if inspect.isclass(value):
            found |= {f"{name}.{k}": f for k, f in vars(value).items() if inspect.isfunction(f) and k[0] != "_"}
    return found


DOCUMENTED = documented()


MESH = {
    "tiers": [
        {"name": "small", "model": "s", "threshold": 50, "simulated": FAST | {"overhead_ms": 2.0}},
        {"name": "large", "model": "l", "workers": 2, "simulated": FAST | {"overhead_ms": 2.0}},
    ],
    "router": {"kept_requests": 100, "sample_prompts": {"share": 1.0}},
}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] if n.endswith(COMPUTED) else []) for n in DOCUMENTED]
)
async def test_the_example_gives_what_it_shows(
    name: str, mesh: TestMesh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(replan_question(tmp_path, min_quality=75).parent)
    planner_address = mesh.parts["planner-0"].admin_address
    text = inspect.getdoc(DOCUMENTED[name]) or ""
    text = text.replace(DEFAULT_TARGET, mesh.router.address).replace("127.0.0.1:50054", planner_address)
    examples = doctest.DocTestParser().get_examples(text, name)
    assert examples, f"{name} has no example"
    names = {each: getattr(sdk, each) for each in sdk.NAMES} | {"Path": Path, "replace": dataclasses.replace}
    routers: dict[str, Any] = {"target": mesh.router.address, "admin": mesh.router.admin_address}
    async with sdk.AsyncClient(**routers) as client, sdk.AsyncPlannerClient(planner_address) as planner:
        with sdk.Client(**routers) as blocking, sdk.PlannerClient(planner_address) as blocking_planner:
            awaits = name.startswith("Async")
            names["client"], names["planner"] = (client, planner) if awaits else (blocking, blocking_planner)
            for example in examples:
                await run(example, names, in_thread=not awaits)


async def run(example: doctest.Example, names: dict[str, Any], *, in_thread: bool) -> None:
    """Run a piece of an example, which may await something at its top level; compare what it prints and raises."""
    code, raised = compile(example.source, "example", "single", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT), None
    with redirect_stdout(io.StringIO()) as printed:
        try:
            result = await asyncio.to_thread(eval, code, names) if in_thread else eval(code, names)
            if code.co_flags & inspect.CO_COROUTINE:
                await result
        except Exception as error:
            if example.exc_msg is None:
                raise
            raised = traceback.format_exception_only(error)[-1]
    assert (printed.getvalue(), raised) == ("" if raised else example.want, example.exc_msg), example.source
