"""A circuit breaker: closed, open, half-open."""

import pytest

from penstock.router_service.clients.circuit_breaker import FAILURES_TO_OPEN, MAX_OPEN_S, CircuitBreaker


def opened(now_s: float = 0.0) -> CircuitBreaker:
    breaker = CircuitBreaker(1.0)
    for _ in range(FAILURES_TO_OPEN):
        assert breaker.allows(now_s)
        breaker.passed()
        breaker.failed(now_s)
    return breaker


def test_it_opens_after_failures_in_a_row() -> None:
    assert not opened().allows(0.999)
    breaker = CircuitBreaker(1.0)
    for _ in range(10):  # two failures, then an answer: never three in a row
        for _ in range(2):
            breaker.passed()
            breaker.failed(0.0)
        breaker.passed()
        breaker.succeeded()
    assert breaker.allows(0.0)


def test_half_open_one_call_decides() -> None:
    breaker = opened()
    assert breaker.allows(1.0)
    breaker.passed()
    assert not breaker.allows(1.0)  # one, not two
    breaker.succeeded()
    assert breaker.allows(1.0)


def test_a_failed_probe_doubles_the_time_up_to_the_limit() -> None:
    breaker, now_s, pauses = opened(), 0.0, list[float]()
    for _ in range(6):
        began_s = now_s
        while not breaker.allows(now_s):
            now_s += 0.125
        pauses.append(now_s - began_s)
        breaker.passed()
        breaker.failed(now_s)
    assert pauses == [1.0, 2.0, 4.0, 8.0, MAX_OPEN_S, MAX_OPEN_S]


@pytest.mark.parametrize(("hint_s", "open_s"), [(0.25, 0.25), (60.0, MAX_OPEN_S), (-1.0, 0.0)])
def test_a_refusal_opens_it_until_the_time_that_it_names(hint_s: float, open_s: float) -> None:
    breaker = CircuitBreaker(1.0)
    breaker.passed()
    breaker.refused(10.0, hint_s)
    assert breaker.allows(10.0 + open_s)
    assert open_s == 0 or not breaker.allows(10.0 + open_s - 0.01)


def test_a_probe_whose_caller_goes_away_decides_nothing() -> None:
    """Another one may try."""
    breaker = opened()
    breaker.passed()
    breaker.ended()
    assert breaker.allows(1.0)


def test_failures_and_doublings_are_counted_from_the_last_success() -> None:
    """Also those of calls that were sent before it, while the breaker was closed."""
    breaker = CircuitBreaker(1.0)
    for _ in range(2):  # the same again after a success
        for _ in range(2):
            breaker.failed(0.0)
            assert breaker.allows(0.0)
        breaker.failed(0.0)
        assert not breaker.allows(0.9)
        assert breaker.allows(1.0)
        breaker.passed()
        breaker.failed(1.0)
        assert not breaker.allows(2.9)
        assert breaker.allows(3.0)
        breaker.passed()
        breaker.succeeded()
