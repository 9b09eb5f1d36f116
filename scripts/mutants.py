"""Plant seeded mutations in modules and run the tests that should notice: `python -m scripts.mutants [NAME ...]`.

For each module of TARGETS, `--count` mutations are drawn by seed. Each is tried in a forked process, which imports the module
from its mutated syntax tree, so no file changes. A mutation is killed if a test fails or the tests take too long. Survivors
are listed; those in EQUIVALENT have a reason. Not part of CI: it runs the tests hundreds of times.
"""

import argparse
import ast
import copy
import importlib.abc
import importlib.machinery
import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "mutants.json"
LIMIT_FACTOR = 5.0  # a mutant may take so many times the time of the tests without a mutation
MIN_LIMIT_S = 30.0
PREIMPORTED = ("hypothesis", "pytest", "pytest_asyncio", "numpy", "torch", "transformers", "grpc")  # before forking

GENERATION_TESTS = ("tests/router/test_generation.py", "tests/router/test_flagged_answers.py")
TARGETS: dict[str, tuple[str, ...]] = {
    "worker_service/scheduling/blocks.py": ("tests/worker/test_blocks_laws.py", "tests/worker/test_blocks.py"),
    "worker_service/scheduling/batching.py": ("tests/worker/test_batching_laws.py", "tests/worker/test_batching.py"),
    "worker_service/engine/core.py": (
        "tests/worker/test_core_laws.py",
        "tests/worker/test_slo_engine.py",
        "tests/worker/test_loop_engine.py",
        "tests/worker/test_failing_requests.py",
    ),
    "services/domain/stages/bidding.py": ("tests/domain/test_bidding_laws.py", "tests/domain/test_bidding.py"),
    "router_service/admission/admission_queue.py": ("tests/router/test_admission_queue.py",),
    "router_service/admission/rules.py": ("tests/router/test_admission.py", "tests/router/test_admission_queue.py"),
    "router_service/generation/cascade.py": ("tests/router/test_cascade.py", "tests/router/test_flagged_answers.py"),
    "router_service/generation/reply_assembler.py": GENERATION_TESTS,
    "router_service/generation/tier_generation.py": GENERATION_TESTS,
    "router_service/generation/attempt.py": GENERATION_TESTS,
    "router_service/generation/cascade_generation.py": GENERATION_TESTS,
}
"""Modules and the tests that should notice a fault in them, the quickest first."""

EQUIVALENT: dict[tuple[str, str], str] = {
    (
        "services/domain/stages/bidding.py",
        "Receiver.started: won.order < moving.order -> won.order <= moving.order",
    ): "orders are unique, and the request that starts is not queued",
}
"""(module, mutation) -> why no test can notice it."""


@dataclass(frozen=True, slots=True)
class Mutation:
    """index: of the candidate in the module. description: `function: before -> after`."""

    index: int
    line: int
    description: str


Replacement = Callable[[], ast.AST]

_COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
_OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
}
_CALLS = {"min": "max", "max": "min", "any": "all", "all": "any"}


def alternatives(node: ast.AST) -> Iterator[ast.AST]:
    """Wrong versions of a node."""
    match node:
        case ast.Compare(ops=[operator]) if type(operator) in _COMPARISONS:
            changed = copy.deepcopy(node)
            changed.ops = [_COMPARISONS[type(operator)]()]
            yield changed
        case ast.BoolOp():
            changed_op = copy.deepcopy(node)
            changed_op.op = ast.Or() if isinstance(node.op, ast.And) else ast.And()
            yield changed_op
        case ast.UnaryOp(op=ast.Not()):
            yield copy.deepcopy(node.operand)
        case ast.BinOp(op=operator) if type(operator) in _OPERATORS:
            changed_sum = copy.deepcopy(node)
            changed_sum.op = _OPERATORS[type(operator)]()
            yield changed_sum
        case ast.Call(func=ast.Name(id=name)) if name in _CALLS:
            changed_call = copy.deepcopy(node)
            changed_call.func = ast.Name(_CALLS[name], ast.Load())
            yield changed_call
        case ast.Constant(value=bool(value)):
            yield ast.Constant(not value)
        case ast.Constant(value=int(value)) if value in (0, 1):
            yield ast.Constant(1 - value)
        case ast.IfExp():
            yield copy.deepcopy(node.body)
            yield copy.deepcopy(node.orelse)
        case ast.Continue():
            yield ast.Break()
        case ast.Raise() | ast.AugAssign() | ast.Delete():
            yield ast.Pass()
        case ast.Expr(value=ast.Call() | ast.Await()):
            yield ast.Pass()
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
            yield ast.Pass()
        case ast.If():
            changed_if = copy.deepcopy(node)
            changed_if.test = ast.Constant(False)
            yield changed_if


def mutations(tree: ast.Module) -> list[tuple[Mutation, ast.Module]]:
    """All candidates of a module, with the whole mutated tree of each."""
    results: list[tuple[Mutation, ast.Module]] = []
    places = [*_places(tree)]
    for function, parent, name, position in places:
        node = getattr(parent, name) if position is None else getattr(parent, name)[position]
        for replacement in alternatives(node):
            ast.copy_location(replacement, node)
            _put(parent, name, position, replacement)
            mutated = ast.fix_missing_locations(copy.deepcopy(tree))
            _put(parent, name, position, node)
            before, after = (" ".join(ast.unparse(n).split())[:100] for n in (node, replacement))
            results.append((Mutation(len(results), node.lineno, f"{function}: {before} -> {after}"), mutated))
    return results


def _put(parent: ast.AST, name: str, position: int | None, node: ast.AST) -> None:
    if position is None:
        setattr(parent, name, node)
    else:
        getattr(parent, name)[position] = node


def _places(tree: ast.Module) -> Iterator[tuple[str, ast.AST, str, int | None]]:
    """(function, parent, field, position) of every statement and expression inside functions, but assertions and docs."""

    def inside(function: str, parent: ast.AST) -> Iterator[tuple[str, ast.AST, str, int | None]]:
        for name, value in ast.iter_fields(parent):
            if name in ("decorator_list", "annotation", "returns", "args", "format_spec"):
                continue
            children = value if isinstance(value, list) else [value]
            for position, child in enumerate(children):
                if not isinstance(child, ast.AST) or isinstance(child, ast.Assert | ast.JoinedStr):
                    continue
                if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                    yield from inside(".".join(filter(None, (function, child.name))), child)
                    continue
                if function:
                    yield function, parent, name, position if isinstance(value, list) else None
                yield from inside(function, child)

    yield from inside("", tree)


class MutatedModule(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports one module from a syntax tree."""

    def __init__(self, name: str, path: Path, tree: ast.Module) -> None:
        self._name, self._path, self._tree = name, path, tree

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self._name:
            return None
        spec = importlib.machinery.ModuleSpec(fullname, self, origin=str(self._path))
        spec.has_location = True
        return spec

    def exec_module(self, module: ModuleType) -> None:
        exec(compile(self._tree, str(self._path), "exec"), module.__dict__)


def run_tests(target: str, tree: ast.Module | None, tests: Sequence[str], limit_s: float) -> tuple[bool, float]:
    """(whether all tests pass, seconds) with a module replaced by a tree, in a forked process."""
    began = time.monotonic()
    child = os.fork()
    if not child:
        os.setsid()
        null = os.open(os.devnull, os.O_RDWR)
        for descriptor in (1, 2) if "MUTANTS_OUTPUT" not in os.environ else ():
            os.dup2(null, descriptor)
        if tree is not None:
            name = target.removesuffix(".py").replace("/", ".")
            sys.meta_path.insert(0, MutatedModule(name, ROOT / target, tree))
        import pytest

        os._exit(pytest.main(["-x", "-q", "-p", "no:cacheprovider", *tests]))
    while time.monotonic() - began < limit_s:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            _end_group(child)
            return os.waitstatus_to_exitcode(status) == 0, time.monotonic() - began
        time.sleep(0.05)
    _end_group(child)
    os.waitpid(child, 0)
    return False, time.monotonic() - began


def _end_group(child: int) -> None:
    """End a child and the processes that its tests started."""
    try:
        os.killpg(child, signal.SIGKILL)
    except ProcessLookupError:
        return


def try_target(target: str, count: int, seed: int) -> dict[str, object]:
    """Try mutations of one module; return its figures."""
    tests = [test for test in TARGETS[target] if (ROOT / test).exists()]
    passes, usual_s = run_tests(target, None, tests, 600.0)
    if not passes:
        sys.exit(f"{target}: {', '.join(tests)} fail without a mutation")
    candidates = mutations(ast.parse((ROOT / target).read_text()))
    drawn = random.Random(f"{seed} {target}").sample(candidates, min(count, len(candidates)))
    limit_s, survivors = max(MIN_LIMIT_S, LIMIT_FACTOR * usual_s), list[Mutation]()
    for mutation, tree in sorted(drawn, key=lambda pair: pair[0].index):
        if run_tests(target, tree, tests, limit_s)[0]:
            survivors.append(mutation)
            reason = EQUIVALENT.get((target, mutation.description), "")
            print(
                f"  {target}:{mutation.line}: survived: {mutation.description}{f' ({reason})' if reason else ''}",
                flush=True,
            )
    killed = len(drawn) - len(survivors)
    print(f"{target}: {killed} of {len(drawn)} killed ({len(candidates)} candidates)", flush=True)
    return {
        "module": target,
        "candidates": len(candidates),
        "tried": len(drawn),
        "killed": killed,
        "survivors": [asdict(m) | {"reason": EQUIVALENT.get((target, m.description), "")} for m in survivors],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="parts of module paths; default: all")
    parser.add_argument("--count", type=int, default=25, help="mutations of each module")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    os.chdir(ROOT)
    for name in PREIMPORTED:
        __import__(name)
    chosen = [target for target in TARGETS if not args.names or any(name in target for name in args.names)]
    if not chosen:
        parser.error(f"no module matches {', '.join(args.names)}; there are {', '.join(TARGETS)}")
    modules: list[dict[str, object]] = []
    for target in chosen:
        modules.append(try_target(target, args.count, args.seed))
        tried, killed = (sum(int(str(module[key])) for module in modules) for key in ("tried", "killed"))
        result = {"seed": args.seed, "count": args.count, "tried": tried, "killed": killed, "modules": modules}
        args.out.write_text(json.dumps(result, indent=1) + "\n")  # after each module: a run takes long
    print(f"{killed} of {tried} killed")


if __name__ == "__main__":
    main()
