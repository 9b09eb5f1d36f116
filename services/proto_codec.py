"""Converts between domain types shared by all services and protobuf messages, in pairs. Input is not trusted."""

import math
from collections.abc import Iterable, Iterator, Sequence, Sized
from typing import overload

from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp

from penstock.proto.common.v1 import common_pb2 as pb
from penstock.proto.worker.v1 import worker_pb2
from services.domain.errors import InvalidRequest, invalid
from services.domain.requests import (
    MAX_BIASED_TOKENS,
    MAX_PROMPT_TOKENS,
    MAX_SLO_PHASES,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKENS,
    SAMPLING_DEFAULTS,
    ChatMessage,
    ChatPrompt,
    EncodedLogprobs,
    FinishReason,
    PositionLogprobs,
    Prompt,
    SamplingParams,
    Slo,
    SloFallback,
    SloPhase,
    TextPrompt,
    TokenFrame,
    TokenLogprob,
    TokenPrompt,
    TokenUsage,
    message_count_problem,
)
from services.domain.stages.advice import MoveAdvice, MoveReason
from services.domain.structured import MAX_CHOICES, StructuredOutput, StructureKind
from services.domain.tools import (
    ANY_OBJECT,
    MAX_TOOL_CALLS,
    MAX_TOOLS,
    NO_TOOLS,
    Tool,
    ToolCall,
    ToolChoice,
    ToolMode,
    ToolUse,
)

MAX_PROMPT_CALLS = 4_096  # of all messages of a prompt
MAX_DURATION_S = 315_576_000_000
"""The maximum of google.protobuf.Duration: 10,000 years."""

_FINISH = {
    FinishReason.STOP: pb.FINISH_REASON_STOP,
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
    FinishReason.ABORTED: pb.FINISH_REASON_ABORTED,
    FinishReason.DECLINED: pb.FINISH_REASON_DECLINED,
    FinishReason.MIGRATED: pb.FINISH_REASON_MIGRATED,
}
_FINISH_BACK = {value: key for key, value in _FINISH.items()}
_SLO_FALLBACKS = {
    SloFallback.BEST_EFFORT: pb.SLO_FALLBACK_BEST_EFFORT,
    SloFallback.DECLINE: pb.SLO_FALLBACK_DECLINE,
}
_SLO_FALLBACKS_BACK = {value: key for key, value in _SLO_FALLBACKS.items()}
_TOOL_MODES = {
    ToolMode.AUTO: pb.TOOL_MODE_AUTO,
    ToolMode.NONE: pb.TOOL_MODE_NONE,
    ToolMode.REQUIRED: pb.TOOL_MODE_REQUIRED,
}
_TOOL_MODES_BACK = {value: key for key, value in _TOOL_MODES.items()}
_MOVE_REASONS = {
    MoveReason.RANGE_CROSSED: worker_pb2.MOVE_REASON_RANGE_CROSSED,
    MoveReason.OVERLOADED: worker_pb2.MOVE_REASON_OVERLOADED,
    MoveReason.DRAINING: worker_pb2.MOVE_REASON_DRAINING,
}
_MOVE_REASONS_BACK = {value: key for key, value in _MOVE_REASONS.items()}


def prompt_to_proto(prompt: Prompt) -> pb.Prompt:
    message = pb.Prompt()
    write_prompt(prompt, message)
    return message


def write_prompt(prompt: Prompt, message: pb.Prompt) -> None:
    """Write a prompt into an empty message.

    A message that is given to the constructor of another one would be encoded and parsed again.
    """
    match prompt:
        case ChatPrompt(messages, tool_use, thinking, effort):
            chat = message.chat
            chat.SetInParent()
            for each in messages:
                written = chat.messages.add(role=each.role, content=each.content)
                if each.tool_calls:
                    written.tool_calls.extend([call_to_proto(call) for call in each.tool_calls])
                if each.tool_call_id:
                    written.tool_call_id = each.tool_call_id
            if thinking is not None:
                chat.thinking = thinking
            if effort:
                chat.reasoning_effort = effort
            if tool_use.tools:
                tool_use_to_proto(tool_use, chat)
        case TextPrompt(text):
            message.text = text
        case TokenPrompt(token_ids):
            message.token_ids.SetInParent()
            message.token_ids.ids.extend(token_ids)


def prompt_from_proto(prompt: pb.Prompt, path: str = "prompt") -> Prompt:
    """The prompt. Only counts are checked here, before objects are created.

    Raises:
        InvalidRequest: No form is set, or there are too many messages or tokens.
    """
    match prompt.WhichOneof("kind"):
        case "chat":
            if problem := message_count_problem(len(prompt.chat.messages), f"{path}.chat.messages"):
                raise InvalidRequest(problem)
            calls = sum(len(message.tool_calls) for message in prompt.chat.messages)
            if calls > MAX_PROMPT_CALLS:
                raise invalid(f"{path}.chat.messages", f"at most {MAX_PROMPT_CALLS} tool calls, not {calls}")
            messages = tuple(
                _message_from_proto(m, f"{path}.chat.messages[{i}]") for i, m in enumerate(prompt.chat.messages)
            )
            return ChatPrompt(
                messages,
                tool_use_from_proto(prompt.chat, f"{path}.chat"),
                prompt.chat.thinking if prompt.chat.HasField("thinking") else None,
                prompt.chat.reasoning_effort,
            )
        case "text":
            return TextPrompt(prompt.text)
        case "token_ids":
            return TokenPrompt(token_ids_from_proto(prompt.token_ids.ids, f"{path}.token_ids.ids"))
        case _:
            raise invalid(path, "one of chat, text and token_ids is needed")


def _message_from_proto(message: pb.ChatMessage, path: str) -> ChatMessage:
    if not message.tool_calls and not message.tool_call_id:
        return ChatMessage(message.role, message.content)
    at_most(message.tool_calls, MAX_TOOL_CALLS, f"{path}.tool_calls", "calls")
    calls = tuple(ToolCall(c.id, c.name, c.arguments_json) for c in message.tool_calls)
    return ChatMessage(message.role, message.content, calls, message.tool_call_id)


def call_to_proto(call: ToolCall) -> pb.ToolCall:
    return pb.ToolCall(id=call.id, name=call.name, arguments_json=call.arguments)


def tool_use_to_proto(tool_use: ToolUse, chat: pb.ChatPrompt) -> None:
    """Write the tools of a prompt into it."""
    for tool in tool_use.tools:
        chat.tools.add(
            name=tool.name, description=tool.description, parameters_json=tool.parameters, strict=tool.strict
        )
    choice = tool_use.choice
    chat.tool_choice.mode = _TOOL_MODES[choice.mode]
    chat.tool_choice.function = choice.function
    chat.tool_choice.single_call = not choice.parallel


def tool_use_from_proto(chat: pb.ChatPrompt, path: str) -> ToolUse:
    """The tools of a prompt, not yet checked but for their number.

    Raises:
        InvalidRequest: there are too many tools, or the mode contradicts the named function.
    """
    if not chat.tools and not chat.HasField("tool_choice"):
        return NO_TOOLS
    at_most(chat.tools, MAX_TOOLS, f"{path}.tools", "tools")
    tools = tuple(Tool(t.name, t.description, t.parameters_json or ANY_OBJECT, t.strict) for t in chat.tools)
    choice = chat.tool_choice
    mode = _TOOL_MODES_BACK.get(choice.mode)
    if choice.function:
        if mode not in (None, ToolMode.REQUIRED):
            raise invalid(f"{path}.tool_choice.mode", "must be TOOL_MODE_REQUIRED where a function is named")
        mode = ToolMode.REQUIRED
    return ToolUse(tools, ToolChoice(mode or ToolMode.AUTO, choice.function, not choice.single_call))


def structured_output_to_proto(structured_output: StructuredOutput) -> pb.StructuredOutput:
    match structured_output.kind:
        case StructureKind.JSON_OBJECT:
            return pb.StructuredOutput(json_object=True)
        case StructureKind.JSON_SCHEMA:
            return pb.StructuredOutput(json_schema=structured_output.text)
        case StructureKind.REGEX:
            return pb.StructuredOutput(regex=structured_output.text)
        case StructureKind.GRAMMAR:
            return pb.StructuredOutput(grammar=structured_output.text)
        case StructureKind.CHOICE:
            return pb.StructuredOutput(choice=pb.Choices(texts=structured_output.choices))


def structured_output_from_proto(structured_output: pb.StructuredOutput, path: str) -> StructuredOutput | None:
    """The form, not yet checked but for the number of choices; None for `json_object: false`.

    Raises:
        InvalidRequest: no form is set, or there are too many choices.
    """
    match structured_output.WhichOneof("kind"):
        case "json_object":
            return StructuredOutput(StructureKind.JSON_OBJECT) if structured_output.json_object else None
        case "json_schema":
            return StructuredOutput(StructureKind.JSON_SCHEMA, structured_output.json_schema)
        case "regex":
            return StructuredOutput(StructureKind.REGEX, structured_output.regex)
        case "grammar":
            return StructuredOutput(StructureKind.GRAMMAR, structured_output.grammar)
        case "choice":
            at_most(structured_output.choice.texts, MAX_CHOICES, f"{path}.choice", "choices")
            return StructuredOutput(StructureKind.CHOICE, choices=tuple(structured_output.choice.texts))
        case _:
            raise invalid(path, "one of json_object, json_schema, regex, grammar and choice is needed")


def token_ids_from_proto(ids: Sequence[int], path: str) -> tuple[int, ...]:
    """Token ids from a message.

    Raises:
        InvalidRequest: There are too many.
    """
    at_most(ids, MAX_PROMPT_TOKENS, path, "tokens")
    return tuple(ids)


def at_most(values: Sized, limit: int, path: str, what: str) -> None:
    """Check the length of a repeated field before it is iterated.

    Raises:
        InvalidRequest: It is too long; the error names `path`.
    """
    if len(values) > limit:
        raise invalid(path, f"at most {limit} {what}, not {len(values)}")


def sampling_to_proto(sampling: SamplingParams) -> pb.SamplingParams:
    message = pb.SamplingParams()
    write_sampling(sampling, message)
    return message


def write_sampling(sampling: SamplingParams, message: pb.SamplingParams) -> None:
    """Write parameters into an empty message: those that are not the default."""
    message.SetInParent()
    unset = sampling.unset
    if "temperature" not in unset:
        message.temperature = sampling.temperature
    if "top_p" not in unset:
        message.top_p = sampling.top_p
    if "top_k" not in unset:
        message.top_k = sampling.top_k
    if sampling.seed is not None:
        message.seed = sampling.seed
    if sampling.max_output_tokens is not None:
        message.max_output_tokens = sampling.max_output_tokens
    if sampling.stop:
        message.stop.extend(sampling.stop)
    if sampling.top_logprobs is not None:
        message.top_logprobs_count = sampling.top_logprobs
    if sampling.ignore_eos:
        message.ignore_eos = True
    if sampling.structured_output is not None:
        message.structured_output.CopyFrom(structured_output_to_proto(sampling.structured_output))
    if sampling.frequency_penalty:
        message.frequency_penalty = sampling.frequency_penalty
    if sampling.presence_penalty:
        message.presence_penalty = sampling.presence_penalty
    if sampling.repetition_penalty != 1:
        message.repetition_penalty = sampling.repetition_penalty
    if sampling.logit_bias:
        message.logit_bias.update(sampling.logit_bias)
    if sampling.min_p:
        message.min_p = sampling.min_p
    if sampling.stop_token_ids:
        message.stop_token_ids.extend(sampling.stop_token_ids)


def sampling_from_proto(sampling: pb.SamplingParams, path: str = "sampling") -> SamplingParams:
    """The parameters. Only the lengths of lists are checked here.

    Raises:
        InvalidRequest: A list is too long, or no form of structured output is set.
    """
    at_most(sampling.stop, MAX_STOP_STRINGS, f"{path}.stop", "strings")
    at_most(sampling.logit_bias, MAX_BIASED_TOKENS, f"{path}.logit_bias", "tokens")
    at_most(sampling.stop_token_ids, MAX_STOP_TOKENS, f"{path}.stop_token_ids", "tokens")
    structured = None
    if sampling.HasField("structured_output"):
        structured = structured_output_from_proto(sampling.structured_output, f"{path}.structured_output")
    return SamplingParams(
        temperature=sampling.temperature if sampling.HasField("temperature") else 1.0,
        top_p=sampling.top_p if sampling.HasField("top_p") else 1.0,
        top_k=sampling.top_k,
        unset=frozenset(name for name in SAMPLING_DEFAULTS if not sampling.HasField(name)),
        seed=sampling.seed if sampling.HasField("seed") else None,
        max_output_tokens=sampling.max_output_tokens if sampling.HasField("max_output_tokens") else None,
        stop=tuple(sampling.stop),
        top_logprobs=sampling.top_logprobs_count if sampling.HasField("top_logprobs_count") else None,
        ignore_eos=sampling.ignore_eos,
        structured_output=structured,
        frequency_penalty=sampling.frequency_penalty,
        presence_penalty=sampling.presence_penalty,
        repetition_penalty=sampling.repetition_penalty if sampling.HasField("repetition_penalty") else 1.0,
        logit_bias=tuple(sampling.logit_bias.items()),
        min_p=sampling.min_p,
        stop_token_ids=tuple(sampling.stop_token_ids),
    )


def slo_to_proto(slo: Slo) -> pb.Slo:
    message = pb.Slo(
        phases=[
            pb.SloPhase(
                from_output_token_count=phase.from_output_token,
                time_per_output_token=duration(phase.time_per_output_token_s),
                after_marker=phase.after_marker,
            )
            for phase in slo.phases
        ],
        name=slo.name,
        fallback=_SLO_FALLBACKS[slo.fallback] if slo.fallback is not None else pb.SLO_FALLBACK_UNSPECIFIED,
    )
    if slo.time_to_first_token_s is not None:
        message.time_to_first_token.CopyFrom(duration(slo.time_to_first_token_s))
    return message


def slo_from_proto(slo: pb.Slo, path: str = "slo") -> Slo:
    """The objectives. Only the number of phases and the fallback are checked here.

    Raises:
        InvalidRequest: There are too many phases, a duration is invalid, or the fallback is unknown.
    """
    at_most(slo.phases, MAX_SLO_PHASES, f"{path}.phases", "phases")
    if slo.fallback and slo.fallback not in _SLO_FALLBACKS_BACK:
        raise invalid(f"{path}.fallback", f"unknown value {slo.fallback}")
    ttft = slo.time_to_first_token if slo.HasField("time_to_first_token") else None
    return Slo(
        None if ttft is None else seconds(ttft, f"{path}.time_to_first_token"),
        tuple(
            SloPhase(
                p.from_output_token_count,
                seconds(p.time_per_output_token, f"{path}.phases[{i}].time_per_output_token"),
                p.after_marker,
            )
            for i, p in enumerate(slo.phases)
        ),
        slo.name,
        _SLO_FALLBACKS_BACK.get(slo.fallback),
    )


def frame_to_proto(frame: TokenFrame) -> pb.TokenFrame:
    message = pb.TokenFrame(offset=frame.offset, token_ids=frame.token_ids, text=frame.text)
    if isinstance(frame.logprobs, ReceivedLogprobs):
        message.logprobs.extend(frame.logprobs.messages)
    elif frame.logprobs:
        message.logprobs.extend(
            pb.PositionLogprobs(chosen=_logprob_to_proto(p.chosen), top=[_logprob_to_proto(t) for t in p.top])
            for p in frame.logprobs
        )
    return message


def frame_from_proto(frame: pb.TokenFrame) -> TokenFrame:
    logprobs = ReceivedLogprobs(frame.logprobs) if frame.logprobs else ()
    return TokenFrame(frame.offset, tuple(frame.token_ids), frame.text, logprobs)


class ReceivedLogprobs(EncodedLogprobs):
    """The logprobs of a frame as they were received. To forward them costs a tenth of decoding and encoding."""

    __slots__ = ("_decoded", "messages")

    def __init__(self, messages: Iterable[pb.PositionLogprobs]) -> None:
        """The messages are copied: a reference would keep the whole message in memory, with the frames of other replies."""
        copy = pb.TokenFrame()
        copy.logprobs.extend(messages)
        self.messages: Sequence[pb.PositionLogprobs] = copy.logprobs
        self._decoded: tuple[PositionLogprobs, ...] | None = None

    def __len__(self) -> int:
        return len(self.messages)

    @overload
    def __getitem__(self, index: int) -> PositionLogprobs: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[PositionLogprobs, ...]: ...
    def __getitem__(self, index: int | slice) -> PositionLogprobs | tuple[PositionLogprobs, ...]:
        return self._all()[index]

    def __iter__(self) -> Iterator[PositionLogprobs]:
        return iter(self._all())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, (EncodedLogprobs, tuple)) and self._all() == tuple(other)

    def __hash__(self) -> int:
        return hash(self._all())

    def joined(self, others: Sequence[Sequence[PositionLogprobs]]) -> Sequence[PositionLogprobs]:
        """These, followed by those of later frames."""
        if not all(isinstance(each, ReceivedLogprobs) for each in others):
            return (*self, *(position for each in others for position in each))
        return ReceivedLogprobs(
            message for each in (self, *others) if isinstance(each, ReceivedLogprobs) for message in each.messages
        )

    def _all(self) -> tuple[PositionLogprobs, ...]:
        if self._decoded is None:
            self._decoded = tuple(
                PositionLogprobs(_logprob_from_proto(p.chosen), tuple(_logprob_from_proto(t) for t in p.top))
                for p in self.messages
            )
        return self._decoded


def usage_to_proto(usage: TokenUsage) -> pb.TokenUsage:
    return pb.TokenUsage(
        prompt_tokens=usage.prompt_tokens,
        cached_prompt_tokens=usage.cached_prompt_tokens,
        output_tokens=usage.output_tokens,
        accepted_draft_tokens=usage.accepted_draft_tokens,
        rejected_draft_tokens=usage.rejected_draft_tokens,
        compute_seconds=usage.compute_s,
    )


def usage_from_proto(usage: pb.TokenUsage) -> TokenUsage:
    """Seconds that are no time (negative, infinite, NaN) are 0: they would spoil the sums of a tenant."""
    compute_s = usage.compute_seconds
    return TokenUsage(
        usage.prompt_tokens,
        usage.cached_prompt_tokens,
        usage.output_tokens,
        usage.accepted_draft_tokens,
        usage.rejected_draft_tokens,
        compute_s if 0 <= compute_s < math.inf else 0.0,
    )


def finish_reason_to_proto(reason: FinishReason) -> pb.FinishReason.ValueType:
    return _FINISH[reason]


def finish_reason_from_proto(reason: pb.FinishReason.ValueType) -> FinishReason:
    """The reason; ABORTED if it is unknown to this version."""
    return _FINISH_BACK.get(reason, FinishReason.ABORTED)


def move_advice_to_proto(advice: MoveAdvice) -> worker_pb2.MoveAdvice:
    return worker_pb2.MoveAdvice(
        reason=_MOVE_REASONS[advice.reason],
        sequence_tokens=advice.tokens,
        sender_buffered_tokens=advice.sender_tokens,
    )


def move_advice_from_proto(advice: worker_pb2.MoveAdvice) -> MoveAdvice | None:
    """The advice; None if its reason is unknown to this version."""
    reason = _MOVE_REASONS_BACK.get(advice.reason)
    return None if reason is None else MoveAdvice(reason, advice.sequence_tokens, advice.sender_buffered_tokens)


def duration(value_s: float) -> Duration:
    value = Duration()
    write_duration(value_s, value)
    return value


def write_duration(value_s: float, message: Duration) -> None:
    """Write a time into an empty message."""
    message.SetInParent()
    message.FromNanoseconds(round(value_s * 1e9))


def seconds(value: Duration, path: str = "duration") -> float:
    """A duration in seconds.

    Raises:
        InvalidRequest: seconds or nanos are out of the range of a Duration.
    """
    if abs(value.seconds) > MAX_DURATION_S or abs(value.nanos) >= 10**9:
        raise invalid(path, f"must be a duration of at most {MAX_DURATION_S} s")
    return value.seconds + value.nanos / 1e9


def timestamp(value_s: float) -> Timestamp:
    value = Timestamp()
    value.FromNanoseconds(round(value_s * 1e9))
    return value


def timestamp_seconds(value: Timestamp) -> float:
    return value.seconds + value.nanos / 1e9


def _logprob_to_proto(value: TokenLogprob) -> pb.TokenLogprob:
    return pb.TokenLogprob(token_id=value.token_id, logprob=value.logprob, token_bytes=value.token_bytes)


def _logprob_from_proto(value: pb.TokenLogprob) -> TokenLogprob:
    return TokenLogprob(value.token_id, value.logprob, value.token_bytes)
