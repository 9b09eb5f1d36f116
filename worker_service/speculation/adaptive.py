"""Drafts for the running replies of an engine with the model and window that are predicted to be fastest. No I/O.

Models that fail are dropped one by one; without any, the target computes alone.
"""

import logging
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Protocol

from worker_service.speculation.choice import Candidate, Chooser, Estimate
from worker_service.speculation.estimates import Acceptance, DraftCost, PassCost
from worker_service.speculation.sources import DraftRequest, VerifiedStep

_log = logging.getLogger(__name__)

FIRST_LENGTH = 64
"""Tokens that a reply is expected to have before any has ended."""
LEAST_REMAINING = 8
"""Tokens that a reply is expected to have left, however long it is already."""


class DraftingModel(Protocol):
    """A model that drafts; see `worker_service.engine.torch.draft_model.DraftModel`."""

    known_tokens: int
    """It drafts for replies of which at most so many tokens have no KV."""

    def missing(self, request: DraftRequest) -> int: ...

    def catch_up(self, requests: Seq[DraftRequest]) -> None: ...

    def draft(self, requests: Seq[DraftRequest], window: int, least: float = 0.0) -> Seq[Seq[int] | None]: ...

    def forget(self, request_id: str) -> None: ...


@dataclass(slots=True)
class SpeculatingModel:
    """One model that drafts, and what is known of it. verified, accepted: tokens, since the start."""

    name: str
    model: DraftingModel
    estimate: Estimate
    verified: int = 0
    accepted: int = 0

    @classmethod
    def measured(cls, name: str, model: DraftingModel, cost: DraftCost, max_window: int) -> "SpeculatingModel":
        """A model of which only the cost of drafting is known."""
        return cls(name, model, Estimate(Acceptance(max_window), cost))


@dataclass(frozen=True, slots=True)
class _Drafted:
    """A draft of the current step. window: how long it could have been; tokens: how long it is."""

    model: SpeculatingModel
    window: int
    tokens: int


class AdaptiveDrafter:
    """The `Drafter` of an engine."""

    def __init__(
        self, target: PassCost, models: Seq[SpeculatingModel], max_window: int, now: Callable[[], float]
    ) -> None:
        """now: seconds, monotonic."""
        self.models, self._now = list(models), now
        self.chooser = Chooser(target, [model.estimate for model in models], max_window)
        self.failures, self.current = 0, ("", 0)
        self._drafted: dict[str, _Drafted] = {}
        self._offsets: dict[str, int] = {}  # output tokens of running replies, as of their last draft request
        self._mean_length = float(FIRST_LENGTH)

    def propose(self, requests: Seq[DraftRequest]) -> list[Seq[int]]:
        began_s = self._now()
        self._drafted.clear()
        self._offsets.update((request.request_id, request.offset) for request in requests)
        proposals: list[Seq[int]] = [()] * len(requests)
        replies, chooser = len(requests), self.chooser
        current = chooser.choose(replies)
        self.current = (self.models[current.model].name, current.window) if current is not None else ("", 0)
        if current is not None:
            least, saved_s = chooser.least(replies), chooser.saved_s(replies)
            worth = [i for i, request in enumerate(requests) if self._pays(request, current, saved_s)]
            self._draft(requests, worth, current, least, proposals, began_s)
        at = 0

        def missing(model: int) -> int:
            nonlocal at
            counts = [self.models[model].model.missing(request) for request in requests]
            at = min(range(replies), key=counts.__getitem__)
            return counts[at]

        explored = chooser.explore(replies, missing)
        if explored is not None:
            self._draft(requests, [at], explored, 0.0, proposals, self._now())
        return proposals

    def observe(self, step: VerifiedStep) -> None:
        if step.decodes_only:
            self.chooser.target.observe(step.replies, step.rows, step.seconds)
        for request_id, (verified, accepted) in step.accepted.items():
            drafted = self._drafted.get(request_id)
            if drafted is None:
                continue
            # Where less was verified than drafted (no room, or an end token), nothing is known of what follows.
            window = drafted.window if verified == drafted.tokens else verified
            drafted.model.estimate.acceptance.observe(window, verified, accepted, step.replies)
            drafted.model.verified += verified
            drafted.model.accepted += accepted

    def forget(self, request_id: str) -> None:
        length = self._offsets.pop(request_id, None)
        if length is not None:
            self._mean_length += 0.1 * (length - self._mean_length)
        for speculating in self.models:
            speculating.model.forget(request_id)

    def _pays(self, request: DraftRequest, candidate: Candidate, saved_s: float) -> bool:
        """Whether the tokens that the reply still has save more time than computing its prompt takes."""
        speculating = self.models[candidate.model]
        missing = speculating.model.missing(request)
        if missing <= speculating.model.known_tokens:
            return True
        remaining = max(LEAST_REMAINING, self._mean_length - request.offset)
        return speculating.estimate.cost.catch_up_s(missing) <= saved_s * remaining

    def _draft(
        self,
        requests: Seq[DraftRequest],
        chosen: Seq[int],
        candidate: Candidate,
        least: float,
        proposals: list[Seq[int]],
        began_s: float,
    ) -> None:
        """Draft for some of the requests, into `proposals`. The time since `began_s` is the price."""
        if not chosen:
            return
        speculating = self.models[candidate.model]
        model, own = speculating.model, [requests[i] for i in chosen]
        try:
            late = [request for request in own if model.missing(request) > model.known_tokens]
            if late:
                model.catch_up(late)
                began_s = self._now()
            drafts = model.draft(own, candidate.window, least)
        except Exception:
            self._drop(candidate.model)
            return
        for i, request, draft in zip(chosen, own, drafts, strict=True):
            window = min(candidate.window, request.limit)
            if draft:
                proposals[i] = draft
                self._drafted[request.request_id] = _Drafted(speculating, window, len(draft))
            elif draft is not None:  # the model is unsure of its first token already
                speculating.estimate.acceptance.observe(window, 0, 0, len(requests))
        drafted = sum(len(draft) for draft in drafts if draft)
        speculating.estimate.cost.observe(len(own), drafted, self._now() - began_s)

    def _drop(self, model: int) -> None:
        """Drop a model that failed."""
        self.failures += 1
        self.current = ("", 0)
        self.chooser.remove(model)
        dropped = self.models.pop(model)
        _log.exception("draft model %s failed and is dropped", dropped.name)
