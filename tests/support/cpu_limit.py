"""`--cpu-limit SECONDS`: name, at the end of the run, tests that use more CPU time than that and lack the mark `slow`.

The time of a test is that of its set-up, call and teardown, in its own process and in those that it has waited for. What a
fixture of a whole module starts counts for the test that ends it; fixtures of the whole session count for none.
Nothing fails by it: CPU time varies, if less than time.
"""

import resource
from collections.abc import Generator
from typing import Any

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--cpu-limit",
        type=float,
        metavar="SECONDS",
        help="name the tests that take more CPU time than this and are not marked slow",
    )


def pytest_configure(config: pytest.Config) -> None:
    limit_s: float | None = config.getoption("--cpu-limit")
    if limit_s is not None:
        config.pluginmanager.register(CpuLimit(limit_s))


class CpuLimit:
    """Measures where tests run, reports where results are collected: with pytest-xdist, in different processes."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._began_s = self._called_s = 0.0
        self._last = False
        self._over_s = dict[str, float]()

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, Any, Any]:
        self._began_s = self._called_s = _cpu_s()
        self._last = nextitem is None
        return (yield)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef[Any]) -> Generator[None, Any, Any]:
        began_s = _cpu_s()
        try:
            return (yield)
        finally:
            if fixturedef.scope == "session":
                self._began_s += _cpu_s() - began_s

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> None:
        if call.when == "call":
            self._called_s = _cpu_s()
        if call.when == "teardown" and item.get_closest_marker("slow") is None:
            ended_s = (
                self._called_s if self._last else _cpu_s()
            )  # what the whole session has started ends with the last test
            item.user_properties.append(("cpu_s", ended_s - self._began_s))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        for name, value in report.user_properties:
            if name == "cpu_s" and isinstance(value, float) and value > self._limit_s:
                self._over_s[report.nodeid] = value

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self._over_s:
            terminalreporter.section(f"more than {self._limit_s:g} s of CPU time without the mark slow")
            for test, taken_s in sorted(self._over_s.items(), key=lambda item: -item[1]):
                terminalreporter.line(f"{taken_s:6.1f} s {test}")


def _cpu_s() -> float:
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)
