"""What a message from a client or another service may hold, and what is refused before objects are made of it."""

import math

import pytest

from penstock.proto.common.v1 import common_pb2 as pb
from services.domain.errors import InvalidRequest
from services.domain.requests import ChatPrompt, TokenUsage
from services.proto_codec import MAX_PROMPT_CALLS, prompt_from_proto, usage_from_proto


def test_tool_calls_are_counted_over_all_messages() -> None:
    def prompt(messages: int) -> pb.Prompt:
        calls = [pb.ToolCall(id="c", name="f", arguments_json="{}")] * 128
        chat = [pb.ChatMessage(role="assistant", tool_calls=calls) for _ in range(messages)]
        return pb.Prompt(chat=pb.ChatPrompt(messages=chat))

    most = MAX_PROMPT_CALLS // 128
    fitting = prompt_from_proto(prompt(most))
    assert isinstance(fitting, ChatPrompt)
    assert sum(len(message.tool_calls) for message in fitting.messages) == MAX_PROMPT_CALLS
    with pytest.raises(InvalidRequest, match=f"prompt.chat.messages: at most {MAX_PROMPT_CALLS} tool calls, not"):
        prompt_from_proto(prompt(most + 1))


@pytest.mark.parametrize("seconds", [math.nan, math.inf, -math.inf, -1.0])
def test_seconds_of_a_worker_that_are_no_time_count_nothing(seconds: float) -> None:
    assert usage_from_proto(pb.TokenUsage(prompt_tokens=3, compute_seconds=seconds)) == TokenUsage(3, 0, 0, 0, 0, 0.0)
