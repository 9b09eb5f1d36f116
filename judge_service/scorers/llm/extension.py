"""Language models that grade as an entry point: `llm`."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from penstock.judge_service.clients.tier_scorer import TierScorer
from penstock.judge_service.scoring.extension import ScorerSite
from penstock.judge_service.scoring.questions import REPLY_TOKENS
from penstock.services.mesh_schema import MeshFile, MeshScorer
from penstock.types.problems import FieldProblem

if TYPE_CHECKING:
    from penstock.judge_service.scorers.llm.scorer import LlmScorer

FIXED_BODY = ("model", "messages", "stream", "n", "logprobs", "top_logprobs", "max_tokens", "temperature")
OF_ENDPOINTS = frozenset({"api_key_env", "endpoint", "extra_body", "model"})


class Llm(TierScorer):
    """`llm`: a language model that is asked for a grade, a tier of the mesh or at an endpoint."""

    key_variable = "api_key_env"

    tier: str = ""
    """The tier of this mesh whose model grades the answers; replaces endpoint and model."""
    endpoint: str = ""
    """Base URL of an OpenAI-compatible API, including `/v1`."""
    model: str = ""
    """The model's name at the endpoint."""
    api_key_env: str = ""
    """Name of the environment variable that holds the endpoint's key. Empty: no key."""
    rubric: str = Field(default="", max_length=10_000)
    """What to look at when grading; added to the task."""
    asks: Literal["grade", "correct"] = "grade"
    """What the model is asked for: a digit from 0 to 9, or whether the answer is correct, and how probable it finds that."""
    thinking_tokens: int = Field(default=0, ge=0, le=65_536)
    """Tokens that a model may use to think (until `</think>`) before its grade."""
    extra_body: dict[str, Any] = Field(default={})
    """Further fields of the requests to an endpoint, such as `chat_template_kwargs: {enable_thinking: false}`."""

    def problems(self, scorer: MeshScorer, mesh: MeshFile) -> Iterator[FieldProblem]:
        yield from super().problems(scorer, mesh)
        if bool(self.tier) == bool(self.endpoint and self.model):
            yield FieldProblem("", "an llm scorer needs either tier, or endpoint and model")
        elif self.tier:
            for name in sorted(self.model_fields_set & OF_ENDPOINTS):
                yield FieldProblem(name, "is for an endpoint, and a tier grades: leave it out")
        elif "tier_share" in self.model_fields_set:
            yield FieldProblem("tier_share", "is for a tier, and an endpoint grades: leave it out")
        for name in FIXED_BODY:
            if name in self.extra_body:
                yield FieldProblem(f"extra_body.{name}", "is set by the scorer itself")

    def reading_tiers(self, site: ScorerSite) -> tuple[str, ...]:
        return (self.tier,) if self.tier else ()

    def cost(self) -> str:
        tokens = self.thinking_tokens + REPLY_TOKENS
        return f"a call of {self.tier or self.model} that reads prompt and answer and writes at most {tokens} tokens"

    def build(self, site: ScorerSite) -> "LlmScorer":
        from penstock.judge_service.scorers.llm.openai_chat import OpenAiChat
        from penstock.judge_service.scorers.llm.scorer import Chat, LlmScorer

        max_tokens = self.thinking_tokens + REPLY_TOKENS
        chat: Chat
        if self.tier:
            chat = self.chat(site, [self.tier], max_tokens=max_tokens)
        else:
            chat = OpenAiChat(
                self.endpoint,
                self.model,
                api_key=site.key(self.api_key_env),
                timeout_s=self.limit_s(site),
                max_tokens=max_tokens,
                extra_body=self.extra_body,
            )
        return LlmScorer(chat, concurrency=self.concurrency, rubric=self.rubric, asks=self.asks)
