"""What a client sees of its request, in order."""

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

from penstock.types.replies import FinishReason, Usage
from penstock.types.slo import SloClass, SloResult
from penstock.types.tools import ToolCall
from penstock.types.values import value_type


class EscalationReason(enum.StrEnum):
    """Why a request goes to another tier."""

    SCORE_BELOW_THRESHOLD = "score_below_threshold"
    JUDGE_UNAVAILABLE = "judge_unavailable"
    TIER_UNAVAILABLE = "tier_unavailable"
    PROMPT_TOO_LONG = "prompt_too_long"
    UNSUPPORTED_BY_MODEL = "unsupported_by_model"
    TOO_LATE = "too_late"
    SLO_DECLINED = "slo_declined"
    PREDICTED_SCORE_LOW = "predicted_score_low"
    UNKNOWN = "unknown"  # of a later version


@value_type(frozen=True, slots=True)
class Accepted:
    """The router has accepted the request.

    heartbeat_interval_s: the longest time between two messages of the stream; None: not announced.
    """

    request_id: str
    plan_revision: int
    seed: int
    heartbeat_interval_s: float | None = None


@value_type(frozen=True, slots=True)
class TierStarted:
    """A tier has started on an answer."""

    tier: str
    instance_id: str


@value_type(frozen=True, slots=True)
class TierAdmitted:
    """An instance serves the request. max_output_tokens: limit of its reply.

    slo_kept: it promises to keep the SLO. slo_class: None without an SLO; it holds until the next event of this kind.
    """

    tier: str
    instance_id: str
    slo_kept: bool
    prompt_tokens: int
    max_output_tokens: int
    slo_class: SloClass | None = None


@dataclass(frozen=True, slots=True)
class TierDeclined:
    """An instance cannot keep the SLO. Another one is tried, or the next tier, or what the SLO's fallback says."""

    tier: str
    instance_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class Judged:
    """The judge's score of a tier's answer; None if it could not be scored.

    reason: why the judge gave 0 without its scorer, such as `truncated_answer`; otherwise empty. threshold: of the tier; for
    the last tier, the score below which an answer is flagged, 0 if none is. accepted: it is the answer that is delivered.
    flagged: the answer was returned although its score is below the threshold. better_tier: whose earlier answer is delivered
    instead, because it scored more; otherwise empty. uncalibrated: the scorer's scores are not shares of right answers.
    """

    tier: str
    score: float | None
    threshold: float
    accepted: bool
    scorer: str
    reason: str = ""
    flagged: bool = False
    better_tier: str = ""
    uncalibrated: bool = False


@dataclass(frozen=True, slots=True)
class Escalated:
    """The request goes to the next tier. predicted_score: for which the tier was passed over; None for other reasons."""

    from_tier: str
    to_tier: str
    reason: EscalationReason
    predicted_score: float | None = None


@dataclass(frozen=True, slots=True)
class InstanceChanged:
    """The reply continues on another instance at `offset`. moved: with its KV, while it ran; otherwise it was recomputed."""

    tier: str
    from_instance_id: str
    to_instance_id: str
    offset: int
    reason: str
    moved: bool = False


@value_type(frozen=True, slots=True)
class TierSummary:
    """The work of one tier on the request. score_reason, flagged, uncalibrated: as in Judged; of an answer that was rejected
    early, the escalation's reason."""

    tier: str
    model: str
    instance_id: str
    score: float | None
    threshold: float | None
    accepted: bool
    usage: Usage
    time_s: float
    score_reason: str = ""
    flagged: bool = False
    uncalibrated: bool = False


@value_type(frozen=True, slots=True)
class Finished:
    """The last event. usage: of the answer. ttft_s: None if there was no token.

    slo: of a request with an SLO. tool_calls, content: if tools were offered, the answer's calls and its text without them;
    otherwise content is None. stop: the stop string that ended the reply, if one did. predicted: the score predicted for the
    answer of each tier, where the plan passes tiers over by it.
    """

    reason: FinishReason
    tier: str
    usage: Usage
    tiers: tuple[TierSummary, ...]
    ttft_s: float | None
    total_s: float
    trace_id: str
    stop: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    content: str | None = None
    slo: SloResult | None = None
    predicted: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """There is no event yet; sent after `interval_s` without one."""

    interval_s: float


RequestEvent = Accepted | TierStarted | TierAdmitted | TierDeclined | Judged | Escalated | InstanceChanged | Finished
"""Of a request, except its tokens, which routers and clients have in forms of their own."""
