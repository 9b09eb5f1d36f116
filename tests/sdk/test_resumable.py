"""What a client sends after a failed attempt, and what silence means to it: pure."""

import random
from typing import Any

import pytest

from penstock import Accepted, Finished, Options, RetryPolicy, UnavailableError
from penstock.client import errors, messages
from penstock.client.resumable import ResumableRequest, Routers
from penstock.client.retries import RetryBudget
from penstock.client.silence import SilenceWatch
from penstock.mapper import duration
from penstock.proto.common.v1 import common_pb2
from penstock.proto.router.v1 import router_pb2 as pb
from penstock.services.domain.errors import Unavailable
from penstock.services.errors import to_status
from tests.support.failed_call import FailedCall

_STATUS = to_status(Unavailable("away"))
AWAY = FailedCall(_STATUS.code, _STATUS.details, _STATUS.trailing_metadata)


def resumable(routers: int = 1, **options: Any) -> ResumableRequest:
    policy = RetryPolicy(initial_backoff_s=0.1, max_backoff_s=1.0)
    budget, rng = RetryBudget(policy), random.Random(1)
    return ResumableRequest("hello", Options(**options), policy, Routers(routers), budget, 60.0, rng)


def accepted(seed: int = 7) -> pb.GenerateResponse:
    return pb.GenerateResponse(accepted=pb.Accepted(request_id="r", plan_revision=1, seed=seed))


def tokens(offset: int, *ids: int, text: str = "x") -> pb.GenerateResponse:
    frame = common_pb2.TokenFrame(offset=offset, token_ids=ids, text=text)
    return pb.GenerateResponse(tokens=pb.AnswerTokens(tier="large", frame=frame))


def heartbeat(interval_s: float = 5.0) -> pb.GenerateResponse:
    return pb.GenerateResponse(heartbeat=pb.Heartbeat(interval=duration(interval_s)))


def test_a_break_before_the_first_token_is_tried_again_as_it_was() -> None:
    request = resumable(request_id="mine", seed=3)
    before = request.message().SerializeToString()
    assert request.take(accepted()) is not None
    request.failed(errors.from_rpc(AWAY), 0.0)
    assert 0 < request.wait_s(0.0) <= 0.2
    again = request.message()
    assert not again.HasField("resume")
    again.request_id = "mine"
    assert again.SerializeToString() == before
    assert request.take(accepted()) is None  # the caller has seen it


def test_a_break_in_the_middle_asks_for_the_rest_with_the_same_seed() -> None:
    request = resumable()
    request.message()
    request.take(accepted(seed=99))
    request.take(tokens(0, 1, 2, text="ab"))
    request.failed(errors.from_rpc(AWAY), 0.0)
    sent = request.message()
    assert sent.resume.tier == "large"
    assert list(sent.resume.token_ids) == [1, 2]
    assert sent.sampling.seed == 99
    request.take(tokens(2, 3, text="c"))
    request.failed(errors.from_rpc(AWAY), 0.0)
    assert list(request.message().resume.token_ids) == [1, 2, 3]
    request.take(pb.GenerateResponse(finished=pb.Finished(tier="large", reason=common_pb2.FINISH_REASON_STOP)))
    assert request.reply().text == "abc"
    assert request.reply().token_ids == (1, 2, 3)


def test_the_request_id_stays_the_same_at_each_router_that_has_not_seen_it() -> None:
    """Whoever gave the id, the user or the first router. Where the id may still be ending, a number is put behind it."""
    for options in ({"request_id": "r"}, {}):
        request, sent = resumable(routers=2, **options), list[tuple[int, str]]()
        for attempt in range(4):
            message = request.message()
            sent.append((request.router, message.request_id))
            if attempt == 0:
                request.take(accepted())
            request.failed(errors.from_rpc(AWAY), float(attempt))
        assert sent[0] == (0, options.get("request_id", ""))
        assert sent[1:] == [(1, "r"), (0, "r-2"), (1, "r-3")]


def test_tokens_that_are_not_the_next_ones_fail_the_attempt() -> None:
    request = resumable()
    request.message()
    request.take(accepted())
    request.take(tokens(0, 1, 2))
    for offset in (0, 1, 3):
        with pytest.raises(UnavailableError, match=f"position {offset}, not 2"):
            request.take(tokens(offset, 7))
    assert list(request.message().resume.token_ids) == [1, 2]


def test_a_stream_that_just_ends_is_an_error() -> None:
    request = resumable()
    request.message()
    request.take(accepted())
    with pytest.raises(UnavailableError, match="early"):
        request.ended()


def test_heartbeats_are_no_events_and_tell_when_silence_counts() -> None:
    """Without an interval announced silence says nothing; an interval that is too long for the limit stretches it."""
    request = resumable(routers=2)
    request.message()
    assert request.silence_s(15.0) is None
    assert request.take(accepted()) is not None
    assert request.silence_s(15.0) is None, "an older router, which sends no heartbeats"
    assert request.take(heartbeat(5.0)) is None
    assert request.silence_s(15.0) == 15.0
    assert request.take(heartbeat(20.0)) is None
    assert request.silence_s(15.0) == 60.0
    announced = accepted()
    announced.accepted.heartbeat_interval.CopyFrom(duration(1.0))
    request.take(announced)
    assert request.silence_s(15.0) == 15.0
    other = ResumableRequest("x", Options(), request.policy, request.routers, request.budget, 60.0)
    assert other.silence_s(15.0) == 15.0, "what a router announced holds for later requests"
    other.message()
    other.failed(errors.silent(15.0), 0.0)
    assert (other.router, other.silence_s(15.0)) == (1, None)
    request.take(accepted())
    assert request.silence_s(15.0) is None, "an older version runs there now"


def test_only_the_time_that_the_reader_waits_counts_as_silence() -> None:
    watch = SilenceWatch(lambda: 10.0)
    assert watch.check(0.0, 0.0) == 10.0
    assert not watch.silent
    watch.waiting(3.0)
    assert watch.check(10.0, 0.0) == 13.0
    watch.heard()
    assert watch.check(13.0, 0.0) == 23.0
    assert watch.check(100.0, 0.0) == 110.0, "the user holds the event"
    watch.waiting(100.0)
    assert watch.check(109.9, 0.0) == 110.0
    assert watch.check(110.0, 0.0) is None
    assert watch.silent


def test_a_client_that_stood_still_itself_does_not_blame_its_router() -> None:
    watch = SilenceWatch(lambda: 10.0)
    watch.waiting(0.0)
    assert watch.check(70.0, late_s=60.0) == 80.0
    assert not watch.silent
    assert watch.check(80.0, 0.0) is None
    assert watch.silent


@pytest.mark.parametrize("prompt", [[{"content": "no role"}], [1.5], [{"role": "user"}]])
def test_a_prompt_of_the_wrong_kind_is_a_type_error(prompt: Any) -> None:
    with pytest.raises(TypeError, match="prompt"):
        ResumableRequest(prompt, Options(), RetryPolicy(), Routers(1), RetryBudget(RetryPolicy()), 60.0)


def test_every_event_of_the_contract_has_a_type() -> None:
    """The stub's oneof and the SDK's events are the same list."""
    from penstock.client import types

    names = [field.name for field in pb.GenerateResponse.DESCRIPTOR.oneofs_by_name["event"].fields]
    names.remove("heartbeat")  # of the stream, not of the request
    for name in names:
        response = pb.GenerateResponse()
        getattr(response, name).SetInParent()
        event = messages.event_from_proto(response)
        assert event is not None, name
        assert type(event) in types.Event.__args__
    assert len(names) == len(types.Event.__args__)
    assert isinstance(messages.event_from_proto(accepted()), Accepted)
    assert messages.event_from_proto(pb.GenerateResponse()) is None
    assert Finished in types.Event.__args__
