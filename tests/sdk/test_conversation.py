"""What a client does after a broken call: pure."""

from typing import Any

import grpc
import pytest

from penstock import Accepted, Finished, InvalidRequestError, Options, OverloadedError, RetryPolicy, UnavailableError
from penstock.client.conversation import Conversation
from penstock.common.v1 import common_pb2
from penstock.router.v1 import router_pb2 as pb
from services.domain import Overloaded, Unavailable, invalid
from services.errors import to_status


class Failed(grpc.RpcError, grpc.Call):
    """A call that ended with one of our statuses, as both kinds of client raise it."""

    def __init__(self, status: Any) -> None:
        self._status = status

    def code(self) -> grpc.StatusCode:
        code: grpc.StatusCode = self._status.code
        return code

    def details(self) -> str:
        return str(self._status.details)

    def trailing_metadata(self) -> Any:
        return self._status.trailing_metadata

    def initial_metadata(self) -> Any: ...
    def is_active(self) -> Any: ...
    def time_remaining(self) -> Any: ...
    def cancel(self) -> Any: ...
    def add_callback(self, callback: Any) -> Any: ...


AWAY = Failed(to_status(Unavailable("away")))


def conversation(**options: Any) -> Conversation:
    return Conversation("hello", Options(**options), RetryPolicy(attempts=3, first_pause_s=0.1, longest_pause_s=1.0))


def accepted(seed: int = 7) -> pb.GenerateResponse:
    return pb.GenerateResponse(accepted=pb.Accepted(request_id="r", plan_revision=1, seed=seed))


def tokens(offset: int, *ids: int, text: str = "x") -> pb.GenerateResponse:
    frame = common_pb2.TokenFrame(offset=offset, token_ids=ids, text=text)
    return pb.GenerateResponse(tokens=pb.AnswerTokens(tier="large", frame=frame))


def test_a_break_before_the_first_token_is_tried_again_as_it_was() -> None:
    talk = conversation()
    talk.take(accepted())
    before = talk.request.SerializeToString()
    pause = talk.after(AWAY)
    assert 0.05 <= pause <= 0.1
    assert talk.request.SerializeToString() == before
    assert talk.take(accepted()) is None  # the caller has seen it


def test_a_break_in_the_middle_asks_for_the_rest_with_the_same_seed() -> None:
    talk = conversation()
    talk.take(accepted(seed=99))
    talk.take(tokens(0, 1, 2, text="ab"))
    talk.after(AWAY)
    assert talk.request.resume.tier == "large"
    assert list(talk.request.resume.token_ids) == [1, 2]
    assert talk.request.sampling.seed == 99
    talk.take(tokens(2, 3, text="c"))
    talk.after(AWAY)
    assert list(talk.request.resume.token_ids) == [1, 2, 3]
    talk.take(pb.GenerateResponse(finished=pb.Finished(tier="large", reason=common_pb2.FINISH_REASON_STOP)))
    assert talk.reply().text == "abc"
    assert talk.reply().token_ids == (1, 2, 3)


def test_pauses_grow_and_patience_ends() -> None:
    talk = conversation()
    assert talk.after(AWAY) <= 0.1
    assert 0.1 <= talk.after(AWAY) <= 0.2
    with pytest.raises(UnavailableError):
        talk.after(AWAY)


def test_the_server_may_ask_for_a_longer_pause() -> None:
    assert conversation().after(Failed(to_status(Overloaded("full", 3.0)))) >= 3.0
    impatient = Conversation("x", Options(), RetryPolicy(attempts=1))
    with pytest.raises(OverloadedError) as caught:
        impatient.after(Failed(to_status(Overloaded("full", 3.0))))
    assert caught.value.retry_after_s == 3.0


def test_what_another_call_cannot_mend_is_raised_at_once() -> None:
    with pytest.raises(InvalidRequestError) as caught:
        conversation().after(Failed(to_status(invalid("sampling.seed", "is odd"))))
    assert caught.value.fields == {"sampling.seed": "is odd"}
    assert caught.value.reason == "INVALID_REQUEST"


def test_a_given_request_id_changes_with_each_try() -> None:
    talk = conversation(request_id="mine")
    talk.after(AWAY)
    assert talk.request.request_id == "mine-1"


def test_a_stream_that_just_ends_is_an_error() -> None:
    talk = conversation()
    talk.take(accepted())
    with pytest.raises(UnavailableError, match="early"):
        talk.ended()


@pytest.mark.parametrize("prompt", [[{"content": "no role"}], [1.5], [{"role": "user"}]])
def test_a_prompt_of_the_wrong_kind_is_a_type_error(prompt: Any) -> None:
    with pytest.raises(TypeError, match="prompt"):
        Conversation(prompt, Options(), RetryPolicy())


def test_every_event_of_the_contract_has_a_type() -> None:
    """The stub's oneof and the SDK's events are the same list."""
    from penstock.client import transport, types

    names = [field.name for field in pb.GenerateResponse.DESCRIPTOR.oneofs_by_name["event"].fields]
    for name in names:
        response = pb.GenerateResponse()
        getattr(response, name).SetInParent()
        event = transport.event_from_proto(response)
        assert event is not None, name
        assert type(event) in types.Event.__args__
    assert len(names) == len(types.Event.__args__)
    assert isinstance(transport.event_from_proto(accepted()), Accepted)
    assert transport.event_from_proto(pb.GenerateResponse()) is None
    assert Finished in types.Event.__args__
