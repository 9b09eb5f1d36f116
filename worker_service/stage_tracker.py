"""What an instance makes of its own load and its neighbours': its place, its boundary, and which requests should move.

No I/O: the view is fed from elsewhere and time is handed in (CascadeInfer, sections 3.1, 4.3 and 4.4). Nothing is central:
every instance decides for itself, from the records that its tier publishes.
"""

from dataclasses import dataclass, replace

from services.domain.instances import InstanceRecord, Load
from services.domain.mesh_view import MeshView
from services.domain.plans import TierPlan
from services.domain.stages import StageLayout
from services.domain.stages.advice import MoveAdvice, MoveReason
from services.domain.stages.bidding import Sender
from services.domain.stages.overload import excess_tokens, to_hand_over
from services.domain.stages.places import StagePlace, assign, outgrown_to, peers, successors
from services.domain.stages.refinement import averaged, refine

ADVICE_PAUSE_S = 1.0  # a request that was advised to move, and did not, is not named again before


@dataclass(slots=True)
class _Held:
    """A request that decodes here."""

    tokens: int
    quiet_until: float = float("-inf")


class StageTracker:
    """One instance's LoadTracker. `look` now and then; `advice` whenever a request has new tokens."""

    def __init__(self, instance_id: str, tier: str, view: MeshView, sender: Sender, *, refine_s: float) -> None:
        """refine_s: between two refinements of the boundary."""
        self._instance_id, self._tier, self._view, self._sender = instance_id, tier, view, sender
        self._refine_s = refine_s
        self._held: dict[str, _Held] = {}
        self._outlier: str | None = None  # the request that overload wants to hand over
        self._others: dict[str, StagePlace | None] = {}  # the tier at the last look
        self._layout: StageLayout | None = None
        self._boundary, self._refined_at = 0.0, 0.0
        self.place: StagePlace | None = None
        """The stage served; None while the plan has none for the tier."""
        self.draining = False

    def grew(self, request_id: str, tokens: int) -> None:
        """A request decodes here and is so long, prompt and output."""
        held = self._held.get(request_id)
        if held is None:
            self._held[request_id] = _Held(tokens)
        else:
            held.tokens = tokens

    def left(self, request_id: str) -> None:
        """A request has ended here, or has moved."""
        self._held.pop(request_id, None)
        self._withdraw(request_id)

    def advice(self, request_id: str, now: float) -> MoveAdvice | None:
        """Whether a request should move now; the same request is named again only after a pause."""
        held = self._held.get(request_id)
        if held is None or now < held.quiet_until:
            return None
        reason = self._reason(request_id, held.tokens)
        if reason is None:
            self._withdraw(request_id)
            return None
        held.quiet_until = now + ADVICE_PAUSE_S
        self._sender.offer(request_id, held.tokens)
        return MoveAdvice(reason, held.tokens, self._sender.tokens)

    def look(self, load: Load, now: float) -> None:
        """Take the place that the plan gives, refine the boundary if it is time, and see whether this is the outlier."""
        self._outlier = None
        others = {r.instance_id: r for r in self._view.workers(self._tier) if r.instance_id != self._instance_id}
        self._others = {i: record.place for i, record in others.items()}
        plan = self._view.plan
        tier = plan.tier(self._tier) if plan is not None else None
        if tier is None or not tier.stages:
            self.place = self._layout = None
            return
        self._take_place(StageLayout(tier.stages), now)
        self._refine(tier, others, load, now)
        self._compare(others, load, now)

    def _reason(self, request_id: str, tokens: int) -> MoveReason | None:
        place, others = self.place, self._others
        if self.draining:
            return MoveReason.DRAINING if others else None
        if place is None:
            return None
        if tokens >= place.to_tokens and outgrown_to(others, place.stage, tokens):
            return MoveReason.RANGE_CROSSED
        return MoveReason.OVERLOADED if request_id == self._outlier else None

    def _take_place(self, layout: StageLayout, now: float) -> None:
        current = {i: place.stage if place is not None else None for i, place in self._others.items()}
        current[self._instance_id] = self.place.stage if self.place is not None else None
        stage = assign(current, layout)[self._instance_id]
        if self.place is None or stage != self.place.stage or layout != self._layout:
            planned = layout.stages[stage]
            self.place = StagePlace(stage, planned.from_tokens, planned.to_tokens)
            self._boundary, self._refined_at = float(planned.to_tokens), now
        self._layout = layout

    def _refine(self, tier: TierPlan, others: dict[str, InstanceRecord], load: Load, now: float) -> None:
        assert self.place is not None
        if tier.qoe is None or now - self._refined_at < self._refine_s:
            return
        self._refined_at = now
        after = successors(self._others, self.place.stage)
        if not after:
            return
        held = [known.in_flight if (known := others[i].load) is not None else [] for i in after]
        found = refine(
            self._boundary,
            load.in_flight,
            averaged(held),
            tier.qoe,
            least=self.place.from_tokens + 1,
            most=tier.stages[min(self.place.stage + 1, len(tier.stages) - 1)].to_tokens - 1,
        )
        self._boundary = found.boundary
        self.place = replace(self.place, to_tokens=round(found.boundary))

    def _compare(self, others: dict[str, InstanceRecord], load: Load, now: float) -> None:
        assert self.place is not None
        demands = [known.tokens for i in peers(self._others, self.place.stage) if (known := others[i].load) is not None]
        excess = excess_tokens(load.tokens - self._sender.tokens, demands)
        movable = {i: h.tokens for i, h in self._held.items() if i not in self._sender and now >= h.quiet_until}
        self._outlier = to_hand_over(movable, excess)

    def _withdraw(self, request_id: str) -> None:
        if not self._sender.is_sending(request_id):
            self._sender.ended(request_id)
