"""A reply that outlives its prediction is predicted again: admission counts with what replies as long as it still have."""

import pytest

from penstock.services.domain.latency import StepLatencyModel
from penstock.services.domain.slo.compiled.layout import Kv, step_model
from penstock.services.domain.slo.compiled.table import RequestTable, TableRequest, decide
from penstock.services.domain.slo.reply_length import ReplyLengths
from penstock.types.slo import SloClass
from penstock.worker_service.scheduling.sequence import SequenceSlo

LATENCY = StepLatencyModel.linear(0.01, 1e-4, 0.0)
MODEL = step_model(LATENCY, 64)
KV = Kv(90.0, 0)


def running(again_tokens: int) -> RequestTable:
    """A table with one reply, predicted to have two tokens more."""
    table = RequestTable()
    request = TableRequest(
        "a", 1, 2, due_s=1.0, tpot_s=1.0, context_tokens=10, decoding=True, again_tokens=again_tokens
    )
    table.append(request, SloClass.STANDARD)
    return table


def step(table: RequestTable, now_s: float) -> float:
    end_s = now_s + table.plan(now_s, MODEL, KV)
    table.commit(end_s)
    return end_s


def admits(table: RequestTable, now_s: float, *, planned: bool = False) -> bool:
    """Whether a request whose 70 tokens have room next to a short reply, but not next to a long one, is admitted."""
    new = TableRequest("b", 10, 60, due_s=now_s + 10.0, tpot_s=1.0)
    snapshot = table.snapshot(planned=planned, end_s=now_s)
    return decide(now_s, snapshot, [new], MODEL, KV).admitted[0]


@pytest.mark.parametrize("again_tokens", [0, 50])
def test_a_request_has_no_room_next_to_a_reply_that_is_predicted_to_continue(again_tokens: int) -> None:
    table = running(again_tokens)
    assert admits(table, 0.0)  # it is predicted to end with the second token
    now_s = step(table, 0.0)
    end_s = now_s + table.plan(now_s, MODEL, KV)
    assert admits(table, end_s, planned=True) is (again_tokens == 0)
    table.commit(end_s)
    assert admits(table, end_s) is (again_tokens == 0)  # it has not ended
    for _ in range(3):
        end_s = step(table, end_s)
    assert admits(table, end_s) is (again_tokens == 0)


def test_a_sequence_is_predicted_again_each_time() -> None:
    slo = SequenceSlo(1.0, output_tokens=10, again_tokens=4)
    assert [slo.left_tokens(produced) for produced in (0, 9, 10, 11, 13, 14, 17, 18)] == [10, 1, 4, 3, 1, 4, 1, 4]
    assert [SequenceSlo(1.0, output_tokens=10).left_tokens(produced) for produced in (9, 10, 30)] == [1, 1, 1]


def test_the_next_prediction_is_that_of_the_replies_that_were_longer() -> None:
    replies = ReplyLengths(0.9)
    for tokens in range(1, 401):
        replies.add(tokens)
    assert replies.predict(0, 1000) == 361
    assert replies.predict_after(361, 1000) == replies.predict(361, 1000) - 361 == 36
    assert replies.predict_after(361, 380) == 19
    assert replies.predict_after(200, 200) == 0
