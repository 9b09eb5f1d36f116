"""What clients ask of routers, and routers of engines."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

from penstock.types.limits import AtMost
from penstock.types.problems import FieldProblem, length_problems
from penstock.types.prompts import MAX_PROMPT_CHARS, ChatPrompt, Prompt, TokenIds, prompt_problems, token_id_problems
from penstock.types.sampling import SamplingDefaults, SamplingParams
from penstock.types.slo import Slo
from penstock.types.values import replaced, value_type

MAX_MODEL_CHARS = 256
MAX_PRIORITY = 100
MAX_REQUEST_ID_CHARS = 128
MAX_CACHE_SALT_CHARS = 128  # of a client
MAX_MESH_SALT_CHARS = 512  # with what a router adds
MAX_DRAFT_TOKENS = 16_384
MAX_DRAFT_CHARS = 65_536
"""More than a reply usually has, and few enough that a worker indexes a draft in milliseconds."""
MAX_DIGEST_CHARS = 128
PROGRESS_TOKENS = 16
"""A reply that got so many tokens from an instance ran well there: the instance's death is not charged to its request.
What kills an engine does so at the prompt, at the first step, or where the reply is resumed: before that many. A worker that
may hold tokens back sends as many before it does."""


@dataclass(frozen=True, slots=True)
class Draft:
    """What a reply will probably be, in large part. It never changes the reply, only how fast it is generated.

    text: may be empty if there are token_ids. token_ids: by the tokenizer of tokenizer_digest; empty if they are unknown.
    """

    text: str = ""
    token_ids: Annotated[tuple[int, ...], AtMost(MAX_DRAFT_TOKENS, "tokens")] = ()
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
        yield from length_problems(self.text, MAX_DRAFT_CHARS, f"{path}.text")
        if len(self.token_ids) > MAX_DRAFT_TOKENS:
            yield FieldProblem(f"{path}.token_ids.ids", f"at most {MAX_DRAFT_TOKENS} tokens, not {len(self.token_ids)}")
        else:
            yield from token_id_problems(self.token_ids, f"{path}.token_ids.ids")
        if self.token_ids and not self.tokenizer_digest:
            yield FieldProblem(f"{path}.tokenizer_digest", "must be set with token_ids")
        if self.tokenizer_digest and not self.token_ids:
            yield FieldProblem(f"{path}.tokenizer_digest", "must not be set without token_ids")
        yield from length_problems(self.tokenizer_digest, MAX_DIGEST_CHARS, f"{path}.tokenizer_digest")


@value_type(frozen=True, slots=True)
class GenerationRequest:
    """One reply asked of one engine. `resume_token_ids` were generated elsewhere: generation continues after them.

    draft: of the whole reply, also if it is resumed.
    output_interval_s: how long output tokens after the first may wait to be sent together; None: the worker's own interval.
    decline_unkept_slo: where its SLO cannot be kept it is declined, not served as best effort.
    cache_salt: only requests with the same one share the KV of prompts that begin alike.
    transfer_id: of the transfer by which the request arrives from another worker; empty: it is computed from the prompt.
    """

    request_id: str
    prompt: Prompt
    sampling: SamplingParams
    resume_token_ids: TokenIds = ()
    slo: Slo | None = None
    priority: int = 0
    output_interval_s: float | None = None
    decline_unkept_slo: bool = False
    draft: Draft | None = None
    cache_salt: str = ""
    transfer_id: str = ""

    @property
    def has_form(self) -> bool:
        """Whether the reply may have to be of some form: one is asked for, or tools are offered."""
        offers_tools = isinstance(self.prompt, ChatPrompt) and bool(self.prompt.tool_use.offered)
        return offers_tools or self.sampling.structured_output is not None

    def with_defaults(self, defaults: SamplingDefaults | None) -> "GenerationRequest":
        """As `SamplingParams.with_defaults`."""
        sampling = self.sampling.with_defaults(defaults)
        return self if sampling is self.sampling else replaced(self, sampling=sampling)

    def problems(self) -> Iterator[FieldProblem]:
        yield from request_id_problems(self.request_id, "request_id")
        yield from prompt_problems(self.prompt, "prompt")
        yield from self.sampling.problems("sampling")
        if self.slo is not None:
            yield from self.slo.problems("slo")
        yield from token_id_problems(self.resume_token_ids, "resume_token_ids")
        if self.draft is not None:
            yield from self.draft.problems("draft")
        if self.output_interval_s is not None and not 0 <= self.output_interval_s < math.inf:
            yield FieldProblem("output_interval", "must not be negative")
        yield from length_problems(self.cache_salt, MAX_MESH_SALT_CHARS, "cache_salt")


@dataclass(frozen=True, slots=True)
class Resume:
    """Continue after these tokens of this tier. text: of these tokens; needed if tools are offered."""

    tier: str
    token_ids: TokenIds
    text: str = ""


@value_type(frozen=True, slots=True)
class AnswerRequest:
    """One answer asked of a router.

    model: `cascade` or a tier's name. priority: higher goes first among waiting requests. request_id: None: the router's.
    prediction: what the answer will be, in large part; empty for none.
    cache_salt: only requests with the same one share the KV of prompts that begin alike.
    """

    model: str
    prompt: Prompt
    sampling: SamplingParams
    slo: Slo | None = None
    priority: int = 0
    request_id: str | None = None
    resume: Resume | None = None
    prediction: str = ""
    cache_salt: str = ""

    def problems(self) -> Iterator[FieldProblem]:
        yield from model_problems(self.model, "model")
        yield from prompt_problems(self.prompt, "prompt")
        yield from self.sampling.problems("sampling")
        if self.slo is not None:
            yield from self.slo.problems("slo")
        yield from length_problems(self.prediction, MAX_DRAFT_CHARS, "prediction")
        yield from length_problems(self.cache_salt, MAX_CACHE_SALT_CHARS, "cache_salt")
        if abs(self.priority) > MAX_PRIORITY:
            yield FieldProblem("priority", f"must be from -{MAX_PRIORITY} to {MAX_PRIORITY}")
        if self.request_id is not None:
            yield from request_id_problems(self.request_id, "request_id")
        if self.resume is not None:
            yield from model_problems(self.resume.tier, "resume.tier")
            yield from token_id_problems(self.resume.token_ids, "resume.token_ids")
            yield from length_problems(self.resume.text, MAX_PROMPT_CHARS, "resume.text")


def request_id_problems(request_id: str, path: str) -> Iterator[FieldProblem]:
    if not 1 <= len(request_id) <= MAX_REQUEST_ID_CHARS:
        yield FieldProblem(path, f"must have 1 to {MAX_REQUEST_ID_CHARS} characters")
    elif not request_id.isprintable():
        yield FieldProblem(path, "must be printable")


def model_problems(model: str, path: str) -> Iterator[FieldProblem]:
    """The problems of a model name, before it is looked up."""
    if not model:
        yield FieldProblem(path, "must name a model: `cascade` or a tier")
    yield from length_problems(model, MAX_MODEL_CHARS, path)
