"""What one tier has generated for one request: held until it is judged, or passed on."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from opentelemetry.trace import Span, StatusCode

from router_service.domain.events import (
    InstanceChanged,
    RouterRequest,
    TierAdmitted,
    TierStarted,
    TierSummary,
)
from router_service.generation.attempt import TierDone
from router_service.generation.reply_assembler import TierEvent
from router_service.telemetry.late_traces import PastSpan
from services.domain.errors import PenstockError
from services.domain.plans import TierPlan
from services.domain.requests import ChatPrompt, TokenFrame, TokenUsage

OnAnswer = Callable[[str, TokenFrame], None]
"""Takes the parts of an accepted answer and their tier, on the event loop, each after all events before it."""


@dataclass(slots=True)
class TierAnswer:
    """One tier's answer so far. Times are the event loop's, in seconds.

    held: for the judge; its frames are kept until it is accepted. answered_at: when the first token was passed on.
    with_logprobs: whether the client asked for them. texts: of an answer that is not held, if it may contain tool calls.
    """

    tier: TierPlan
    started_at: float
    span: Span
    held: bool
    with_logprobs: bool
    on_answer: OnAnswer
    texts: list[str] | None = None
    instance_id: str = ""
    frames: list[TokenFrame] = field(default_factory=list)
    answered_at: float | None = None
    begun: bool = False
    prompt_tokens: int = 0
    tool_format: str = ""
    done: TierDone | None = None
    score: float | None = None
    accepted: bool = False
    failure: str = ""
    ended_at: float = 0.0

    @property
    def text(self) -> str:
        return "".join(self.texts or ()) or "".join(frame.text for frame in self.frames)

    def saw(self, event: TierEvent) -> None:
        """Note what an event says about the answer."""
        match event:
            case TierStarted():
                self.instance_id = event.instance_id
            case InstanceChanged():
                self.instance_id = event.to_instance_id
                self.span.add_event("migration" if event.moved else "failover", {"penstock.offset": event.offset})
            case TierAdmitted():
                self.prompt_tokens = event.prompt_tokens

    def take(self, frame: TokenFrame) -> None:
        """Hold the next tokens, or pass them on."""
        if not self.begun:
            self.begun = True
            self.span.add_event("first token")
        if self.held:
            self.frames.append(frame)
            return
        if self.texts is not None:
            self.texts.append(frame.text)
        self._pass(frame)

    def release(self) -> None:
        """Pass on the tokens that were held."""
        for frame in self.frames:
            self._pass(frame)

    def _pass(self, frame: TokenFrame) -> None:
        """Pass tokens on, without logprobs that only the judge needs."""
        if self.answered_at is None and frame.token_ids:
            self.answered_at = asyncio.get_running_loop().time()
        if frame.logprobs and not self.with_logprobs:
            frame = replace(frame, logprobs=())
        self.on_answer(self.tier.name, frame)

    def end(self, error: BaseException | None = None) -> None:
        """The tier has completed its answer, or failed."""
        self.ended_at = asyncio.get_running_loop().time()
        if error is not None:
            self.failure = str(error) if isinstance(error, PenstockError) else "cancelled"
        if not self.span.is_recording():
            return
        if self.failure:
            self.span.set_status(StatusCode.ERROR, self.failure)
        self.span.set_attributes(self._attributes())
        self.span.end()

    def usage(self) -> TokenUsage:
        usage = self.done.usage if self.done is not None else TokenUsage()
        return usage if usage.prompt_tokens else replace(usage, prompt_tokens=self.prompt_tokens)

    def summary(self) -> TierSummary:
        return TierSummary(
            tier=self.tier.name,
            model=self.tier.model,
            instance_id=self.instance_id,
            score=self.score,
            threshold=self.tier.threshold,
            accepted=self.accepted,
            usage=self.usage(),
            time_s=self.ended_at - self.started_at,
        )

    def past(self) -> PastSpan:
        """For a trace made after the request's end."""
        return PastSpan(span_name(self.tier), self.started_at, self.ended_at, self._attributes(), self.failure)

    def _attributes(self) -> dict[str, str | float]:
        """Attributes of its span."""
        optional = {"penstock.score": self.score, "penstock.threshold": self.tier.threshold}
        return {
            "penstock.tier": self.tier.name,
            "penstock.instance_id": self.instance_id,
            "penstock.accepted": self.accepted,
            **{name: value for name, value in optional.items() if value is not None},
        }


def span_name(tier: TierPlan) -> str:
    return f"tier {tier.name}"


def offers_tools(request: RouterRequest) -> bool:
    """Whether the model may call tools."""
    return isinstance(request.prompt, ChatPrompt) and bool(request.prompt.tool_use.offered)
