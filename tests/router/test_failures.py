"""The table of failures, row by row: pure."""

import pytest

from penstock.router_service.domain.failures import (
    MAX_EJECTIONS,
    Cost,
    Ejection,
    Failure,
    FailureHistory,
    InstanceFailed,
    TryBudget,
    classify,
)
from penstock.services.domain.errors import (
    AlreadyRunning,
    DeadlineExceeded,
    InstanceDraining,
    InternalError,
    MessageTooLarge,
    NotFound,
    NotServed,
    Overloaded,
    PenstockError,
    PoisonRequest,
    PromptTooLong,
    RequestFailed,
    RevisionConflict,
    Unavailable,
    invalid,
)
from penstock.types.requests import PROGRESS_TOKENS

NEVER, REPEATED, BOUNDED, ALWAYS = Ejection.NEVER, Ejection.REPEATED, Ejection.BOUNDED, Ejection.ALWAYS
ATTEMPT, REFUSAL, END = Cost.ATTEMPT, Cost.REFUSAL, Cost.END
ITSELF, UNAVAILABLE = True, False

ROWS = [
    # what the router meets                                    row                         ejects    costs    client gets
    (InstanceFailed(Failure.CONNECT_FAILED, ""), Failure.CONNECT_FAILED, ALWAYS, ATTEMPT, UNAVAILABLE),
    (InstanceFailed(Failure.INSTANCE_DIED, ""), Failure.INSTANCE_DIED, BOUNDED, ATTEMPT, UNAVAILABLE),
    (InstanceFailed(Failure.CALL_BROKEN, ""), Failure.CALL_BROKEN, NEVER, REFUSAL, UNAVAILABLE),
    (InstanceFailed(Failure.SILENT, ""), Failure.SILENT, BOUNDED, ATTEMPT, UNAVAILABLE),
    (InstanceFailed(Failure.PROTOCOL_ERROR, ""), Failure.PROTOCOL_ERROR, REPEATED, ATTEMPT, UNAVAILABLE),
    (InstanceFailed(Failure.ABORTED, ""), Failure.ABORTED, NEVER, ATTEMPT, UNAVAILABLE),
    (InstanceDraining(""), Failure.DRAINING, ALWAYS, REFUSAL, UNAVAILABLE),
    (Overloaded("", 1.0), Failure.FULL, NEVER, REFUSAL, ITSELF),
    (AlreadyRunning("r"), Failure.DUPLICATE_ID, NEVER, ATTEMPT, ITSELF),
    (NotFound("transfer", "t"), Failure.NOT_FOUND, NEVER, ATTEMPT, UNAVAILABLE),
    (InternalError(""), Failure.INTERNAL, REPEATED, ATTEMPT, UNAVAILABLE),
    (Unavailable("SGLang is away"), Failure.ENGINE_UNAVAILABLE, BOUNDED, ATTEMPT, UNAVAILABLE),
    (invalid("prompt", ""), Failure.INVALID_REQUEST, NEVER, END, ITSELF),
    (PromptTooLong.by("prompt", 2, 1), Failure.PROMPT_TOO_LONG, NEVER, END, ITSELF),
    (MessageTooLarge.by("prompt", 2, 1), Failure.MESSAGE_TOO_LARGE, NEVER, END, ITSELF),
    (RequestFailed(""), Failure.REQUEST_FAILED, NEVER, END, ITSELF),
    (PoisonRequest(2), Failure.REQUEST_FAILED, NEVER, END, ITSELF),
    (RevisionConflict(1, 2), Failure.REQUEST_FAILED, NEVER, END, ITSELF),
    (NotServed(""), Failure.NOT_SERVED, NEVER, END, ITSELF),
    (DeadlineExceeded(""), Failure.DEADLINE_EXCEEDED, NEVER, END, ITSELF),
]


@pytest.mark.parametrize(
    ("error", "failure", "ejection", "cost", "shown"),
    ROWS,
    ids=[f"{type(r[0]).__name__}-{r[1].value}" for r in ROWS],
)
def test_each_failure_ejects_costs_and_gives_the_client_what_its_row_says(
    error: PenstockError, failure: Failure, ejection: Ejection, cost: Cost, shown: bool
) -> None:
    assert classify(error) is failure
    rule = failure.rule
    assert (rule.ejection, rule.cost, rule.shown) == (ejection, cost, shown)
    assert rule.death == (failure is Failure.INSTANCE_DIED)


def test_every_failure_has_a_case() -> None:
    assert {row[1] for row in ROWS} | {Failure.INSTANCE_LEFT} == set(Failure)


def test_an_instance_that_was_leaving_did_not_die_of_the_request() -> None:
    died = InstanceFailed(Failure.INSTANCE_DIED, "")
    assert classify(died, leaving=True) is Failure.INSTANCE_LEFT
    assert classify(InstanceFailed(Failure.SILENT, ""), leaving=True) is Failure.SILENT
    rule = Failure.INSTANCE_LEFT.rule
    assert (rule.ejection, rule.cost, rule.shown, rule.death) == (ALWAYS, ATTEMPT, UNAVAILABLE, False)


def test_two_deaths_make_a_request_poisonous_and_nothing_else_does() -> None:
    for failure in Failure:
        history = FailureHistory()
        history.record(failure, "a", 0)
        assert not history.is_poisonous(2), failure
        history.record(failure, "b", 0)
        assert history.is_poisonous(2) == (failure is Failure.INSTANCE_DIED), failure


def test_a_death_is_not_charged_to_a_reply_that_ran_well_there() -> None:
    history = FailureHistory()
    for i in range(5):
        history.record(Failure.INSTANCE_DIED, f"w{i}", PROGRESS_TOKENS)
    assert history.deaths == 0
    history.record(Failure.INSTANCE_DIED, "w", PROGRESS_TOKENS - 1)
    assert history.deaths == 1


def test_one_request_ejects_at_most_two_instances_by_what_it_may_have_caused() -> None:
    history = FailureHistory()
    ejected = [history.record(Failure.SILENT, f"w{i}", 0) for i in range(MAX_EJECTIONS + 2)]
    assert ejected == [ALWAYS] * MAX_EJECTIONS + [NEVER] * 2
    assert history.record(Failure.ENGINE_UNAVAILABLE, "w0", 0) is ALWAYS, "the same instance again"
    assert history.record(Failure.CONNECT_FAILED, "w9", 0) is ALWAYS, "no request can cause that"


def test_attempts_and_refusals_are_counted_apart() -> None:
    budget = TryBudget(attempts=2, refusals=3)
    assert [budget.spend(Failure.FULL), budget.spend(Failure.DRAINING)] == [True, True]
    assert budget.spend(Failure.SILENT)
    assert not budget.spend(Failure.SILENT), "two attempts"
    assert not budget.spend(Failure.CALL_BROKEN), "three refusals"
    assert not TryBudget(9, 9).spend(Failure.INVALID_REQUEST)


def test_a_failure_that_the_router_detects_tells_its_kind_and_its_reason() -> None:
    error = InstanceFailed(Failure.SILENT, "nothing for 30 s")
    assert (error.failure, str(error)) == (Failure.SILENT, "nothing for 30 s")
