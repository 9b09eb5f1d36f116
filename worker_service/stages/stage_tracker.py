"""Decides the stage of an instance, its boundary, and which of its requests should move.

No I/O: the view and the time are arguments (CascadeInfer, sections 3.1, 4.3 and 4.4). Decentralised: every instance decides
for itself, from the records that its tier publishes.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from penstock.services.domain.instances import Load
from penstock.services.domain.mesh_view import MeshView
from penstock.services.domain.stages.bidding import Sender
from penstock.services.domain.stages.layout import StageLayout
from penstock.services.domain.stages.overload import excess_tokens, to_hand_over
from penstock.services.domain.stages.places import assign, neighbours, outgrown_to, peers, successors
from penstock.services.domain.stages.qoe import BatchLoad, InFlight
from penstock.services.domain.stages.refinement import averaged, refine
from penstock.services.domain.stages.worth import worth_moving
from penstock.types.mesh_status import StagePlace
from penstock.types.plans import QoeModel, TierPlan
from penstock.types.workers import MoveAdvice, MoveReason

ADVICE_PAUSE_S = 1.0  # time before advice for a request that did not move is repeated


@dataclass(slots=True)
class _TrackedRequest:
    """A request that is decoding here."""

    tokens: int
    input_tokens: int
    quiet_until: float = float("-inf")


class StageTracker:
    """Tracks the stage of one instance. Call `look` periodically, and `advice` whenever a request has new tokens."""

    def __init__(
        self,
        instance_id: str,
        tier: str,
        view: MeshView,
        sender: Sender,
        *,
        refine_s: float,
        move_s: Callable[[int], float | None] = lambda _: None,
    ) -> None:
        """refine_s: interval between refinements of the boundary. move_s: expected time of a move by the request's tokens;
        None while it is not known: then moves are advised whatever they take."""
        self._move_s = move_s
        self._qoe: QoeModel | None = None
        self._batch, self._batches = BatchLoad(), dict[str, BatchLoad]()  # of this instance and the others, at `look`
        self._instance_id, self._tier, self._view, self._sender = instance_id, tier, view, sender
        self._refine_s = refine_s
        self._requests: dict[str, _TrackedRequest] = {}
        self._outlier: str | None = None  # the request to move because of overload
        self._others: dict[str, StagePlace | None] = {}  # places of the other instances at the last `look`
        self._layout: StageLayout | None = None
        self._boundary, self._refined_at = 0.0, 0.0
        self.place: StagePlace | None = None
        """The stage of this instance; None if the plan has no stages for the tier."""
        self.draining = False
        self._turn = 0

    def sample(self) -> list[str]:
        """The instances whose load this one compares with its own next: others with each call, if the tier is large."""
        if self.place is None:
            return []
        self._turn += 1
        return neighbours(self._others, self._instance_id, self.place.stage, self._turn)

    def grew(self, request_id: str, tokens: int, input_tokens: int = 0) -> None:
        """Record the length of a decoding request, prompt and output, and of its prompt."""
        request = self._requests.get(request_id)
        if request is None:
            self._requests[request_id] = _TrackedRequest(tokens, input_tokens)
        else:
            request.tokens = tokens

    def left(self, request_id: str) -> None:
        """Remove a request that has ended or moved."""
        self._requests.pop(request_id, None)
        self._withdraw(request_id)

    def advice(self, request_id: str, now: float) -> MoveAdvice | None:
        """Advice to move a request, or None; repeated for the same request only after a pause."""
        request = self._requests.get(request_id)
        if request is None or now < request.quiet_until:
            return None
        reason, candidates = self._destination(request_id, request.tokens)
        if reason is not None:
            request.quiet_until = now + ADVICE_PAUSE_S
        if reason is None or not self._pays(request, candidates):
            self._withdraw(request_id)
            return None
        self._sender.offer(request_id, request.tokens)
        return MoveAdvice(reason, request.tokens, self._sender.tokens)

    def look(self, load: Load, now: float) -> None:
        """Update the stage from the plan, refine the boundary if it is time, and check for overload."""
        self._outlier = None
        others = [record for record in self._view.workers(self._tier) if record.instance_id != self._instance_id]
        self._others = {record.instance_id: record.place for record in others}
        loads = {record.instance_id: record.load for record in others if record.load is not None}
        plan = self._view.plan
        tier = plan.tier(self._tier) if plan is not None else None
        self._qoe = tier.qoe if tier is not None else None
        if self._qoe is not None:
            self._batch = BatchLoad.of(load.in_flight)
            self._batches = {i: BatchLoad.of(other.in_flight) for i, other in loads.items()}
        if tier is None or not tier.stages:
            self.place = self._layout = None
            return
        self._take_place(StageLayout(tier.stages), now)
        self._refine(tier, loads, load, now)
        self._compare(loads, load, now)

    def _destination(self, request_id: str, tokens: int) -> tuple[MoveReason | None, Sequence[str]]:
        """Why a request should move, if it should, and to which instances a move must pay."""
        place, others = self.place, self._others
        if self.draining:
            return MoveReason.DRAINING if others else None, ()
        if place is not None and tokens >= place.to_tokens and (further := outgrown_to(others, place.stage, tokens)):
            return MoveReason.RANGE_CROSSED, further
        if place is not None and request_id == self._outlier:
            return MoveReason.OVERLOADED, peers(others, place.stage)
        return None, ()

    def _pays(self, request: _TrackedRequest, candidates: Sequence[str]) -> bool:
        """Whether a move saves more time than it takes, as far as that and the load of the candidates are known."""
        takes_s = self._move_s(request.tokens)
        there = [self._batches[i] for i in candidates if i in self._batches]
        if takes_s is None or self._qoe is None or not there:
            return True
        return worth_moving(InFlight(request.tokens, request.input_tokens), self._batch, there, self._qoe, takes_s)

    def _take_place(self, layout: StageLayout, now: float) -> None:
        current = {i: place.stage if place is not None else None for i, place in self._others.items()}
        current[self._instance_id] = self.place.stage if self.place is not None else None
        stage = assign(current, layout)[self._instance_id]
        if self.place is None or stage != self.place.stage or layout != self._layout:
            planned = layout.stages[stage]
            self.place = StagePlace(stage, planned.from_tokens, planned.to_tokens)
            self._boundary, self._refined_at = float(planned.to_tokens), now
        self._layout = layout

    def _refine(self, tier: TierPlan, loads: dict[str, Load], load: Load, now: float) -> None:
        assert self.place is not None
        if tier.qoe is None or now - self._refined_at < self._refine_s:
            return
        self._refined_at = now
        next_stage = successors(self._others, self.place.stage)
        in_flight = [loads[i].in_flight for i in next_stage if i in loads]
        if not in_flight:
            return
        self._boundary = refine(
            self._boundary,
            load.in_flight,
            averaged(in_flight),
            tier.qoe,
            least=self.place.from_tokens + 1,
            most=tier.stages[min(self.place.stage + 1, len(tier.stages) - 1)].to_tokens - 1,
        )
        self.place = replace(self.place, to_tokens=round(self._boundary))

    def _compare(self, loads: dict[str, Load], load: Load, now: float) -> None:
        assert self.place is not None
        demands = [loads[i].tokens for i in peers(self._others, self.place.stage) if i in loads]
        excess = excess_tokens(load.tokens - self._sender.tokens, demands)
        movable = {i: h.tokens for i, h in self._requests.items() if i not in self._sender and now >= h.quiet_until}
        self._outlier = to_hand_over(movable, excess)

    def _withdraw(self, request_id: str) -> None:
        if not self._sender.is_sending(request_id):
            self._sender.ended(request_id)
