"""Prompts that are kept to be measured, where the mesh file and the tenant allow it: which, and how large. No I/O."""

import json
from dataclasses import dataclass
from typing import Self

from penstock.types.prompts import ChatPrompt, Prompt
from penstock.types.sampling import SamplingParams

MAX_SAMPLE_BYTES = 16_384
"""A longer chat is not kept: it would be another prompt if it were cut."""

Messages = tuple[tuple[str, str], ...]
"""(role, content) of each message."""


@dataclass(frozen=True, slots=True)
class PromptSample:
    """A chat as a client sent it: no tenant, no key, no request id, no answer. messages: at least one."""

    messages: Messages

    @classmethod
    def of(cls, prompt: Prompt, sampling: SamplingParams) -> Self | None:
        """The sample of a prompt; None where it cannot be measured as it is, or is too large.

        Left out are raw text and token ids, chats with tools, and replies of a form: `penstock measure` asks for free text.
        """
        if not isinstance(prompt, ChatPrompt) or not prompt.messages or prompt.tool_use.tools:
            return None
        if sampling.structured_output is not None or prompt.characters > MAX_SAMPLE_BYTES:
            return None
        if any(message.tool_calls or message.tool_call_id for message in prompt.messages):
            return None
        sample = cls(tuple((message.role, message.content) for message in prompt.messages))
        return sample if len(sample.to_json()) <= MAX_SAMPLE_BYTES else None

    def to_json(self) -> bytes:
        """Surrogates without a partner are written as `?`."""
        return json.dumps(self.messages, ensure_ascii=False).encode(errors="replace")

    @classmethod
    def from_json(cls, data: bytes) -> Self:
        return cls(tuple((str(role), str(content)) for role, content in json.loads(data)))
