"""Replies in OpenAI's format. No I/O.

The extension field `penstock`, of the reply or of a stream's last chunk, describes what the cascade did.
"""

import time
from collections.abc import Sequence as Seq
from dataclasses import asdict, dataclass, field, fields
from itertools import accumulate
from typing import Any

from penstock.router_service.domain.events import RouterEvent
from penstock.router_service.openai_gateway import tools
from penstock.types.events import Finished, TierSummary
from penstock.types.replies import FinishReason, PositionLogprobs, TokenFrame, TokenLogprob
from penstock.types.slo import SloResult

Json = dict[str, Any]


@dataclass(slots=True)
class Choice:
    """One choice; the output of its request if it is not streamed."""

    index: int
    prompt_index: int = 0
    text: str = ""
    positions: list[PositionLogprobs] = field(default_factory=list)
    finished: Finished | None = None
    reasoning: str = ""

    def answer(self, _: str, frame: TokenFrame) -> None:
        """Take a part of the answer, of any tier."""
        self.text += frame.text
        self.positions += text_positions(frame.logprobs)

    def event(self, event: RouterEvent) -> None:
        """Take any other event."""
        if isinstance(event, Finished):
            self.finished = event

    async def sent(self) -> None:
        """Return at once: the reply is sent when it is complete."""

    @property
    def reason(self) -> str:
        assert self.finished is not None
        if self.finished.reason is FinishReason.LENGTH:
            return "length"
        return "tool_calls" if self.finished.tool_calls and self.finished.reason is FinishReason.STOP else "stop"

    @property
    def message(self) -> Json:
        """The whole reply as a message. If there is no text in addition to calls, the content is null, as at OpenAI."""
        message: Json = {"role": "assistant", "content": self.text, "refusal": None}
        if self.finished is not None and self.finished.tool_calls:
            message["content"] = self.finished.content or None
            message["tool_calls"] = tools.called(self.finished.tool_calls)
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        return message

    def add_reasoning(self, text: str) -> None:
        self.reasoning += text


def usage(choices: Seq[Choice]) -> Json:
    """Tokens of all choices; a prompt shared by several choices counts once."""
    usages = [(choice.prompt_index, choice.finished.usage) for choice in choices if choice.finished is not None]
    prompts = dict(usages).values()
    output = sum(each.output_tokens for _, each in usages)
    prompt = sum(each.prompt_tokens for each in prompts)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": output,
        "total_tokens": prompt + output,
        "prompt_tokens_details": {"cached_tokens": sum(each.cached_prompt_tokens for each in prompts)},
        "completion_tokens_details": {
            "accepted_prediction_tokens": sum(each.accepted_draft_tokens for _, each in usages),
            "rejected_prediction_tokens": sum(each.rejected_draft_tokens for _, each in usages),
        },
    }


def extension(request_id: str, finished: Finished) -> Json:
    """What the cascade did for one choice."""
    return {
        "request_id": request_id,
        "tier": finished.tier,
        "trace_id": finished.trace_id,
        "time_to_first_token_s": finished.ttft_s,
        "total_s": finished.total_s,
        "slo": _slo_result(finished.slo),
        "tiers": [_tier_summary(tier) for tier in finished.tiers],
    }


_OF_TIERS = tuple(field.name for field in fields(TierSummary) if field.name != "usage")


def _tier_summary(tier: TierSummary) -> Json:
    return {name: getattr(tier, name) for name in _OF_TIERS} | {
        "completion_tokens": tier.usage.output_tokens,
        "accepted_draft_tokens": tier.usage.accepted_draft_tokens,
        "rejected_draft_tokens": tier.usage.rejected_draft_tokens,
    }


def _slo_result(slo: SloResult | None) -> Json | None:
    """How a request with an SLO was served."""
    if slo is None:
        return None
    result = asdict(slo)
    return {"class": result.pop("slo_class"), **result}


def text_positions(positions: Seq[PositionLogprobs]) -> list[PositionLogprobs]:
    """Positions without special tokens (the end of a reply), which have no text."""
    return [position for position in positions if position.chosen.token_bytes]


def chat_logprobs(positions: Seq[PositionLogprobs]) -> Json:
    return {"content": [_chat_entry(p.chosen) | {"top_logprobs": [_chat_entry(t) for t in p.top]} for p in positions]}


def _chat_entry(token: TokenLogprob) -> Json:
    text = token.token_bytes.decode("utf-8", "replace")
    return {"token": text, "logprob": token.logprob, "bytes": list(token.token_bytes)}


def completion_logprobs(positions: Seq[PositionLogprobs], text_before: int = 0) -> Json:
    """text_before: number of characters of the reply in earlier chunks."""
    tokens = [p.chosen.token_bytes.decode("utf-8", "replace") for p in positions]
    return {
        "tokens": tokens,
        "token_logprobs": [p.chosen.logprob for p in positions],
        "top_logprobs": [{t.token_bytes.decode("utf-8", "replace"): t.logprob for t in p.top} for p in positions],
        "text_offset": [*accumulate(map(len, tokens), initial=text_before)][:-1],
    }


def tool_deltas(index: int, pieces: Seq[Json], frame: TokenFrame | None) -> list[Json]:
    """The chunks' choices of a reply that may call tools: its pieces, the logprobs of a frame with the first."""
    positions = text_positions(frame.logprobs) if frame is not None else []
    if positions and not pieces:
        pieces = [{}]
    first = chat_logprobs(positions) if positions else None
    return [chat_choice(index, piece, None if number else first) for number, piece in enumerate(pieces)]


def chat_choice(index: int, delta: Json, logprobs: Json | None = None, reason: str | None = None) -> Json:
    """The choice of a chunk of a chat."""
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}


class ChatFormat:
    """/v1/chat/completions."""

    prefix, whole, chunk = "chatcmpl-", "chat.completion", "chat.completion.chunk"

    def choice(self, choice: Choice, *, logprobs: bool) -> Json:
        return {
            "index": choice.index,
            "message": choice.message,
            "logprobs": chat_logprobs(choice.positions) if logprobs else None,
            "finish_reason": choice.reason,
        }

    def opening(self, index: int) -> Json | None:
        return chat_choice(index, {"role": "assistant", "content": ""})

    def delta(self, index: int, frame: TokenFrame, text_before: int, *, logprobs: bool) -> Json:
        content = chat_logprobs(text_positions(frame.logprobs)) if logprobs else None
        return chat_choice(index, {"content": frame.text}, content)

    def closing(self, choice: Choice) -> Json:
        return chat_choice(choice.index, {}, reason=choice.reason)


class CompletionFormat:
    """/v1/completions."""

    prefix, whole, chunk = "cmpl-", "text_completion", "text_completion"

    def choice(self, choice: Choice, *, logprobs: bool) -> Json:
        content = completion_logprobs(choice.positions) if logprobs else None
        return {"index": choice.index, "text": choice.text, "logprobs": content, "finish_reason": choice.reason}

    def opening(self, index: int) -> Json | None:
        return None

    def delta(self, index: int, frame: TokenFrame, text_before: int, *, logprobs: bool) -> Json:
        content = completion_logprobs(text_positions(frame.logprobs), text_before) if logprobs else None
        return {"index": index, "text": frame.text, "logprobs": content, "finish_reason": None}

    def closing(self, choice: Choice) -> Json:
        return {"index": choice.index, "text": "", "logprobs": None, "finish_reason": choice.reason}


Format = ChatFormat | CompletionFormat


def envelope(shape: Format, request_id: str, model: str, *, chunk: bool) -> Json:
    """The first fields of every reply and every chunk."""
    return {
        "id": f"{shape.prefix}{request_id}",
        "object": shape.chunk if chunk else shape.whole,
        "created": int(time.time()),
        "model": model,
    }
