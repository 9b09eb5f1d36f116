"""When the clients repeat a call: the table, the pauses, the budget. Pure, with a virtual clock."""

import heapq
import random
from typing import Any

import grpc
import pytest

from penstock import Options, OverloadedError, PenstockError, RetryPolicy, UnavailableError
from penstock.client import errors
from penstock.client.resumable import ResumableRequest, Routers
from penstock.client.retries import RetryBudget, is_retryable
from penstock.proto.common.v1 import common_pb2
from penstock.proto.router.v1 import router_pb2 as pb
from tests.support.failed_call import FailedCall

BROKEN = "Received RST_STREAM with error code 2"

ROWS = [
    # code, details, reason of our ErrorInfo, whether another attempt is made
    ("CANCELLED", "the server is stopping", "", True),
    ("UNKNOWN", "Stream removed", "", True),
    ("UNKNOWN", "Unexpected <class 'KeyError'>", "", False),
    ("INVALID_ARGUMENT", "sampling.seed: is odd", "INVALID_REQUEST", False),
    ("DEADLINE_EXCEEDED", "Deadline Exceeded", "", False),
    ("NOT_FOUND", "no tier 'huge'", "NOT_FOUND", False),
    ("ALREADY_EXISTS", "request 'r' is running already", "ALREADY_RUNNING", False),
    ("PERMISSION_DENIED", "", "", False),
    ("RESOURCE_EXHAUSTED", "512 are waiting; try again in 5.6 s", "OVERLOADED", True),
    ("RESOURCE_EXHAUSTED", "Concurrent RPC limit exceeded!", "", True),
    ("RESOURCE_EXHAUSTED", "SERVER: Received message larger than max (9 vs. 8)", "", False),
    ("FAILED_PRECONDITION", "two instances died of it", "POISON_REQUEST", False),
    ("FAILED_PRECONDITION", "its sampling failed", "REQUEST_FAILED", False),
    ("ABORTED", "expected revision 1", "REVISION_CONFLICT", False),
    ("OUT_OF_RANGE", "", "", False),
    ("UNIMPLEMENTED", "Method not found!", "", False),
    ("INTERNAL", BROKEN, "", True),
    ("INTERNAL", "internal error; the log has more", "", False),
    ("INTERNAL", f"said by a server of ours: {BROKEN}", "INTERNAL", False),
    ("UNAVAILABLE", "recvmsg:Connection reset by peer", "", True),
    ("UNAVAILABLE", "GOAWAY received", "", True),
    ("UNAVAILABLE", "this router is draining", "UNAVAILABLE", True),
    ("DATA_LOSS", "", "", False),
    ("UNAUTHENTICATED", "", "", False),
    ("OK", "", "", False),
]


@pytest.mark.parametrize(("code", "details", "reason", "again"), ROWS)
def test_each_row_of_the_table(code: str, details: str, reason: str, again: bool) -> None:
    failure = errors.from_rpc(FailedCall(grpc.StatusCode[code], details))
    failure.reason = failure.reason or reason
    assert is_retryable(failure) is again


def test_the_rows_name_every_status_code() -> None:
    assert set(grpc.StatusCode) == {grpc.StatusCode[code] for code, *_ in ROWS}


@pytest.mark.parametrize("hint_s", [0.0, 0.3, 5.6])
@pytest.mark.parametrize("drawn", [0.0, 0.5, 0.999])
def test_a_pause_is_at_least_the_hint_and_at_most_half_more_or_the_backoff(hint_s: float, drawn: float) -> None:
    """Full jitter: without a hint the pause is drawn from 0 to a bound that doubles up to the largest."""
    policy = RetryPolicy(initial_backoff_s=0.1, max_backoff_s=2.0, backoff_multiplier=2)
    for failures, bound_s in ((1, 0.1), (2, 0.2), (3, 0.4), (6, 2.0), (1000, 2.0)):
        pause_s = policy.pause_s(failures, hint_s, drawn)
        assert pause_s == pytest.approx(hint_s + drawn * max(bound_s, hint_s / 2))


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"attempts": 0}, "attempts"),
        ({"initial_backoff_s": 0}, "initial_backoff_s"),
        ({"initial_backoff_s": 2, "max_backoff_s": 1}, "max_backoff_s"),
        ({"max_backoff_s": float("nan")}, "max_backoff_s"),
        ({"backoff_multiplier": 0.5}, "backoff_multiplier"),
        ({"unavailable_timeout_s": -1}, "unavailable_timeout_s"),
        ({"retry_ratio": -1}, "retry_ratio"),
        ({"retries_per_s": 0}, "retries_per_s"),
    ],
)
def test_a_policy_that_makes_no_sense_names_its_field(fields: dict[str, float], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        RetryPolicy(**fields)  # type: ignore[arg-type]


def test_the_budget_allows_a_burst_then_a_rate_and_one_retry_for_each_answer() -> None:
    budget = RetryBudget(RetryPolicy(retries_per_s=2, retry_ratio=0.5))
    assert sum(budget.take(100.0) for _ in range(1000)) == 20  # ten seconds' worth
    assert [budget.take(100.4), budget.take(100.5), budget.take(100.5)] == [False, True, False]
    for _ in range(6):
        budget.answered()
    assert sum(budget.take(100.5) for _ in range(10)) == 3
    assert not budget.take(50.0), "a clock that is read late adds nothing"
    assert sum(budget.take(1e6) for _ in range(1000)) == 20


class Queue:
    """A router that answers `per_s` requests a second and lets `places` wait; `hint_s` is what it tells those it refuses."""

    def __init__(self, per_s: float, places: int, hint_s: float | None) -> None:
        self.per_s, self.places, self._hint_s = per_s, places, hint_s
        self.free_at_s = 0.0
        self.asked = 0

    def ask(self, now: float) -> float | OverloadedError:
        """When the answer is there, or the refusal."""
        self.asked += 1
        queue_s = max(0.0, self.free_at_s - now)
        if queue_s * self.per_s >= self.places:
            return OverloadedError("full", queue_s if self._hint_s is None else self._hint_s)
        self.free_at_s = max(now, self.free_at_s) + 1 / self.per_s
        return self.free_at_s


def finished() -> pb.GenerateResponse:
    return pb.GenerateResponse(finished=pb.Finished(tier="t", reason=common_pb2.FINISH_REASON_STOP))


def run(requests: list[ResumableRequest], ask: Any) -> tuple[int, list[PenstockError], float]:
    """Drive requests over virtual time from 0; return how many were answered, the errors, and when the last one ended."""
    answered, failed, now = 0, list[PenstockError](), 0.0
    agenda: list[tuple[float, int, bool]] = [(0.0, number, False) for number in range(len(requests))]
    while agenda:
        now, number, done = heapq.heappop(agenda)
        request = requests[number]
        if done:
            request.take(finished())
            answered += 1
            continue
        try:
            if (wait_s := request.wait_s(now)) > 0:
                heapq.heappush(agenda, (now + wait_s, number, False))
                continue
            request.message()
            outcome = ask(request.router, now)
            if isinstance(outcome, PenstockError):
                request.failed(outcome, now)
                heapq.heappush(agenda, (now, number, False))
            else:
                heapq.heappush(agenda, (outcome, number, True))
        except PenstockError as error:
            failed.append(error)
    return answered, failed, now


def calls(count: int, deadline_s: float, routers: int = 1, policy: RetryPolicy | None = None) -> list[ResumableRequest]:
    policy = policy or RetryPolicy()
    shared, budget, rng = Routers(routers), RetryBudget(policy), random.Random(7)
    return [ResumableRequest("hello", Options(), policy, shared, budget, deadline_s, rng) for _ in range(count)]


@pytest.mark.parametrize("hint_s", [None, 0.1, 0.0], ids=["true hint", "hint of 0.1 s", "no hint"])
def test_600_calls_outlast_a_queue_of_5_6_seconds(hint_s: float | None) -> None:
    """Calls with 60 s facing a queue 5.6 s long are all answered, whatever the hint, and the router is not stormed."""
    queue = Queue(per_s=50, places=280, hint_s=hint_s)
    answered, failed, ended_s = run(calls(600, 60.0), lambda _, now: queue.ask(now))
    assert (answered, failed) == (600, [])
    assert ended_s < 20, "12 s of work: the router was left idle"
    assert queue.asked < 3 * 600


def test_a_storm_of_retries_is_bounded_by_the_budget() -> None:
    """A thousand calls at a router that answers none: two tries each, then ten a second; each ends by itself."""
    asked: list[float] = []

    def refuse(_: int, now: float) -> OverloadedError:
        asked.append(now)
        return OverloadedError("full", 0.0)

    answered, failed, ended_s = run(calls(1000, 60.0), refuse)
    assert answered == 0
    assert len(failed) == 1000
    assert all(isinstance(error, OverloadedError) for error in failed)
    assert ended_s <= 60
    assert len(asked) <= 2 * 1000 + 100 + 10 * 60
    assert sum(1 for at in asked if 20 <= at < 40) <= 210


def test_a_router_that_refuses_is_left_for_another_at_once() -> None:
    """Its hint of a minute binds who has no other router; once both refused, the shorter hint is waited for."""
    asked: list[tuple[int, float]] = []

    def ask(router: int, now: float) -> float | OverloadedError:
        asked.append((router, now))
        return OverloadedError("full", (60.0, 2.0)[router]) if len(asked) < 3 else now

    assert run(calls(1, 100.0, routers=2), ask)[0] == 1
    assert [router for router, _ in asked] == [0, 1, 1]
    assert asked[1][1] <= 0.1
    assert 2.0 <= asked[2][1] <= 3.1


def test_no_call_waits_past_its_deadline_and_the_refusal_with_its_hint_is_what_it_ends_with() -> None:
    full = OverloadedError("full", 7.0)
    _, (failed,), ended_s = run(calls(1, 5.0), lambda *_: full)
    assert failed is full
    assert ended_s == 0, "the hint is past the deadline: nothing to wait for"
    (request,) = calls(1, 20.0)
    request.message()
    request.failed(full, 0.0)
    assert 7.0 <= request.wait_s(0.0) <= 10.5
    request.message()
    request.take(pb.GenerateResponse(heartbeat=pb.Heartbeat()))  # it was in the queue until its deadline
    with pytest.raises(OverloadedError) as caught:
        request.failed(errors.DeadlineError("late", code=grpc.StatusCode.DEADLINE_EXCEEDED), 20.0)
    assert caught.value.retry_after_s == 7.0


@pytest.mark.parametrize(("limit_s", "until_s"), [(3.0, 3.0), (None, 60.0)])
def test_a_mesh_that_nobody_can_reach_is_given_up_in_time(limit_s: float | None, until_s: float) -> None:
    def refuse(_: int, now: float) -> UnavailableError:
        return UnavailableError("connection refused", code=grpc.StatusCode.UNAVAILABLE)

    policy = RetryPolicy(unavailable_timeout_s=limit_s)
    _, (failed,), ended_s = run(calls(1, 60.0, policy=policy), refuse)
    assert isinstance(failed, UnavailableError)
    assert until_s - 5 <= ended_s <= until_s + 5


def test_a_number_of_attempts_can_be_set() -> None:
    asked: list[int] = []

    def refuse(router: int, now: float) -> UnavailableError:
        asked.append(router)
        return UnavailableError("away", code=grpc.StatusCode.UNAVAILABLE)

    run(calls(1, 60.0, routers=2, policy=RetryPolicy(attempts=3)), refuse)
    assert asked == [0, 1, 0]


def test_a_router_that_failed_many_requests_at_once_is_left_by_all_and_by_new_ones() -> None:
    requests = calls(100, 60.0, routers=3)
    for request in requests:
        request.message()
        request.failed(UnavailableError("died", code=grpc.StatusCode.UNAVAILABLE), 0.0)
    assert {request.router for request in requests} == {1}
    assert all(0 <= request.wait_s(0.0) <= 0.1 for request in requests)
    assert requests[0].routers.preferred == 1
