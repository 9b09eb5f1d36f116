"""What a client sees of its request, in order. No I/O."""

import enum
from collections.abc import Awaitable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from services.domain.plans import CASCADE_MODEL
from services.domain.requests import FinishReason, Prompt, SamplingParams, TokenFrame, TokenUsage
from services.domain.slo.promises import Promise, SloClass
from services.domain.tools import ToolCall
from services.domain.values import value_type


@dataclass(frozen=True, slots=True)
class Resume:
    """Continue after these tokens of this tier. text: of these tokens; needed if tools are offered."""

    tier: str
    token_ids: tuple[int, ...]
    text: str = ""


@value_type(frozen=True, slots=True)
class RouterRequest:
    """model: `cascade` or a tier's name. deadline_s: on the event loop's clock. streamed: the client gets tokens as they are
    generated. prediction: what the client thinks that the answer will be, in large part; empty for none.

    cache_salt: only requests with the same one share the KV of prompts that begin alike; the client's, until its tenant is
    known.
    may_be_sampled: whether the prompt may be stored, by consent of the caller's tenant, or of the mesh file where no keys are
    needed.
    """

    request_id: str
    model: str
    prompt: Prompt
    sampling: SamplingParams
    deadline_s: float
    promise: Promise | None = None
    priority: int = 0
    resume: Resume | None = None
    streamed: bool = True
    prediction: str = ""
    cache_salt: str = ""
    may_be_sampled: bool = False


class EscalationReason(enum.Enum):
    SCORE_BELOW_THRESHOLD = "score_below_threshold"
    JUDGE_UNAVAILABLE = "judge_unavailable"
    TIER_UNAVAILABLE = "tier_unavailable"
    PROMPT_TOO_LONG = "prompt_too_long"
    UNSUPPORTED_BY_MODEL = "unsupported_by_model"
    TOO_LATE = "too_late"
    SLO_DECLINED = "slo_declined"
    PREDICTED_SCORE_LOW = "predicted_score_low"
    REJECTED_EARLY = "rejected_early"
    TIE_NOT_ACCEPTED = "tie_not_accepted"


@value_type(frozen=True, slots=True)
class Accepted:
    """burst_step: that the request takes of the plan's burst ladder; None if none was chosen."""

    request_id: str
    plan_revision: int
    seed: int
    burst_step: int | None = None


@value_type(frozen=True, slots=True)
class TierStarted:
    tier: str
    instance_id: str


@value_type(frozen=True, slots=True)
class TierAdmitted:
    """slo_class: of a request with an SLO; None without one. It holds until the next event of this kind."""

    tier: str
    instance_id: str
    slo_kept: bool
    prompt_tokens: int
    max_output_tokens: int
    slo_class: SloClass | None = None


@dataclass(frozen=True, slots=True)
class TierDeclined:
    """An instance cannot keep the request's SLO."""

    tier: str
    instance_id: str
    reason: str


@value_type(frozen=True, slots=True)
class Answer:
    """Part of an accepted answer."""

    tier: str
    frame: TokenFrame


@dataclass(frozen=True, slots=True)
class Judged:
    """score: None if the judge could not be reached. reason: why the judge gave 0 without its scorer; otherwise empty.

    threshold: of the tier; for the last tier, the score below which an answer is flagged, 0 if none is. accepted: it is the
    answer that is delivered. flagged: the answer was returned although its score is below the threshold. better_tier: whose
    earlier answer is delivered instead; otherwise empty.
    """

    tier: str
    score: float | None
    threshold: float
    accepted: bool
    scorer: str
    reason: str = ""
    flagged: bool = False
    better_tier: str = ""


@dataclass(frozen=True, slots=True)
class Escalated:
    """predicted_score: for which the tier was passed over; None for other reasons."""

    from_tier: str
    to_tier: str
    reason: EscalationReason
    predicted_score: float | None = None


@dataclass(frozen=True, slots=True)
class InstanceChanged:
    """moved: with its KV, while it ran; otherwise the reply was recomputed up to `offset`."""

    tier: str
    from_instance_id: str
    to_instance_id: str
    offset: int
    reason: str
    moved: bool = False


@value_type(frozen=True, slots=True)
class TierSummary:
    """What one tier did for a request. score_reason, flagged: as in Judged; of an answer that was rejected early, the
    escalation's reason."""

    tier: str
    model: str
    instance_id: str
    score: float | None
    threshold: float | None
    accepted: bool
    usage: TokenUsage
    time_s: float
    score_reason: str = ""
    flagged: bool = False


@dataclass(frozen=True, slots=True)
class SloResult:
    """How a request with an SLO was served.

    slo_class: STANDARD if a worker of the answering tier ever promised to keep the SLO; None if the request was declined.
    first_token_late_s: 0 if it was in time, None if there was none. windows, late_windows: windows of ten tokens, and those
    that were slower than their pace.
    """

    slo_class: SloClass | None
    attained: bool
    first_token_late_s: float | None
    windows: int = 0
    late_windows: int = 0


@value_type(frozen=True, slots=True)
class Finished:
    """The last event. usage: of the answer. ttft_s: None if there was no token.

    slo: of a request with an SLO. tool_calls, content: if tools were offered, the answer's calls and its text without them;
    otherwise content is None. predicted: the score predicted for the answer of each tier, where tiers may be passed over by
    it; not for clients.
    """

    reason: FinishReason
    tier: str
    usage: TokenUsage
    tiers: tuple[TierSummary, ...]
    ttft_s: float | None
    total_s: float
    trace_id: str
    stop: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    content: str | None = None
    slo: SloResult | None = None
    predicted: Mapping[str, float] = field(default_factory=dict)


def is_cascade_workload(request: RouterRequest, event: Finished) -> bool:
    """Whether a finished request is workload to record: of the cascade, served by a tier, by this router from its start.

    Of a resumed request this router knows neither the arrival nor what was served before.
    """
    return request.model == CASCADE_MODEL and request.resume is None and bool(event.tiers)


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """There is no event yet; sent after `interval_s` without one."""

    interval_s: float


RouterEvent = (
    Accepted | TierStarted | TierAdmitted | TierDeclined | Answer | Judged | Escalated | InstanceChanged | Finished
)


class RequestOutput(Protocol):
    """The client's end of a request. `event` and `answer` are called in order, on the event loop, and must not block."""

    def event(self, event: RouterEvent) -> None:
        """Take any event except the answer."""
        ...

    def answer(self, tier: str, frame: TokenFrame) -> None:
        """Take a part of an accepted answer. Output that the client has not read is buffered here."""
        ...

    def sent(self) -> Awaitable[None]:
        """Return when the client has read enough for the request to give its place back."""
        ...
