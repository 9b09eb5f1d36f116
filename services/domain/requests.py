"""Requests and replies: prompts, sampling, latency objectives, tokens, usage. No I/O."""

import enum
import math
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from services.domain.errors import FieldProblem, InvalidRequest, shortened
from services.domain.structured import StructuredOutput
from services.domain.tools import MAX_CALL_ID_CHARS, NO_TOOLS, ToolCall, ToolUse, call_problems
from services.domain.values import replaced, value_type

# Limits of one request. They exceed every context served today (a token is about four characters), and are low enough that a
# request is checked in milliseconds and fits into a message to a worker.
MAX_PROMPT_CHARS = 2_000_000
MAX_PROMPT_TOKENS = 1_000_000
MAX_MESSAGES = 4_096
ROLES = ("system", "user", "assistant", "tool")
MAX_MODEL_CHARS = 256
MAX_SLO_PHASES = 64
MIN_SLO_S, MAX_SLO_S = 1e-6, 1e7
"""Of an objective: what messages carry exactly enough, and more than anything takes (116 days)."""
MAX_SLO_MARKER_CHARS = 64
MAX_SLO_NAME_CHARS = 64
MIN_TEMPERATURE = 1e-4
"""Lower temperatures mean greedy decoding. At this one, a token whose logit is 0.002 below the best is drawn once in 10^8
times; far lower ones would exceed the range of float32."""
MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 256
MAX_TOP_K = 2**31 - 1
MAX_TOP_LOGPROBS = 20
MAX_PENALTY = 2.0  # of frequency and presence, either way, and of repetition; as at OpenAI and SGLang
MAX_BIAS = 100.0  # either way, as at OpenAI
MAX_BIASED_TOKENS = 1_024
MAX_STOP_TOKENS = 64
MAX_EFFORT_CHARS = 32
MAX_REQUEST_ID_CHARS = 128
MAX_CACHE_SALT_CHARS = 128  # of a client
MAX_MESH_SALT_CHARS = 512  # with what a router adds
MAX_SEED = 2**63 - 1
MAX_TOKEN_ID = 2**31 - 1
MAX_DRAFT_TOKENS = 16_384
MAX_DRAFT_CHARS = 65_536
"""More than a reply usually has, and few enough that a worker indexes a draft in milliseconds."""
MAX_DIGEST_CHARS = 128
PROGRESS_TOKENS = 16
"""A reply that got so many tokens from an instance ran well there: the instance's death is not charged to its request.
What kills an engine does so at the prompt, at the first step, or where the reply is resumed: before that many. A worker that
may hold tokens back sends as many before it does."""


@value_type(frozen=True, slots=True)
class ChatMessage:
    """One message. tool_calls: of the assistant. tool_call_id: the call that a message of role `tool` answers."""

    role: str
    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""

    @property
    def characters(self) -> int:
        if not self.tool_calls:
            return len(self.content)
        return len(self.content) + sum(len(call.name) + len(call.arguments) for call in self.tool_calls)


@value_type(frozen=True, slots=True)
class ChatPrompt:
    """A chat, rendered by the chat template of the model.

    thinking: whether the model reasons before it answers; None: its default. reasoning_effort: how much, in the words of its
        template; empty: its default.
    """

    messages: tuple[ChatMessage, ...]
    tool_use: ToolUse = NO_TOOLS
    thinking: bool | None = None
    reasoning_effort: str = ""

    @property
    def wants_reasoning(self) -> bool | None:
        """Whether the model shall reason; None if the request does not say."""
        if self.thinking is not None or not self.reasoning_effort:
            return self.thinking
        return self.reasoning_effort != NO_EFFORT

    @property
    def characters(self) -> int:
        """Of everything that is rendered."""
        characters = sum([message.characters for message in self.messages])
        return characters if self.tool_use is NO_TOOLS else characters + self.tool_use.characters


@dataclass(frozen=True, slots=True)
class TextPrompt:
    """Continued without a chat template."""

    text: str


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    """Continued without a chat template."""

    token_ids: tuple[int, ...]


Prompt = ChatPrompt | TextPrompt | TokenPrompt


def prompt_problems(prompt: Prompt, path: str) -> Iterator[FieldProblem]:
    """The problems of a prompt. Counts are checked first, so that oversized lists are not iterated."""
    match prompt:
        case ChatPrompt(messages, tool_use, thinking, effort):
            if (problem := message_count_problem(len(messages), f"{path}.chat.messages")) is not None:
                yield problem
                return
            for i, message in enumerate(messages):
                yield from _message_problems(message, f"{path}.chat.messages[{i}]")
            if sum(m.characters for m in messages) > MAX_PROMPT_CHARS:
                yield FieldProblem(f"{path}.chat.messages", f"longer than {MAX_PROMPT_CHARS} characters")
            if tool_use is not NO_TOOLS:
                yield from tool_use.problems(f"{path}.chat")
            if effort:
                yield from _reasoning_problems(thinking, effort, f"{path}.chat")
        case TextPrompt(text):
            if not text:
                yield FieldProblem(f"{path}.text", "must not be empty")
            elif len(text) > MAX_PROMPT_CHARS:
                yield FieldProblem(f"{path}.text", f"longer than {MAX_PROMPT_CHARS} characters")
        case TokenPrompt(token_ids):
            if not token_ids:
                yield FieldProblem(f"{path}.token_ids.ids", "must not be empty")
            else:
                yield from token_id_problems(token_ids, f"{path}.token_ids.ids")


NO_EFFORT = "none"
"""The reasoning effort of a model that does not reason."""


def _reasoning_problems(thinking: bool | None, effort: str, path: str) -> Iterator[FieldProblem]:
    if effort and not (len(effort) <= MAX_EFFORT_CHARS and effort.isidentifier()):
        yield FieldProblem(f"{path}.reasoning_effort", f"must be a word of at most {MAX_EFFORT_CHARS} characters")
    elif effort and thinking is not None and thinking is (effort == NO_EFFORT):
        yield FieldProblem(f"{path}.reasoning_effort", "contradicts `thinking`")


def _message_problems(message: ChatMessage, path: str) -> Iterator[FieldProblem]:
    if message.role not in ROLES:
        yield FieldProblem(f"{path}.role", f"must be one of {', '.join(ROLES)}, not '{shortened(message.role)}'")
    if message.tool_calls:
        if message.role != "assistant":
            yield FieldProblem(f"{path}.tool_calls", "only the assistant calls tools")
        yield from call_problems(message.tool_calls, f"{path}.tool_calls")
    if message.tool_call_id and message.role != "tool":
        yield FieldProblem(f"{path}.tool_call_id", "only a message of role tool answers a call")
    if len(message.tool_call_id) > MAX_CALL_ID_CHARS:
        yield FieldProblem(f"{path}.tool_call_id", f"must have at most {MAX_CALL_ID_CHARS} characters")


def message_count_problem(count: int, path: str) -> FieldProblem | None:
    if count < 1:
        return FieldProblem(path, "at least one message is needed")
    return FieldProblem(path, f"at most {MAX_MESSAGES} messages, not {count}") if count > MAX_MESSAGES else None


def token_id_problems(token_ids: Sequence[int], path: str) -> Iterator[FieldProblem]:
    """The problems of a list of token ids, which may be empty."""
    if len(token_ids) > MAX_PROMPT_TOKENS:
        yield FieldProblem(path, f"at most {MAX_PROMPT_TOKENS} tokens, not {len(token_ids)}")
    elif token_ids and max(token_ids) > MAX_TOKEN_ID:
        yield FieldProblem(path, f"a token id must be at most {MAX_TOKEN_ID}")


def model_problems(model: str, path: str) -> Iterator[FieldProblem]:
    """The problems of a model name, before it is looked up."""
    if not model:
        yield FieldProblem(path, "must name a model: `cascade` or a tier")
    elif len(model) > MAX_MODEL_CHARS:
        yield FieldProblem(path, f"must have at most {MAX_MODEL_CHARS} characters, not {len(model)}")


SAMPLING_DEFAULTS: tuple[Literal["temperature", "top_p", "top_k"], ...] = ("temperature", "top_p", "top_k")
"""The sampling parameters that a model may have defaults for."""


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """What a model samples with where the client sets nothing. None: as `SamplingParams` has it."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None


NO_DEFAULTS = SamplingDefaults()


@value_type(frozen=True, slots=True)
class SamplingParams:
    """Sampling parameters.

    temperature: from 0 (greedy) to 2. Values below MIN_TEMPERATURE are replaced by 0, for all engines.
    top_k: tokens are drawn from so many most likely ones; 0: no limit.
    top_p: tokens are drawn from the smallest set of most likely tokens with at least this share of what top_k leaves.
    seed: determines, with the output position, every random number, so that a reply does not depend on the instance or the
        batch; None until the router draws one.
    max_output_tokens: None: as many as the context allows.
    top_logprobs: None: no logprobs; 0: of the chosen tokens; n: also of the n most likely tokens.
    structured_output: the form that the reply must have; None: free text.
    frequency_penalty, presence_penalty: subtracted from a token's logit for each time that the reply has it, and once if it
        has it. repetition_penalty: divides the logit of a token that the reply has, or multiplies it if it is negative.
    logit_bias: (token, what is added to its logit), each token once.
    min_p: tokens are drawn from those with at least this share of the probability of the most likely one.
    stop_token_ids: the reply ends before the first of these tokens.
    unset: those of temperature, top_p and top_k that the client did not set: the model's defaults replace them
        (`with_defaults`), if it has any.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    seed: int | None = None
    max_output_tokens: int | None = None
    stop: tuple[str, ...] = ()
    top_logprobs: int | None = None
    ignore_eos: bool = False
    structured_output: StructuredOutput | None = None
    top_k: int = 0
    unset: frozenset[str] = frozenset()
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    min_p: float = 0.0
    stop_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if 0 <= self.temperature < MIN_TEMPERATURE:  # includes -0.0
            object.__setattr__(self, "temperature", 0.0)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def penalizes(self) -> bool:
        """Whether a token's logit depends on the tokens of the reply so far."""
        return bool(self.frequency_penalty or self.presence_penalty or self.repetition_penalty != 1)

    def with_seed(self, seed: int) -> "SamplingParams":
        return self if self.seed is not None else replaced(self, seed=seed)

    def with_defaults(self, defaults: "SamplingDefaults | None") -> "SamplingParams":
        """The parameters with which a model computes: its defaults where the client set nothing. None: it has its own."""
        if defaults is None:
            return self
        values = {name: value for name in self.unset if (value := getattr(defaults, name)) is not None}
        return replaced(self, **values, unset=frozenset()) if self.unset else self

    def problems(self, path: str) -> Iterator[FieldProblem]:
        if not 0 <= self.temperature <= 2:  # refuses NaN, too
            yield FieldProblem(f"{path}.temperature", f"must be from 0 to 2, not {self.temperature}")
        if not 0 < self.top_p <= 1:
            yield FieldProblem(f"{path}.top_p", f"must be greater than 0 and at most 1, not {self.top_p}")
        if not 0 <= self.top_k <= MAX_TOP_K:
            yield FieldProblem(f"{path}.top_k", f"must be from 0 to {MAX_TOP_K}, not {self.top_k}")
        if self.seed is not None and not 0 <= self.seed <= MAX_SEED:
            yield FieldProblem(f"{path}.seed", f"must be from 0 to {MAX_SEED}, not {self.seed}")
        if self.max_output_tokens is not None and self.max_output_tokens < 1:
            yield FieldProblem(f"{path}.max_output_tokens", "must be at least 1")
        if len(self.stop) > MAX_STOP_STRINGS:
            yield FieldProblem(f"{path}.stop", f"at most {MAX_STOP_STRINGS} strings, not {len(self.stop)}")
        for i, stop in enumerate(self.stop[:MAX_STOP_STRINGS]):
            if not 1 <= len(stop) <= MAX_STOP_CHARS:
                yield FieldProblem(f"{path}.stop[{i}]", f"must have 1 to {MAX_STOP_CHARS} characters")
        if self.top_logprobs is not None and not 0 <= self.top_logprobs <= MAX_TOP_LOGPROBS:
            yield FieldProblem(f"{path}.top_logprobs_count", f"must be from 0 to {MAX_TOP_LOGPROBS}")
        if self._logit_changes() != _NO_LOGIT_CHANGES:
            yield from self._logit_problems(path)
        if self.structured_output is not None:
            yield from self.structured_output.problems(f"{path}.structured_output")
            if self.ignore_eos:
                yield FieldProblem(
                    f"{path}.ignore_eos", "cannot be combined with structured_output, which says when to end"
                )

    def _logit_changes(self) -> tuple[object, ...]:
        """The fields that `_logit_problems` checks."""
        return (
            self.frequency_penalty,
            self.presence_penalty,
            self.repetition_penalty,
            self.logit_bias,
            self.min_p,
            self.stop_token_ids,
        )

    def _logit_problems(self, path: str) -> Iterator[FieldProblem]:
        """The problems of what changes logits or ends a reply at a token."""
        for name in ("frequency_penalty", "presence_penalty"):
            if not -MAX_PENALTY <= (value := getattr(self, name)) <= MAX_PENALTY:  # refuses NaN, too
                yield FieldProblem(f"{path}.{name}", f"must be from {-MAX_PENALTY:g} to {MAX_PENALTY:g}, not {value}")
        if not 0 < self.repetition_penalty <= MAX_PENALTY:
            problem = f"must be greater than 0 and at most {MAX_PENALTY:g}, not {self.repetition_penalty}"
            yield FieldProblem(f"{path}.repetition_penalty", problem)
        if not 0 <= self.min_p <= 1:
            yield FieldProblem(f"{path}.min_p", f"must be from 0 to 1, not {self.min_p}")
        if len(self.logit_bias) > MAX_BIASED_TOKENS:
            yield FieldProblem(f"{path}.logit_bias", f"at most {MAX_BIASED_TOKENS} tokens, not {len(self.logit_bias)}")
        elif self.logit_bias:
            if not all(0 <= token <= MAX_TOKEN_ID for token, _ in self.logit_bias):
                yield FieldProblem(f"{path}.logit_bias", f"a token id must be from 0 to {MAX_TOKEN_ID}")
            if not all(-MAX_BIAS <= bias <= MAX_BIAS for _, bias in self.logit_bias):
                yield FieldProblem(f"{path}.logit_bias", f"must be from {-MAX_BIAS:g} to {MAX_BIAS:g}")
        if len(self.stop_token_ids) > MAX_STOP_TOKENS:
            problem = f"at most {MAX_STOP_TOKENS} tokens, not {len(self.stop_token_ids)}"
            yield FieldProblem(f"{path}.stop_token_ids", problem)
        elif not all(0 <= token <= MAX_TOKEN_ID for token in self.stop_token_ids):
            yield FieldProblem(f"{path}.stop_token_ids", f"a token id must be from 0 to {MAX_TOKEN_ID}")


_NO_LOGIT_CHANGES = SamplingParams()._logit_changes()
_SLO_RANGE = f"must be from {MIN_SLO_S:g} to {MAX_SLO_S:g} s"


@dataclass(frozen=True, slots=True)
class SloPhase:
    """From output token `from_output_token` on, the average time per token is at most `time_per_output_token_s`.

    after_marker: the phase begins after the first occurrence of this text instead, such as `</think>`.
    """

    from_output_token: int
    time_per_output_token_s: float
    after_marker: str = ""


class SloFallback(enum.Enum):
    """What follows where no worker can keep an SLO: the request is served as best effort, or ends as declined."""

    BEST_EFFORT = "best_effort"
    DECLINE = "decline"


@dataclass(frozen=True, slots=True)
class Slo:
    """Latency objectives of a request.

    name: a class of the mesh file in place of the objectives. fallback: None: that of the class, or of the mesh file.
    """

    time_to_first_token_s: float | None = None
    phases: tuple[SloPhase, ...] = ()
    name: str = ""
    fallback: SloFallback | None = None

    @property
    def asks(self) -> bool:
        """Whether there is anything to keep."""
        return self.time_to_first_token_s is not None or bool(self.phases)

    def problems(self, path: str) -> Iterator[FieldProblem]:
        ttft = self.time_to_first_token_s
        if len(self.name) > MAX_SLO_NAME_CHARS:
            yield FieldProblem(f"{path}.name", f"must have at most {MAX_SLO_NAME_CHARS} characters")
        elif self.name and self.asks:
            yield FieldProblem(f"{path}.name", "must not be combined with objectives: the class has its own")
        if ttft is not None and not MIN_SLO_S <= ttft <= MAX_SLO_S:
            yield FieldProblem(f"{path}.time_to_first_token", _SLO_RANGE)
        if len(self.phases) > MAX_SLO_PHASES:
            yield FieldProblem(f"{path}.phases", f"at most {MAX_SLO_PHASES} phases, not {len(self.phases)}")
            return
        last = -1
        for i, phase in enumerate(self.phases):
            if len(phase.after_marker) > MAX_SLO_MARKER_CHARS:
                yield FieldProblem(f"{path}.phases[{i}].after_marker", f"longer than {MAX_SLO_MARKER_CHARS} characters")
            elif phase.after_marker and phase.from_output_token:
                yield FieldProblem(f"{path}.phases[{i}].after_marker", "must not be set with from_output_token_count")
            if not phase.after_marker and phase.from_output_token <= last:
                yield FieldProblem(
                    f"{path}.phases[{i}].from_output_token_count", "must be greater than in the previous phase"
                )
            if not MIN_SLO_S <= phase.time_per_output_token_s <= MAX_SLO_S:
                yield FieldProblem(f"{path}.phases[{i}].time_per_output_token", _SLO_RANGE)
            last = last if phase.after_marker else phase.from_output_token


class FinishReason(enum.Enum):
    STOP = "stop"
    LENGTH = "length"
    ABORTED = "aborted"
    DECLINED = "declined"
    MIGRATED = "migrated"


@value_type(frozen=True, slots=True)
class TokenUsage:
    """Tokens of a reply.

    accepted_draft_tokens: of the output tokens, those that a draft proposed. rejected_draft_tokens: verified in vain.
    compute_s: the reply's share of the GPUs' time (on a CPU: the engine's) on the instance that ended it; 0 if unknown.
    """

    prompt_tokens: int = 0
    cached_prompt_tokens: int = 0
    output_tokens: int = 0
    accepted_draft_tokens: int = 0
    rejected_draft_tokens: int = 0
    compute_s: float = 0.0


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    token_id: int
    logprob: float
    token_bytes: bytes


@dataclass(frozen=True, slots=True)
class PositionLogprobs:
    """The logprobs at one output position. top: the most likely tokens first."""

    chosen: TokenLogprob
    top: tuple[TokenLogprob, ...] = ()


@value_type(frozen=True, slots=True)
class TokenFrame:
    """Consecutive output tokens of one reply; `offset` is the output position of the first."""

    offset: int
    token_ids: tuple[int, ...]
    text: str
    logprobs: Sequence[PositionLogprobs] = ()

    @property
    def end(self) -> int:
        return self.offset + len(self.token_ids)

    @classmethod
    def joined(cls, frames: "Sequence[TokenFrame]") -> "TokenFrame":
        """Join consecutive frames, at least one."""
        if len(frames) == 1:
            return frames[0]
        return cls(
            frames[0].offset,
            tuple(token for frame in frames for token in frame.token_ids),
            "".join(frame.text for frame in frames),
            _joined_logprobs([frame.logprobs for frame in frames if frame.logprobs]),
        )


class EncodedLogprobs(Sequence[PositionLogprobs]):
    """Logprobs in another form, such as that of a message, that are decoded when they are read."""

    @abstractmethod
    def joined(self, others: Sequence[Sequence[PositionLogprobs]]) -> Sequence[PositionLogprobs]:
        """These, followed by those of later frames."""


def _joined_logprobs(parts: Sequence[Sequence[PositionLogprobs]]) -> Sequence[PositionLogprobs]:
    """The logprobs of consecutive frames."""
    if parts and isinstance(parts[0], EncodedLogprobs):
        return parts[0].joined(parts[1:])
    return tuple(position for part in parts for position in part)


@dataclass(frozen=True, slots=True)
class Draft:
    """What a reply will probably be, in large part. It never changes the reply, only how fast it is generated.

    text: may be empty if there are token_ids. token_ids: by the tokenizer of tokenizer_digest; empty if they are unknown.
    """

    text: str = ""
    token_ids: tuple[int, ...] = ()
    tokenizer_digest: str = ""

    @property
    def limited(self) -> "Draft":
        """The beginning of the draft, as long as a draft may be."""
        return Draft(self.text[:MAX_DRAFT_CHARS], self.token_ids[:MAX_DRAFT_TOKENS], self.tokenizer_digest)

    def in_form_for(self, tokenizer_digest: str) -> "Draft | None":
        """The draft as a model with this tokenizer gets it: its own tokens, or else the text; None if it has neither."""
        if self.token_ids and self.tokenizer_digest == tokenizer_digest:
            return Draft("", self.token_ids, self.tokenizer_digest)
        return Draft(self.text) if self.text else None

    def problems(self, path: str) -> Iterator[FieldProblem]:
        """The problems of a draft in one of its two forms."""
        if not self.text and not self.token_ids:
            yield FieldProblem(path, "must have text or token_ids")
        if len(self.text) > MAX_DRAFT_CHARS:
            yield FieldProblem(f"{path}.text", f"longer than {MAX_DRAFT_CHARS} characters")
        if len(self.token_ids) > MAX_DRAFT_TOKENS:
            yield FieldProblem(f"{path}.token_ids.ids", f"at most {MAX_DRAFT_TOKENS} tokens, not {len(self.token_ids)}")
        else:
            yield from token_id_problems(self.token_ids, f"{path}.token_ids.ids")
        if self.token_ids and not self.tokenizer_digest:
            yield FieldProblem(f"{path}.tokenizer_digest", "must be set with token_ids")
        if self.tokenizer_digest and not self.token_ids:
            yield FieldProblem(f"{path}.tokenizer_digest", "must not be set without token_ids")
        if len(self.tokenizer_digest) > MAX_DIGEST_CHARS:
            yield FieldProblem(f"{path}.tokenizer_digest", f"must have at most {MAX_DIGEST_CHARS} characters")


def prediction_problems(prediction: str, path: str) -> Iterator[FieldProblem]:
    """The problems of a client's prediction of its answer; empty for none."""
    if len(prediction) > MAX_DRAFT_CHARS:
        yield FieldProblem(path, f"at most {MAX_DRAFT_CHARS} characters, not {len(prediction)}")


def cache_salt_problems(salt: str, path: str, most: int = MAX_CACHE_SALT_CHARS) -> Iterator[FieldProblem]:
    if len(salt) > most:
        yield FieldProblem(path, f"must have at most {most} characters, not {len(salt)}")


@value_type(frozen=True, slots=True)
class GenerationRequest:
    """One reply asked of one engine. `resume_token_ids` were generated elsewhere: generation goes on behind them.

    draft: of the whole reply, also if it is resumed.
    output_interval_s: how long output tokens behind the first may wait to be sent together; None: the worker's own interval.
    decline_unkept_slo: where its SLO cannot be kept it is declined, not served as best effort.
    cache_salt: only requests with the same one share the KV of prompts that begin alike.
    """

    request_id: str
    prompt: Prompt
    sampling: SamplingParams
    resume_token_ids: tuple[int, ...] = ()
    slo: Slo | None = None
    priority: int = 0
    output_interval_s: float | None = None
    decline_unkept_slo: bool = False
    draft: Draft | None = None
    cache_salt: str = ""

    @property
    def has_form(self) -> bool:
        """Whether the reply may have to be of some form: one is asked for, or tools are offered."""
        offers_tools = isinstance(self.prompt, ChatPrompt) and bool(self.prompt.tool_use.offered)
        return offers_tools or self.sampling.structured_output is not None

    def with_defaults(self, defaults: SamplingDefaults | None) -> "GenerationRequest":
        """As `SamplingParams.with_defaults`."""
        return replaced(self, sampling=self.sampling.with_defaults(defaults)) if self.sampling.unset else self

    def validate(self) -> None:
        """Check all fields.

        Raises:
            InvalidRequest: A field is invalid; the error names every one.
        """
        problems = [*request_id_problems(self.request_id, "request_id")]
        problems += prompt_problems(self.prompt, "prompt")
        problems += self.sampling.problems("sampling")
        if self.slo is not None:
            problems += self.slo.problems("slo")
        problems += token_id_problems(self.resume_token_ids, "resume_token_ids")
        if self.draft is not None:
            problems += self.draft.problems("draft")
        if self.output_interval_s is not None and not 0 <= self.output_interval_s < math.inf:
            problems.append(FieldProblem("output_interval", "must not be negative"))
        problems += cache_salt_problems(self.cache_salt, "cache_salt", MAX_MESH_SALT_CHARS)
        if problems:
            raise InvalidRequest(*problems)


def request_id_problems(request_id: str, path: str) -> Iterator[FieldProblem]:
    if not 1 <= len(request_id) <= MAX_REQUEST_ID_CHARS:
        yield FieldProblem(path, f"must have 1 to {MAX_REQUEST_ID_CHARS} characters")
    elif not request_id.isprintable():
        yield FieldProblem(path, "must be printable")
