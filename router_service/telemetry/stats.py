"""Counters of this router, for status and metrics."""

import asyncio
from collections import Counter, deque

from opentelemetry.metrics import Meter

from penstock.router_service.domain.events import RouterEvent
from penstock.services.counters import LabelledCounter
from penstock.services.domain.mesh_view import MeshView
from penstock.services.domain.plans import CASCADE_MODEL
from penstock.types.events import Escalated, Finished, InstanceChanged, Judged
from penstock.types.mesh_status import SloCounts
from penstock.types.replies import FinishReason
from penstock.types.slo import SloClass

RECENT = 1000  # number of requests in percentiles
RATE_WINDOW_S = 10.0
UNKNOWN_MODEL = "unknown"
"""Label of models that are not in the plan: clients choose these names, and each label uses memory until the process ends."""


class RouterStats:
    """Counters since the start, and recent times to first token."""

    def __init__(self, meter: Meter, view: MeshView) -> None:
        self._view = view
        self.finished = self.failed = self.rejected = self.failovers = self.migrations = 0
        self.answered: Counter[str] = Counter()  # by tier
        self.escalated: Counter[str] = Counter()  # by tier that was left
        self.accepted_draft_tokens: Counter[str] = Counter()  # by tier, of all its answers, like the next one
        self.rejected_draft_tokens: Counter[str] = Counter()
        self._ttft: deque[float] = deque(maxlen=RECENT)
        self._ends: deque[float] = deque(maxlen=RECENT)
        tier, model, outcome = "penstock.tier", "gen_ai.request.model", "penstock.outcome"
        self._requests = LabelledCounter(meter, "penstock.router.requests", (model, tier, outcome), unit="{request}")
        self._rejections = LabelledCounter(meter, "penstock.router.rejections", (), unit="{request}")
        self._failovers = LabelledCounter(meter, "penstock.router.failovers", (tier,), unit="{failover}")
        self._migrations = LabelledCounter(meter, "penstock.router.migrations", (tier,), unit="{migration}")
        escalations = (tier, "penstock.reason")
        self._escalations = LabelledCounter(meter, "penstock.router.escalations", escalations, unit="{escalation}")
        self._flagged = LabelledCounter(meter, "penstock.router.flagged", (tier,), unit="{answer}")
        self._judged = meter.create_histogram("penstock.router.score", unit="1")
        self._ttft_metric = meter.create_histogram("gen_ai.server.time_to_first_token", unit="s")
        self._duration = meter.create_histogram("gen_ai.server.request.duration", unit="s")
        self.slo = SloCounts()
        promises = (tier, "penstock.slo_class", "penstock.slo_attained")
        self._slo_requests = LabelledCounter(meter, "penstock.router.slo_requests", promises, unit="{request}")
        self._tokens = LabelledCounter(meter, "penstock.router.answer_tokens", (model, tier), unit="{token}")
        self._draft_tokens = LabelledCounter(meter, "penstock.router.draft_tokens", (tier, outcome), unit="{token}")

    def saw(self, event: RouterEvent, model: str) -> None:
        """Count an event of a request to `model`."""
        match event:
            case Judged(tier=tier, score=score) if score is not None:
                self._judged.record(score, {"penstock.tier": tier})
            case Escalated(from_tier=tier, reason=reason):
                self.escalated[tier] += 1
                self._escalations.add(1, tier, reason.value)
            case InstanceChanged(tier=tier, moved=True):
                self.migrations += 1
                self._migrations.add(1, tier)
            case InstanceChanged(tier=tier):
                self.failovers += 1
                self._failovers.add(1, tier)
            case Finished(reason=FinishReason.DECLINED):
                self._requests.add(1, self._label(model), event.tier, event.reason.value)
                self._saw_slo(event)
            case Finished():
                self._saw_slo(event)
                self._saw_drafts(event)
                self.finished += 1
                self.answered[event.tier] += 1
                if any(tier.flagged for tier in event.tiers):  # only the answer that is delivered can be
                    self._flagged.add(1, event.tier)
                label = self._label(model)
                labels = {"gen_ai.request.model": label, "penstock.tier": event.tier}
                self._requests.add(1, label, event.tier, event.reason.value)
                self._duration.record(event.total_s, labels)
                self._tokens.add(event.usage.output_tokens, label, event.tier)
                self._ends.append(asyncio.get_running_loop().time())
                if event.ttft_s is not None:
                    self._ttft.append(event.ttft_s)
                    self._ttft_metric.record(event.ttft_s, labels)

    def _saw_drafts(self, finished: Finished) -> None:
        for tier in finished.tiers:
            accepted, rejected = tier.usage.accepted_draft_tokens, tier.usage.rejected_draft_tokens
            if accepted or rejected:
                self.accepted_draft_tokens[tier.tier] += accepted
                self.rejected_draft_tokens[tier.tier] += rejected
                self._draft_tokens.add(accepted, tier.tier, "accepted")
                self._draft_tokens.add(rejected, tier.tier, "rejected")

    def _saw_slo(self, finished: Finished) -> None:
        if finished.slo is None:
            return
        slo_class, attained = finished.slo.slo_class, finished.slo.attained
        if slo_class is SloClass.STANDARD:
            ended = "attained" if attained else "broken"
        else:
            ended = "declined" if slo_class is None else "best_effort"
        self.slo += SloCounts(**{ended: 1})
        label = "declined" if slo_class is None else slo_class.value
        self._slo_requests.add(1, finished.tier, label, str(attained).lower())

    def promise_broken(self, tier: str) -> None:
        """A request failed after a worker had promised to keep its SLO."""
        self.slo += SloCounts(broken=1)
        self._slo_requests.add(1, tier, SloClass.STANDARD.value, "false")

    def failure(self, model: str, reason: str) -> None:
        """A request ended with an error other than overload, and not because its client left."""
        self.failed += 1
        self._requests.add(1, self._label(model), "", reason)

    def _label(self, model: str) -> str:
        """The model's name if the current plan has it, else UNKNOWN_MODEL."""
        plan = self._view.plan
        known = plan is not None and (model == CASCADE_MODEL or plan.tier(model) is not None)
        return model if known else UNKNOWN_MODEL

    def cancellation(self, model: str) -> None:
        """A request ended because its client left, or its deadline passed there."""
        self._requests.add(1, self._label(model), "", "cancelled")

    def rejection(self) -> None:
        """A request was refused because of overload, usually before its model was known; it may be retried."""
        self.rejected += 1
        self._rejections.add(1)

    def recent_ttft_s(self) -> tuple[float, ...]:
        """Times to first token of the last requests, in seconds."""
        return tuple(self._ttft)

    def requests_per_s(self) -> float:
        """Finished requests per second, over the last seconds."""
        now = asyncio.get_running_loop().time()
        return sum(1 for at in self._ends if now - at <= RATE_WINDOW_S) / RATE_WINDOW_S
