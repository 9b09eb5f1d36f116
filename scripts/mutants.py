"""Plant seeded mutations in modules and run the tests that should notice: `python -m scripts.mutants [NAME ...]`.

For each module of TARGETS, `--count` mutations are drawn by seed. Each is tried in a forked process, which imports the
module from its mutated syntax tree, so no file changes. A mutation is killed if a test fails twice in a row, or if the
tests take too much CPU time or wait too long. Time without a core does not count, so a busy machine
kills nothing. Survivors are listed; those in EQUIVALENT have a reason. Results of modules that are not tried are kept in
the file of results. Not part of CI: it runs the tests hundreds of times.
"""

import argparse
import ast
import importlib.abc
import importlib.machinery
import json
import os
import random
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from _pytest.runner import runtestprotocol
from hypothesis import Phase, settings

from benchmarks import report
from benchmarks.cpu_time import scheduled_s
from penstock.local.cpu_time import descendants, group_cpu_s
from scripts.mutations import Mutation, mutations

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "mutants.json"
LIMIT_FACTOR = 5.0  # a mutation may take so many times the CPU time, and the idle time, of the tests without one
MIN_LIMIT_S = 20.0
LOOK_EVERY_S = 1.0
NOT_MUTATED = 99  # exit status
PREIMPORTED = ("hypothesis", "pytest", "pytest_asyncio", "numpy", "torch", "transformers", "grpc")  # before forking

TIER_TESTS = (
    "tests/router/test_generation.py",
    "tests/router/test_slo_hops.py",
    "tests/router/test_escalation_drafts.py",
)
CASCADE_TESTS = (
    "tests/router/test_cascade_generation.py",
    "tests/router/test_requests.py",
    "tests/router/test_escalation_drafts.py",
    "tests/router/test_flagged_answers.py",
    "tests/router/test_slo_requests.py",
    "tests/router/test_skipped_tiers.py",
    "tests/router/test_best_answer.py",
)
TARGETS: dict[str, tuple[str, ...]] = {
    "worker_service/scheduling/blocks.py": ("tests/worker/test_blocks.py",),
    "worker_service/scheduling/batching.py": (
        "tests/worker/test_batching.py",
        "tests/worker/test_proposals.py",
    ),
    "worker_service/engine/core.py": (
        "tests/worker/test_core_laws.py",
        "tests/worker/test_proposals.py",
        "tests/worker/test_slo_engine.py",
        "tests/worker/test_failing_requests.py",
        "tests/worker/test_slo_admission.py",
    ),
    "services/domain/stages/bidding.py": ("tests/domain/test_bidding_laws.py", "tests/domain/test_bidding.py"),
    "router_service/admission/admission_queue.py": ("tests/router/test_admission_queue.py",),
    "router_service/admission/rules.py": ("tests/router/test_admission_queue.py",),
    "router_service/generation/cascade.py": (
        "tests/router/test_cascade.py",
        "tests/router/test_cascade_generation.py",
        "tests/router/test_flagged_answers.py",
    ),
    "router_service/generation/reply_assembler.py": ("tests/router/test_reply_assembler.py", *TIER_TESTS),
    "router_service/generation/tier_generation.py": TIER_TESTS,
    "router_service/generation/attempt.py": TIER_TESTS,
    "router_service/generation/cascade_generation.py": CASCADE_TESTS,
    "router_service/domain/failures.py": ("tests/router/test_failures.py",),
    "router_service/clients/circuit_breaker.py": ("tests/router/test_circuit_breaker.py",),
    "router_service/routing/instance_pool.py": (
        "tests/router/test_place_queue.py",
        "tests/router/test_drafting_status.py",
        "tests/router/test_lease_probe.py",
        *TIER_TESTS,
    ),
    "worker_service/migration/source.py": ("tests/worker/test_migration_machines.py",),
    "judge_service/scoring/guards.py": ("tests/judge/test_guards.py",),
}
"""Modules and the tests that should notice a fault in them, the quickest first."""

EQUIVALENT: dict[tuple[str, str], str] = {
    (
        "services/domain/stages/bidding.py",
        "Receiver.started: won.order < moving.order -> won.order <= moving.order",
    ): "orders are unique, and the request that starts is not queued",
    (
        "worker_service/scheduling/batching.py",
        "BatchScheduler._extend_for: missing > 0 -> missing >= 0",
    ): "no block is taken where none is missing",
    (
        "worker_service/engine/core.py",
        "EngineCore._row: [*sequence.tokens[sequence.prompt_tokens:end], *chunk.proposed] if sequence.sampling.penalizes "
        "else  -> [*sequence.tokens[sequence.prompt_tokens:end], *chunk.proposed]",
    ): "only rows with penalties are asked for their output",
    (
        "router_service/admission/rules.py",
        "AdmissionPlaces.enter: self.active + places <= self.max_active -> self.active + places < self.max_active",
    ): "a short way to the same result: by the queue it is admitted at once as well",
    (
        "router_service/routing/instance_pool.py",
        "InstancePool._in_flight: sent[-1][0] <= (heard_at_s := self.view.heard_at_s(instance_id)) -> "
        "sent[-1][0] < (heard_at_s := self.view.heard_at_s(instance_id))",
    ): "the loop counts no request of that instant either",
    (
        "router_service/routing/instance_pool.py",
        "InstancePool._in_flight: at_s <= heard_at_s -> at_s < heard_at_s",
    ): "they differ at one instant of a clock",
    (
        "router_service/routing/instance_pool.py",
        "InstancePool._candidate: self._known = {i: c for i, c in self._known.items() if self.view.find(i) is not None} "
        "-> pass",
    ): "records of those that have left are never read; it is memory that is given back",
    (
        "router_service/routing/instance_pool.py",
        "InstancePool._workers: self._candidates_version = self.view.version -> pass",
    ): "the same is built again each time",
    (
        "router_service/routing/instance_pool.py",
        "InstancePool._candidate: self._known_version = self.view.members_version -> pass",
    ): "the same is built again each time",
    (
        "router_service/domain/failures.py",
        "TryBudget.__init__: 0 -> 1",
    ): "one that is spent leaves none, as none does",
    (
        "worker_service/migration/source.py",
        "SourceState: 0 -> 1",
    ): "blocks are set when the target accepts, before they are read; the number of rounds is checked",
    (
        "router_service/generation/tier_generation.py",
        "TierGeneration._place: now >= deadline_s -> now > deadline_s",
    ): "they differ at one instant of a clock",
    (
        "router_service/generation/attempt.py",
        "SloHops._may_try: now_s - self._began_s <= self._limits.hop_time_s -> "
        "now_s - self._began_s < self._limits.hop_time_s",
    ): "they differ at one instant of a clock",
    (
        "router_service/generation/tier_generation.py",
        "TierGeneration._place: now >= give_up_at -> now > give_up_at",
    ): "they differ at one instant of a clock",
    (
        "router_service/generation/cascade_generation.py",
        "CascadeGeneration._promise: request.resume is not None and resumed -> request.resume is not None or resumed",
    ): "the text counts only where tokens are resumed",
}
"""(module, mutation) -> why no test can notice it."""


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


@dataclass(frozen=True, slots=True)
class Limits:
    """CPU time that the tests of a module may use, and time that they may spend waiting, in seconds."""

    cpu_s: float
    idle_s: float


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run of tests ended.

    failed: the first test that failed, or the limit that was passed; None if all tests pass. idle_s: neither on a core nor
    ready to run.
    """

    failed: str | None
    cpu_s: float
    idle_s: float


class _FailureWriter:
    """A plugin of pytest that runs a failed test again, and writes the names of those that fail twice to a pipe.

    Once may be chance: a test's own time limit on a busy machine.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def pytest_configure(self) -> None:
        """That an example fails is enough: the smallest one is not searched for."""
        phases = (Phase.explicit, Phase.reuse, Phase.generate)
        settings.register_profile("mutants", settings.get_profile("tests"), phases=phases)
        settings.load_profile("mutants")

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> bool:
        reports = runtestprotocol(item, log=False, nextitem=nextitem)
        if any(report.failed for report in reports):
            item._initrequest()  # type: ignore[attr-defined]  # as pytest-rerunfailures does: fixtures start again
            reports = runtestprotocol(item, log=False, nextitem=nextitem)
        for phase in reports:
            item.ihook.pytest_runtest_logreport(report=phase)
        return True

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self.pytest_runtest_logreport(report)

    def pytest_runtest_logreport(self, report: pytest.CollectReport | pytest.TestReport) -> None:
        if report.failed:
            os.write(self._descriptor, f"{report.nodeid}\n".encode())


def run_tests(target: str, tree: ast.Module | None, tests: Sequence[str], limits: Limits) -> Outcome:
    """Run tests in a forked process with a module replaced by a tree."""
    readable, writable = os.pipe()
    child = os.fork()
    if not child:
        os.setsid()
        null = os.open(os.devnull, os.O_RDWR)
        for descriptor in (1, 2) if "MUTANTS_OUTPUT" not in os.environ else ():
            os.dup2(null, descriptor)
        if tree is not None:
            name = f"penstock.{target.removesuffix('.py').replace('/', '.')}"
            if name in sys.modules:
                os._exit(NOT_MUTATED)
            sys.meta_path.insert(0, MutatedModule(name, ROOT / target, tree))
        options = ["-x", "-q", "-p", "no:cacheprovider"]
        os._exit(pytest.main([*options, *tests], plugins=[_FailureWriter(writable)]))
    os.close(writable)
    usage = _Usage(child)
    while not (passed_limit := usage.passed(limits)) and not _ends_within(child, LOOK_EVERY_S):
        pass
    usage.look()  # before its end is taken note of: a process that is gone has no times
    _end_group(child)
    status = os.waitpid(child, 0)[1]
    with os.fdopen(readable) as pipe:
        failures = pipe.read().split("\n")
    if os.waitstatus_to_exitcode(status) == NOT_MUTATED:
        raise RuntimeError(f"{target} was imported before it could be mutated")
    failed = passed_limit
    if failed is None and os.waitstatus_to_exitcode(status):
        failed = failures[0] or f"exit status {os.waitstatus_to_exitcode(status)}"
    return Outcome(failed, usage.cpu_s, usage.idle_s)


def _ends_within(child: int, seconds: float) -> bool:
    """Wait for the end of a child, which stays a zombie."""
    until_s = time.monotonic() + seconds
    while os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        if time.monotonic() >= until_s:
            return False
        time.sleep(0.05)
    return True


class _Usage:
    """What a process and those below it have used so far."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._at_s, self._busy_s = time.monotonic(), 0.0
        self.cpu_s = self.idle_s = 0.0

    def look(self) -> None:
        """Measure again."""
        at_s = time.monotonic()
        busy_s = sum(
            ran_s + waited_s
            for pid in (self._pid, *descendants(self._pid))
            for ran_s, waited_s in scheduled_s(pid).values()
        )
        # Threads and processes that have ended take their times with them: `busy_s` may fall.
        self.idle_s += max(at_s - self._at_s - max(busy_s - self._busy_s, 0.0), 0.0)
        self.cpu_s = max(self.cpu_s, group_cpu_s([self._pid]))
        self._at_s, self._busy_s = at_s, busy_s

    def passed(self, limits: Limits) -> str | None:
        """The limit that it has passed."""
        self.look()
        if self.cpu_s > limits.cpu_s:
            return f"CPU time over {limits.cpu_s:.0f} s"
        return f"idle for over {limits.idle_s:.0f} s" if self.idle_s > limits.idle_s else None


def _end_group(child: int) -> None:
    """End a child and the processes that its tests started."""
    try:
        os.killpg(child, signal.SIGKILL)
    except ProcessLookupError:
        return


def try_target(target: str, count: int, seed: int) -> dict[str, object]:
    """Try mutations of one module; return its figures."""
    tests = TARGETS[target]
    usual = run_tests(target, None, tests, Limits(600.0, 600.0))
    if usual.failed:
        sys.exit(f"{target}: {usual.failed} fails without a mutation")
    limits = Limits(max(MIN_LIMIT_S, LIMIT_FACTOR * usual.cpu_s), max(MIN_LIMIT_S, LIMIT_FACTOR * usual.idle_s))
    candidates = mutations(ast.parse((ROOT / target).read_text()))
    drawn = random.Random(f"{seed} {target}").sample(candidates, len(candidates))[:count]  # more begin with the same
    survivors = list[Mutation]()
    for mutation, tree in sorted(drawn, key=lambda pair: pair[0].index):
        if run_tests(target, tree, tests, limits).failed is None:
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


def write_results(modules: dict[str, dict[str, Any]], count: int, seed: int) -> tuple[int, int]:
    """Write the figures of modules, in the order of TARGETS, and return (mutations tried, killed) of all."""
    ordered = [modules[target] for target in TARGETS if target in modules]
    tried, killed = (sum(module[key] for module in ordered) for key in ("tried", "killed"))
    report.write("mutants", {"seed": seed, "count": count, "tried": tried, "killed": killed, "modules": ordered})
    return tried, killed


def earlier_results(count: int, seed: int) -> dict[str, dict[str, Any]]:
    """The published figures by module, if they are of the same seed and count."""
    if not RESULTS.exists():
        return {}
    published = json.loads(RESULTS.read_text())
    if (published["count"], published["seed"]) != (count, seed):
        return {}
    return {module["module"]: module for module in published["modules"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="parts of module paths; default: all")
    parser.add_argument("--count", type=int, default=12, help="mutations of each module")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    os.chdir(ROOT)
    for name in PREIMPORTED:
        __import__(name)
    chosen = [target for target in TARGETS if not args.names or any(name in target for name in args.names)]
    if not chosen:
        parser.error(f"no module matches {', '.join(args.names)}; there are {', '.join(TARGETS)}")
    modules = earlier_results(args.count, args.seed)
    for target in chosen:
        modules[target] = try_target(target, args.count, args.seed)
        tried, killed = write_results(modules, args.count, args.seed)  # after each module: a run takes long
    print(f"{killed} of {tried} killed")


if __name__ == "__main__":
    main()
