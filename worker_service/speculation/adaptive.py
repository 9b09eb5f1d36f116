"""Drafts for the running replies of an engine with the chain and window that are predicted to be fastest. No I/O.

Models that fail are dropped one by one, so that chains become shorter; without any, the target computes alone.
"""

import itertools
import logging
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Protocol

from penstock.services.domain.slo.draft_windows import DraftPace
from penstock.services.domain.speculation.choice import ChainCandidate, Chooser, Estimate
from penstock.services.domain.speculation.estimates import SMOOTHING, Acceptance, DraftCost, PassCost
from penstock.worker_service.speculation.acceptance import matching
from penstock.worker_service.speculation.sources import DraftRequest, VerifiedStep

_log = logging.getLogger(__name__)

FIRST_LENGTH = 64
"""Tokens that a reply is expected to have before any has ended."""
NO_DRAFTS: tuple[tuple[str, ...], int] = ((), 0)
"""What `Drafter.current` is while nothing drafts."""


class DraftingModel(Protocol):
    """A model that drafts; see `worker_service.engine.draft_model.DraftModel`."""

    known_tokens: int
    """It drafts for replies of which at most so many tokens have no KV."""

    def missing(self, request: DraftRequest) -> int: ...

    def catch_up(self, requests: Seq[DraftRequest]) -> None: ...

    def draft(self, requests: Seq[DraftRequest], window: int, least: float = 0.0) -> Seq[Seq[int] | None]: ...

    def verify(self, requests: Seq[DraftRequest], drafts: Seq[Seq[int]]) -> Seq[Seq[int] | None]: ...

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
    def measured(
        cls, name: str, model: DraftingModel, cost: DraftCost, max_window: int, passes: PassCost | None = None
    ) -> "SpeculatingModel":
        """A model of which only the cost of drafting is known, and that of its passes where it can verify."""
        return cls(name, model, Estimate(Acceptance(max_window), cost, passes))


@dataclass(slots=True)
class _Draft:
    """A draft on its way through a chain, then the proposal of a step. model: the one whose tokens it has. window: how many
    there could have been."""

    request: DraftRequest
    model: SpeculatingModel
    window: int
    tokens: Seq[int]


class AdaptiveDrafter:
    """The `Drafter` of an engine."""

    def __init__(
        self, target: PassCost, models: Seq[SpeculatingModel], max_window: int, now: Callable[[], float]
    ) -> None:
        """models: small to large. now: seconds, monotonic."""
        self.models, self._now = list(models), now
        self.chooser = Chooser(target, [model.estimate for model in models], max_window)
        self.failures, self.current = 0, NO_DRAFTS
        self._drafted: dict[str, _Draft] = {}  # in the current step
        self._lengths = dict[str, int]()  # of running replies: output tokens at their last draft
        self._mean_length = float(FIRST_LENGTH)

    def pace(self, replies: int) -> DraftPace:
        """Of the chain that drafts now or, while none does, of the best one."""
        return self.chooser.pace(replies)

    def propose(self, requests: Seq[DraftRequest]) -> list[Seq[int]]:
        began_s = self._now()
        self._drafted.clear()
        self._lengths.update((r.request_id, r.offset) for r in requests)
        proposals: list[Seq[int]] = [()] * len(requests)
        replies, chooser = len(requests), self.chooser
        chooser.prompts = sum(len(r.tokens) - r.offset for r in requests) / (replies * self._mean_length)
        current = chooser.choose(replies, lambda m: self._prompt_tokens(self.models[m].model, requests))
        if current is None:
            self.current = NO_DRAFTS
        else:
            self.current = tuple(self.models[m].name for m in current.chain), current.window
            self._draft(requests, range(replies), current, chooser.least(replies), proposals, began_s)
        at = 0

        def missing(chain: Seq[int]) -> list[int]:
            nonlocal at
            counts = [[self.models[m].model.missing(request) for m in chain] for request in requests]
            at = min(range(replies), key=lambda i: sum(counts[i]))
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
            window = drafted.window if verified == len(drafted.tokens) else verified
            drafted.model.estimate.acceptance.observe(window, verified, accepted, step.replies)
            drafted.model.verified += verified
            drafted.model.accepted += accepted

    def forget(self, request_id: str) -> None:
        if length := self._lengths.pop(request_id, 0):
            self._mean_length += SMOOTHING * (length - self._mean_length)
        for speculating in self.models:
            speculating.model.forget(request_id)

    @staticmethod
    def _prompt_tokens(model: DraftingModel, requests: Seq[DraftRequest]) -> int:
        """What a model has to compute before it drafts for all of them."""
        counts = map(model.missing, requests)
        return sum(count for count in counts if count > model.known_tokens)

    def _draft(
        self,
        requests: Seq[DraftRequest],
        chosen: Seq[int],
        candidate: ChainCandidate,
        least: float,
        proposals: list[Seq[int]],
        began_s: float,
    ) -> None:
        """Draft for some of the requests, into `proposals`. The time since `began_s` is the price of the first model."""
        if not chosen:
            return
        chain = [self.models[m] for m in candidate.chain]
        drafts = self._first(chain[0], [requests[i] for i in chosen], candidate, least, began_s, len(requests))
        for lower, upper in itertools.pairwise(chain):
            verifiable = [draft for draft in drafts if draft.model is lower]
            if not verifiable or not self._verified(lower, upper, verifiable, len(requests)):
                break  # what the models below propose, if anything, goes to the target
        by_id = {draft.request.request_id: draft for draft in drafts}
        for i in chosen:
            draft = by_id.get(requests[i].request_id)
            if draft is not None and draft.tokens:
                proposals[i] = draft.tokens
                self._drafted[draft.request.request_id] = draft

    def _first(
        self,
        speculating: SpeculatingModel,
        requests: Seq[DraftRequest],
        candidate: ChainCandidate,
        least: float,
        began_s: float,
        replies: int,
    ) -> list[_Draft]:
        """The drafts of a chain's first model; none if it fails. They leave room for the tokens of those after it."""
        model, behind = speculating.model, len(candidate.chain) - 1
        try:
            if self._catch_up(model, requests):
                began_s = self._now()
            drafts = model.draft(requests, candidate.window, least)
        except Exception:
            self._drop(speculating)
            return []
        result = list[_Draft]()
        for request, tokens in zip(requests, drafts, strict=True):
            window = min(candidate.window, request.limit)
            if tokens:
                room = max(1, request.limit - behind)
                result.append(_Draft(request, speculating, window, tokens[:room] if behind else tokens))
            elif tokens is not None:  # the model is unsure of its first token already
                speculating.estimate.acceptance.observe(window, 0, 0, replies)
        drafted = sum(len(draft) for draft in drafts if draft)
        speculating.estimate.cost.observe(len(requests), drafted, self._now() - began_s)
        return result

    def _verified(self, lower: SpeculatingModel, upper: SpeculatingModel, drafts: Seq[_Draft], replies: int) -> bool:
        """Replace drafts by what the next model of the chain draws along them; False if it fails.

        A reply of which it has to compute more than a few tokens keeps its draft.
        """
        requests = [draft.request for draft in drafts]
        try:
            self._catch_up(upper.model, requests)
            began_s = self._now()
            results = upper.model.verify(requests, [draft.tokens for draft in drafts])
            seconds = self._now() - began_s
        except Exception:
            self._drop(upper)
            return False
        known = lower.estimate.accepted_by(self.models.index(upper))
        computed = 0
        for draft, own in zip(drafts, results, strict=True):
            if own is None:
                continue
            count = len(draft.tokens)
            accepted, _ = matching(draft.tokens, own)
            known.observe(count, count, accepted, replies)
            lower.verified, lower.accepted = lower.verified + count, lower.accepted + accepted
            tokens = own[: min(accepted + 1, draft.request.limit)]
            draft.tokens, draft.window, draft.model = tokens, len(tokens), upper
            computed += 1 + count
        if computed and upper.estimate.passes is not None:
            upper.estimate.passes.observe(len(drafts), computed, seconds)
        return True

    @staticmethod
    def _catch_up(model: DraftingModel, requests: Seq[DraftRequest]) -> bool:
        """Have a model compute prompts that it needs; whether there were any."""
        late = [request for request in requests if model.missing(request) > model.known_tokens]
        if late:
            model.catch_up(late)
        return bool(late)

    def _drop(self, dropped: SpeculatingModel) -> None:
        """Drop a model that failed."""
        self.failures += 1
        self.current = NO_DRAFTS
        index = self.models.index(dropped)
        self.chooser.remove(index)
        del self.models[index]
        _log.exception("draft model %s failed and is dropped", dropped.name)
