"""What a message from a client or another service may hold, and what is refused before objects are made of it."""

import pytest

from penstock.proto.common.v1 import common_pb2 as pb
from penstock.services.domain.errors import InvalidRequest
from penstock.services.proto_codec import MAX_PROMPT_CALLS, check_calls
from penstock.types.prompts import MAX_MESSAGES


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
