"""Requests in OpenAI's format, checked field by field.

Fields that would change the answer and are not supported (audio, ...) are refused by name, never ignored. Accepted are
those that change nothing: labels (user, metadata, ...), null, default values, and fields of replies that are sent back.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Annotated, Any, Literal, Protocol, TypeVar

from pydantic import Field, ValidationError

from penstock.router_service.openai_gateway.field_names import problems_of, renamed_problems
from penstock.router_service.openai_gateway.json_values import StrictModel, check_keys, read_object
from penstock.router_service.openai_gateway.structured import StructuredFields
from penstock.router_service.openai_gateway.tools import MessageToolCalls, ToolFields
from penstock.services.domain.errors import InvalidRequest
from penstock.services.mesh_schema.slo import MeshSloClass
from penstock.types.problems import FieldProblem, length_problems, shortened
from penstock.types.prompts import (
    MAX_MESSAGES,
    MAX_PROMPT_TOKENS,
    MAX_TOKEN_ID,
    ChatMessage,
    ChatPrompt,
    Prompt,
    TextPrompt,
    TokenPrompt,
    prompt_problems,
)
from penstock.types.requests import MAX_CACHE_SALT_CHARS, MAX_DRAFT_CHARS, MAX_MODEL_CHARS
from penstock.types.sampling import (
    MAX_BIASED_TOKENS,
    MAX_SEED,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKENS,
    MAX_TOP_K,
    SamplingParams,
)
from penstock.types.slo import MAX_SLO_NAME_CHARS, Slo

MAX_CHOICES = 16
MAX_PROMPTS = 64
MAX_LEGACY_LOGPROBS = 5
MAX_PARTS = 1_024  # of one message
MAX_METADATA = 16  # as at OpenAI
COMPLETION_TOKENS = 16  # OpenAI's default for /v1/completions

_STRUCTURED = "sampling.structured_output"


class TextPart(StrictModel):
    type: Literal["text"]
    text: str


_Content = str | Annotated[list[TextPart], Field(min_length=1, max_length=MAX_PARTS, fail_fast=True)]


class _Text(Protocol):
    @property
    def text(self) -> str: ...


def text_of(content: str | Sequence[_Text]) -> str:
    """The text of a message: its parts, one after the other."""
    return content if isinstance(content, str) else "".join(part.text for part in content)


class Message(StrictModel):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: _Content | None = None
    name: str | None = None
    tool_calls: MessageToolCalls | None = None
    tool_call_id: str | None = None
    # fields of replies; none of these is shown to the model
    refusal: None = None
    audio: None = None
    function_call: None = None
    annotations: list[Any] | None = None
    provider_specific_fields: Any = None
    reasoning_content: str | None = None
    reasoning: str | None = None

    def plain(self) -> ChatMessage:
        role, text = "system" if self.role == "developer" else self.role, text_of(self.content or "")
        if self.tool_calls is None and not self.tool_call_id:
            return ChatMessage(role, text)
        return ChatMessage(role, text, tuple(call.plain() for call in self.tool_calls or ()), self.tool_call_id or "")


class PredictedOutput(StrictModel):
    """What the answer will be, in large part."""

    type: Literal["content"]
    content: _Content


class StreamOptions(StrictModel):
    include_usage: bool = False
    include_obfuscation: bool = False


class TemplateOptions(StrictModel):
    """Variables of the model's chat template: of all those that vLLM and SGLang pass on, those about reasoning."""

    enable_thinking: bool | None = None
    thinking: bool | None = None
    reasoning_effort: str | None = None


_NO_OPTIONS = TemplateOptions()
TokenId = Annotated[int, Field(ge=0, le=MAX_TOKEN_ID)]
CacheSalt = Annotated[str, Field(max_length=MAX_CACHE_SALT_CHARS)]
"""As in vLLM and SGLang: only requests with the same salt share the KV of prompts that begin alike."""


def _is_id(key: str) -> bool:
    return key.isascii() and key.isdecimal() and len(key) <= len(str(MAX_TOKEN_ID)) and key == str(int(key))


class AnyRequest(StrictModel):
    """The fields of all kinds of request. slo: an extension: a class of the mesh file, or latency objectives."""

    model: Annotated[str, Field(min_length=1, max_length=MAX_MODEL_CHARS)]
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=MAX_TOP_K)] | None = None  # -1, as 0: no limit
    seed: Annotated[int, Field(ge=-(2**63), le=MAX_SEED)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    cache_salt: CacheSalt | None = None
    slo: Annotated[str, Field(min_length=1, max_length=MAX_SLO_NAME_CHARS)] | MeshSloClass | None = None
    # labels
    user: str | None = None

    def objectives(self) -> Slo | None:
        """What the request asks for; a class is not looked up yet."""
        return Slo(name=self.slo) if isinstance(self.slo, str) else self.slo.slo() if self.slo is not None else None

    def slo_problems(self) -> Iterator[FieldProblem]:
        if isinstance(self.slo, MeshSloClass):
            yield from self.slo.problems("slo")

    def choices(self) -> int:
        return 1

    def predicted(self) -> str:
        return ""  # OpenAI has predictions for chats only

    def usual_sampling(self, max_tokens: int | None) -> dict[str, Any]:
        return {
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": None if self.top_k is None else max(0, self.top_k),
            "seed": None if self.seed is None else self.seed & MAX_SEED,
            "max_tokens": max_tokens,
        }


class Labels(StrictModel):
    """Labels of chats and responses, which change nothing."""

    metadata: dict[str, str] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None


class _Common(StructuredFields, AnyRequest):
    """The fields of chats and completions."""

    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    stop: str | Annotated[list[str], Field(fail_fast=True)] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    min_p: float | None = None
    stop_token_ids: Annotated[list[TokenId], Field(fail_fast=True)] | None = None
    ignore_eos: bool | None = None
    # accepted only at the value that changes nothing
    skip_special_tokens: Literal[True] | None = None

    def choices(self) -> int:
        return self.n or 1

    def sampling(self, max_tokens: int | None, top_logprobs: int | None) -> SamplingParams:
        usual = self.usual_sampling(max_tokens)
        if self.model_fields_set.isdisjoint(_RARE_FIELDS):
            return SamplingParams(**usual, top_logprobs=top_logprobs)
        return SamplingParams(
            **usual,
            top_logprobs=top_logprobs,
            stop=(self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ()),
            structured_output=self.structured_output(),
            presence_penalty=self.presence_penalty or 0.0,
            frequency_penalty=self.frequency_penalty or 0.0,
            repetition_penalty=1.0 if self.repetition_penalty is None else self.repetition_penalty,
            logit_bias={int(token): bias for token, bias in (self.logit_bias or {}).items() if _is_id(token)},
            min_p=self.min_p or 0.0,
            stop_token_ids=tuple(self.stop_token_ids or ()),
            ignore_eos=bool(self.ignore_eos),
        )

    def common_problems(self, params: SamplingParams) -> Iterator[FieldProblem]:
        """The problems of these fields. params: what `sampling` made of them."""
        if no_ids := [token for token in self.logit_bias or () if not _is_id(token)]:
            yield FieldProblem("logit_bias", f"'{shortened(no_ids[0])}' is no token id")
        if not self.model_fields_set.isdisjoint(_RARE_FIELDS):
            yield from self.structured_problems()
        yield from self.slo_problems()
        if problems := [*params.problems("sampling")]:
            yield from renamed_problems(iter(self.in_own_fields(InvalidRequest(*problems)).problems))

    def in_own_fields(self, error: InvalidRequest) -> InvalidRequest:
        """An error of a worker about the reply's form, with the field of this request that sets the form."""
        field = self.structured_field()
        return type(error)(*(replace(p, field=field) if p.field.startswith(_STRUCTURED) else p for p in error.problems))


_RARE_FIELDS = frozenset(_Common.model_fields) - {*AnyRequest.model_fields, "n", "skip_special_tokens"}
"""The fields of `_Common.sampling` that most requests leave out: without them, nothing of them is looked at."""


class ChatRequest(_Common, ToolFields, Labels):
    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)]
    max_tokens: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    modalities: Annotated[list[Literal["text"]], Field(max_length=1)] | None = None
    audio: None = None
    prediction: PredictedOutput | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: TemplateOptions | None = None
    verbosity: None = None
    web_search_options: None = None

    @cached_property
    def prompt(self) -> Prompt:
        messages = tuple([message.plain() for message in self.messages])
        options = self.chat_template_kwargs or _NO_OPTIONS
        thinking = options.thinking if options.enable_thinking is None else options.enable_thinking
        effort = self.reasoning_effort or options.reasoning_effort or ""
        return ChatPrompt(messages, self.tool_use(), thinking, effort)

    def prompts(self) -> list[Prompt]:
        return [self.prompt]

    @cached_property
    def params(self) -> SamplingParams:
        top_logprobs = (self.top_logprobs or 0) if self.logprobs else None
        return self.sampling(self.max_completion_tokens or self.max_tokens, top_logprobs)

    def predicted(self) -> str:
        return text_of(self.prediction.content) if self.prediction is not None else ""

    def problems(self) -> Iterator[FieldProblem]:
        yield from length_problems(self.predicted(), MAX_DRAFT_CHARS, "prediction.content")
        if self.top_logprobs is not None and not self.logprobs:
            yield FieldProblem("top_logprobs", "needs logprobs to be true")
        for i, message in enumerate(self.messages):
            if message.content is None and message.role != "assistant":
                yield FieldProblem(f"messages[{i}].content", "must be given")
        yield from self.common_problems(self.params)
        yield from renamed_problems(prompt_problems(self.prompt, "prompt"))


class CompletionRequest(_Common):
    prompt: (
        str
        | Annotated[list[str], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)]
        | Annotated[list[TokenId], Field(min_length=1, fail_fast=True)]
        | Annotated[
            list[Annotated[list[TokenId], Field(min_length=1, max_length=MAX_PROMPT_TOKENS, fail_fast=True)]],
            Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True),
        ]
    )
    max_tokens: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_LEGACY_LOGPROBS)] | None = None
    echo: Literal[False] | None = None
    best_of: Literal[1] | None = None
    suffix: Literal[""] | None = None

    def prompts(self) -> list[Prompt]:
        given = self.prompt
        if isinstance(given, str):
            return [TextPrompt(given)]
        if isinstance(given[0], int):
            return [TokenPrompt(tuple(given))]
        return [TextPrompt(p) if isinstance(p, str) else TokenPrompt(tuple(p)) for p in given]

    @cached_property
    def params(self) -> SamplingParams:
        return self.sampling(self.max_tokens or COMPLETION_TOKENS, self.logprobs)

    def problems(self) -> Iterator[FieldProblem]:
        for prompt in self.prompts():
            yield from renamed_problems(prompt_problems(prompt, "prompt"))
        yield from self.common_problems(self.params)


_T = TypeVar("_T", bound=StrictModel)


# Counted before anything is checked, so that oversized lists are not iterated.
_COUNTS = {
    "messages": (MAX_MESSAGES, "messages"),
    "input": (MAX_MESSAGES, "items"),
    "stop": (MAX_STOP_STRINGS, "strings"),
    "prompt": (MAX_PROMPT_TOKENS, "tokens"),
    "metadata": (MAX_METADATA, "entries"),
    "logit_bias": (MAX_BIASED_TOKENS, "tokens"),
    "stop_token_ids": (MAX_STOP_TOKENS, "tokens"),
}


def checked(kind: type[_T], body: bytes) -> _T:
    """Parse a body as a request of this kind.

    Raises:
        InvalidRequest: Names every invalid field.
    """
    content = read_object(body)
    crowded = [
        FieldProblem(name, f"at most {limit} {what}, not {len(content[name])}")
        for name, (limit, what) in _COUNTS.items()
        if isinstance(content.get(name), (list, dict)) and len(content[name]) > limit
    ]
    if crowded:
        raise InvalidRequest(*crowded)
    check_keys(content, body)
    try:
        request = kind.model_validate(content)
    except ValidationError as error:
        raise InvalidRequest(*problems_of(error)) from None
    problems = [*request.problems()]
    if problems:
        raise InvalidRequest(*problems)
    return request
