"""Logprobs that are forwarded as they were received are those that were sent, however their frames are joined."""

import pytest

from penstock.proto.common.v1 import common_pb2 as pb
from penstock.services import proto_codec
from penstock.services.domain.errors import InvalidRequest
from penstock.services.proto_codec import MAX_PROMPT_CALLS, check_calls
from penstock.types.prompts import MAX_MESSAGES
from penstock.types.replies import EncodedLogprobs, PositionLogprobs, TokenFrame, TokenLogprob


def sent(offset: int, tokens: int, top: int = 2) -> TokenFrame:
    """A frame as an engine makes it."""
    logprobs = tuple(
        PositionLogprobs(
            TokenLogprob(at, -0.25 * at, b"\xff" * (at % 3)),
            tuple(TokenLogprob(rank, -1.5 - rank, b"t") for rank in range(top)),
        )
        for at in range(offset, offset + tokens)
    )
    return TokenFrame(offset, tuple(range(tokens)), "x" * tokens, logprobs)


def received(frame: TokenFrame) -> TokenFrame:
    return proto_codec.frame_from_proto(pb.TokenFrame.FromString(proto_codec.frame_to_proto(frame).SerializeToString()))


@pytest.mark.parametrize("counts", [(3,), (1, 2, 4)])
def test_frames_are_forwarded_unchanged_and_undecoded(counts: tuple[int, ...]) -> None:
    """Also those that are joined for a slow reader."""
    frames, offset = list[TokenFrame](), 0
    for count in counts:
        frames.append(sent(offset, count))
        offset += count
    joined = TokenFrame.joined([received(frame) for frame in frames])
    forwarded = proto_codec.frame_to_proto(joined)
    assert isinstance(joined.logprobs, proto_codec.ReceivedLogprobs)
    assert joined.logprobs._decoded is None
    assert forwarded == proto_codec.frame_to_proto(TokenFrame.joined(frames))


def test_they_read_as_a_tuple_of_their_positions() -> None:
    frame = sent(0, 5)
    logprobs = received(frame).logprobs
    assert isinstance(logprobs, EncodedLogprobs)
    assert tuple(logprobs) == frame.logprobs
    assert logprobs[-1] == frame.logprobs[-1]
    assert logprobs[2:] == frame.logprobs[2:]
    assert received(frame) == frame
    assert hash(received(frame)) == hash(frame)
    assert list(TokenFrame.joined([received(frame), sent(5, 1)]).logprobs) == list(sent(0, 6).logprobs)
    assert received(sent(0, 2, top=0)).logprobs[0].top == ()
    assert received(TokenFrame(0, (1,), "x")).logprobs == ()


def test_a_received_message_is_not_kept_in_memory() -> None:
    """It holds the frames of other replies: a client that does not read must not keep them."""
    message = proto_codec.frame_to_proto(sent(0, 2))
    frame = proto_codec.frame_from_proto(message)
    message.Clear()
    assert tuple(frame.logprobs) == sent(0, 2).logprobs


def test_tool_calls_are_counted_over_all_messages() -> None:
    def prompt(messages: int) -> pb.Prompt:
        calls = [pb.ToolCall(id="c", name="f", arguments="{}")] * 128
        chat = [pb.ChatMessage(role="assistant", tool_calls=calls) for _ in range(messages)]
        return pb.Prompt(chat=pb.ChatPrompt(messages=chat))

    most = MAX_PROMPT_CALLS // 128
    check_calls(prompt(most))
    with pytest.raises(InvalidRequest, match=f"prompt.chat.messages: at most {MAX_PROMPT_CALLS} tool calls, not"):
        check_calls(prompt(most + 1))


def test_messages_are_counted_before_they_are_walked() -> None:
    crowd = pb.Prompt(chat=pb.ChatPrompt(messages=[pb.ChatMessage()] * (MAX_MESSAGES + 1)))
    with pytest.raises(
        InvalidRequest, match=rf"^items\[0\].prompt.chat.messages: at most {MAX_MESSAGES} messages, not"
    ):
        check_calls(crowd, "items[0].prompt")
