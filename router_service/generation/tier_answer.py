"""What one tier has generated for one request: held until it is judged, or passed on."""

import asyncio
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from opentelemetry.trace import Span, StatusCode

from penstock.router_service.domain.events import RouterRequest
from penstock.router_service.domain.reply_promise import ReplyPromise
from penstock.router_service.generation.reply_assembler import TierEvent
from penstock.router_service.telemetry.late_traces import PastSpan
from penstock.services.domain.errors import PenstockError
from penstock.services.domain.slo.attainment import AttainmentTracker
from penstock.services.reasoning import ReasoningParser
from penstock.types.events import InstanceChanged, TierAdmitted, TierStarted, TierSummary
from penstock.types.plans import TierPlan
from penstock.types.prompts import ChatPrompt
from penstock.types.replies import FinishReason, TokenFrame, Usage
from penstock.types.requests import Draft
from penstock.types.slo import SloClass, SloResult
from penstock.types.values import replaced
from penstock.types.workers import EngineFinished

OnAnswer = Callable[[str, TokenFrame], None]
"""Takes the parts of an accepted answer and their tier, on the event loop, each after all events before it."""


@dataclass(slots=True)
class TierAnswer:
    """One tier's answer so far. Times are the event loop's, in seconds.

    held: for the judge; its frames are kept until it is delivered or dropped. stored: passed on, and also stored to be
    judged at its end. answered_at: when the first token was passed on. with_logprobs: whether the client asked for them.
    texts: of an answer that is not held, if it may contain tool calls. score_reason, flagged, uncalibrated: as in Judged.
    output_tokens: of all frames. promise: the SLO of the tier's reply; None without one. first_token_at: when it came from
    the worker. tokenizer_digest: of the model that began it. reasoning: separates the answer of a model that reasons.
    predicted: as in Finished. better: an earlier answer of
    the request, delivered instead of this one, which would have been accepted. ended_ns: Unix time at which it ended; its
    span ends then, too.
    """

    tier: TierPlan
    started_at: float
    span: Span
    held: bool
    stored: bool
    with_logprobs: bool
    on_answer: OnAnswer
    texts: list[str] | None = None
    instance_id: str = ""
    frames: list[TokenFrame] = field(default_factory=list)
    answered_at: float | None = None
    promise: ReplyPromise | None = None
    predicted: Mapping[str, float] = field(default_factory=dict)
    first_token_at: float | None = None
    prompt_tokens: int = 0
    tool_format: str = ""
    tokenizer_digest: str = ""
    reasoning: ReasoningParser | None = None
    done: EngineFinished | None = None
    score: float | None = None
    score_reason: str = ""
    flagged: bool = False
    uncalibrated: bool = False
    accepted: bool = False
    better: "TierAnswer | None" = None
    output_tokens: int = 0
    failure: str = ""
    ended_at: float = 0.0
    ended_ns: int = 0

    @property
    def text(self) -> str:
        return "".join(self.texts or ()) or "".join(frame.text for frame in self.frames)

    def as_draft(self) -> Draft | None:
        """What a larger model gets of an answer that was held, complete or not; None if there is nothing."""
        if not self.text:
            return None
        token_ids = tuple(token for frame in self.frames for token in frame.token_ids)
        return Draft(self.text, token_ids if self.tokenizer_digest else (), self.tokenizer_digest).limited

    @property
    def content(self) -> str:
        """The text without its reasoning."""
        text = self.text
        if self.reasoning is None:
            return text
        parser = self.reasoning.copy()
        return parser.push(text)[1] + parser.finish()[1]

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
                if event.slo_class is not None:
                    self.span.add_event("admitted", {"penstock.slo_class": event.slo_class.value})

    def take(self, frame: TokenFrame) -> None:
        """Hold the next tokens, or pass them on."""
        self.output_tokens += len(frame.token_ids)
        if self.promise is not None:
            self.promise.take(frame, asyncio.get_running_loop().time())
        if self.first_token_at is None:
            self.first_token_at = asyncio.get_running_loop().time()
            self.span.add_event("first token")
        if self.held:
            self.frames.append(frame)
            return
        if self.stored:
            self.frames.append(frame)
        if self.texts is not None:
            self.texts.append(frame.text)
        self._pass(frame)

    def release(self) -> None:
        """Pass on the tokens that were held."""
        for frame in self.frames if self.held else ():
            self._pass(frame)

    def drop(self) -> None:
        """Free the tokens that were held, and end the span: the answer is not delivered."""
        self.frames = []
        self.end_span()

    def _pass(self, frame: TokenFrame) -> None:
        """Pass tokens on, without logprobs that only the judge needs."""
        if self.answered_at is None and frame.token_ids:
            self.answered_at = asyncio.get_running_loop().time()
        if frame.logprobs and not self.with_logprobs:
            frame = replaced(frame, logprobs=())
        self.on_answer(self.tier.name, frame)

    def end(self, error: BaseException | None = None) -> None:
        """The tier has completed its answer, or failed.

        The span of a complete answer ends when it is dropped or delivered: only then is known whether it is accepted.
        """
        self.ended_at, self.ended_ns = asyncio.get_running_loop().time(), time.time_ns()
        if error is not None:
            self.failure = str(error) if isinstance(error, PenstockError) else "cancelled"
            self.end_span()

    def end_span(self) -> None:
        """End the span at the time at which the answer ended. Has no effect on a span that has ended."""
        if not self.span.is_recording():
            return
        if self.failure:
            self.span.set_status(StatusCode.ERROR, self.failure)
        self.span.set_attributes(self._attributes())
        self.span.end(self.ended_ns)

    @property
    def declined(self) -> bool:
        """Whether no instance of the tier could keep the SLO, and the reply was not to be best effort."""
        return self.done is not None and self.done.reason is FinishReason.DECLINED

    def slo_result(self, due_s: float | None) -> SloResult | None:
        """How the request was served that this answers; None without an SLO. due_s: when the answer's first token was due."""
        if self.promise is None:
            return None
        if self.declined:
            return SloResult(None, attained=False, first_token_late_s=None)
        slo_class = SloClass.STANDARD if self.promise.promised else SloClass.BEST_EFFORT
        attainment = self.promise.attainment
        if self.held:  # the client gets all of it at once, when it is accepted
            tracker = AttainmentTracker(due_s)
            if self.answered_at is not None:
                tracker.token(self.answered_at, None)
            attainment = tracker.result()
        late_s = None if math.isinf(attainment.first_token_late_s) else attainment.first_token_late_s
        return SloResult(slo_class, attainment.attained, late_s, attainment.windows, attainment.late_windows)

    def usage(self) -> Usage:
        usage = self.done.usage if self.done is not None else Usage()
        return usage if usage.prompt_tokens else replaced(usage, prompt_tokens=self.prompt_tokens)

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
            score_reason=self.score_reason,
            flagged=self.flagged,
            uncalibrated=self.uncalibrated,
        )

    def past(self) -> PastSpan:
        """For a trace made after the request's end."""
        return PastSpan(span_name(self.tier), self.started_at, self.ended_at, self._attributes(), self.failure)

    def _attributes(self) -> dict[str, str | float]:
        """Attributes of its span."""
        slo_class = self.promise.slo_class if self.promise is not None else None
        usage = self.usage()
        has_drafts = usage.accepted_draft_tokens or usage.rejected_draft_tokens
        attributes: dict[str, str | float | None] = {
            "penstock.tier": self.tier.name,
            "penstock.instance_id": self.instance_id,
            "penstock.accepted": self.accepted,
            "penstock.flagged": self.flagged or None,
            "penstock.better_tier": self.better.tier.name if self.better is not None else None,
            "penstock.accepted_draft_tokens": usage.accepted_draft_tokens if has_drafts else None,
            "penstock.rejected_draft_tokens": usage.rejected_draft_tokens if has_drafts else None,
            "penstock.score": self.score,
            "penstock.threshold": self.tier.threshold,
            "penstock.slo_class": slo_class.value if slo_class is not None else None,
        }
        return {name: value for name, value in attributes.items() if value is not None}


def span_name(tier: TierPlan) -> str:
    return f"tier {tier.name}"


def offers_tools(request: RouterRequest) -> bool:
    """Whether the model may call tools."""
    return isinstance(request.prompt, ChatPrompt) and bool(request.prompt.tool_use.offered)


def resumed_ids(request: RouterRequest, tier: TierPlan) -> tuple[int, ...] | None:
    """The tokens after which a tier's reply continues; None if it is not resumed."""
    if request.resume is None or request.resume.tier != tier.name:
        return None
    return request.resume.token_ids
