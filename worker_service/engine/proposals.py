"""The proposed tokens of an engine's running requests: asks their sources, checks the answers, counts what is accepted."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from penstock.services.domain.slo.draft_windows import FIRST_PACE, DraftPace
from penstock.types.mesh_status import Drafting
from penstock.types.replies import FinishReason, PositionLogprobs
from penstock.worker_service.engine.interface import DraftCounts, SpeculationState
from penstock.worker_service.scheduling.batching import BatchScheduler
from penstock.worker_service.scheduling.steps import Chunk, StepPlan
from penstock.worker_service.speculation.sources import Drafter, DraftRequest, DraftSource, VerifiedStep
from penstock.worker_service.speculation.windows import RowShare, row_price
from penstock.worker_service.text.tokenizer import Tokenizer

_log = logging.getLogger(__name__)


RECENT_TOKENS = 512
"""Drafted tokens after which an older one counts for about a third in the share that is shown."""


@dataclass(frozen=True, slots=True)
class Continuation:
    """The tokens of a step that continue a reply, and their text.

    accepted: how many of them were proposed. reason: why the reply ends with them; None if it continues.
    """

    tokens: Sequence[int]
    accepted: int
    text: str
    logprobs: tuple[PositionLogprobs, ...]
    reason: FinishReason | None


class Proposals:
    """The draft sources of one engine. Without a source or a drafter, steps are planned as if there were none."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._ends, self._vocab_size = tokenizer.eos_ids, tokenizer.vocab_size
        self._sources: dict[str, DraftSource] = {}
        self._by_drafter: set[str] = set()  # requests whose proposal in this step is the drafter's
        self._watching = False  # whether there was a source or a drafter when the step was planned
        self.drafter: Drafter | None = None
        self.of_sources, self.of_drafter = DraftCounts(), DraftCounts()
        self._row_share = RowShare()
        self._accepted_share: float | None = None

    def state(self) -> SpeculationState:
        """The counts, and what drafts now. May be called by any thread."""
        failures = self.of_drafter.failures + (self.drafter.failures if self.drafter is not None else 0)
        counts = {"model": replace(self.of_drafter, failures=failures), "given": replace(self.of_sources)}
        return SpeculationState(counts, self.drafting())

    def drafting(self) -> Drafting | None:
        """What drafts now, for the engine's load; None without a drafter."""
        if self.drafter is None:
            return None
        chain, window = self.drafter.current
        return Drafting(chain, window, self._accepted_share)

    def row_price(self, replies: int) -> float:
        """What one more row costs a reply where so many share each pass; see `windows.row_price`. May be called by any
        thread."""
        return row_price(replies, self._row_share.value)

    def attach(self, request_id: str, source: DraftSource) -> None:
        """From now on, `source` proposes tokens of this request."""
        self._sources[request_id] = source

    def drafted(self, request_id: str) -> bool:
        """Whether what is proposed for a request in this step is a drafting model's, not its own source's."""
        return request_id in self._by_drafter

    def forget(self, request_id: str) -> None:
        """A request has ended or moved away; no error if it has no source."""
        self._sources.pop(request_id, None)
        if self.drafter is not None:
            self.drafter.forget(request_id)

    def added(self, plan: StepPlan, scheduler: BatchScheduler) -> StepPlan:
        """The step with the tokens that are proposed now."""
        self._by_drafter.clear()
        self._watching = bool(self._sources) or self.drafter is not None
        if not self._watching:
            return plan
        limits = scheduler.proposal_limits(plan, lambda: self._pace(len(plan.chunks)))
        proposals = dict[str, Sequence[int]]()
        undrafted = list[DraftRequest]()
        for chunk in plan.chunks:
            sequence = chunk.sequence
            limit = limits.get(sequence.request_id)
            if limit is None:
                continue
            if tokens := self._of_source(sequence.request_id, sequence.tokens, limit):
                proposals[sequence.request_id] = tokens
            elif chunk.count == 1:  # a model drafts behind a prompt once it has been computed here
                request = DraftRequest(
                    sequence.request_id, sequence.tokens, limit, sequence.sampling, sequence.output_tokens
                )
                undrafted.append(request)
        drafted = self._of_drafter(undrafted)
        self._by_drafter.update(drafted)
        return scheduler.propose(plan, proposals | drafted)

    def observe(
        self, continuations: Mapping[str, Continuation], chunks: Sequence[Chunk], rows: int, seconds: float
    ) -> None:
        """A step of these chunks has taken so many seconds, for `rows` tokens, and continued these requests."""
        if not self._watching:
            return
        verdicts = dict[str, tuple[int, int]]()
        for chunk in chunks:
            request_id, verified = chunk.sequence.request_id, len(chunk.proposed)
            continuation = continuations.get(request_id)
            if continuation is None:
                continue
            if request_id in self._sources:
                self._observed(request_id, continuation.accepted, continuation.tokens[-1])
            if not verified:
                continue
            drafted = self.drafted(request_id)
            (self.of_drafter if drafted else self.of_sources).add(verified, continuation.accepted)
            if drafted:
                self._count_share(verified, continuation.accepted)
            if drafted and continuation.reason is None:  # what comes after the end of a reply is not known
                verdicts[request_id] = (verified, continuation.accepted)
        decodes_only = all(chunk.count == 1 and chunk.logits for chunk in chunks)
        if decodes_only:
            self._row_share.add(rows, seconds)
        if self.drafter is None or not continuations:
            return
        step = VerifiedStep(len(continuations), rows, decodes_only, seconds, verdicts)
        try:
            self.drafter.observe(step)
        except Exception:
            self._drop_drafter()

    def _count_share(self, verified: int, accepted: int) -> None:
        """Add drafted tokens to the share of the last ones."""
        known = self._accepted_share
        share, weight = accepted / verified, min(1.0, verified / RECENT_TOKENS)
        self._accepted_share = share if known is None else known + weight * (share - known)

    def failed(self, request_id: str) -> None:
        """A pass with proposed tokens of this request has failed: its source is dropped."""
        if request_id in self._by_drafter:
            self.of_drafter.failures += 1
            return
        self._drop(request_id)

    def _pace(self, replies: int) -> DraftPace:
        """What drafts are worth now; FIRST_PACE of those that come with requests."""
        return self.drafter.pace(replies) if self.drafter is not None and replies else FIRST_PACE

    def _of_source(self, request_id: str, tokens: Sequence[int], limit: int) -> Sequence[int]:
        source = self._sources.get(request_id)
        if source is None:
            return ()
        try:
            return self._usable(source.propose(tokens, limit), limit)
        except Exception:
            self._drop(request_id)
            return ()

    def _of_drafter(self, requests: Sequence[DraftRequest]) -> dict[str, Sequence[int]]:
        if self.drafter is None or not requests:
            return {}
        try:
            drafts = self.drafter.propose(requests)
            pairs = zip(requests, drafts, strict=True)
            usable = {r.request_id: self._usable(tokens, r.limit) for r, tokens in pairs}
        except Exception:
            self._drop_drafter()
            return {}
        return {request_id: tokens for request_id, tokens in usable.items() if tokens}

    def _usable(self, tokens: Sequence[int], limit: int) -> Sequence[int]:
        """The tokens before the first one that cannot be verified.

        An end token is left out: if it is right, the verifier draws it after the tokens before it.
        """
        for i, token in enumerate(tokens):
            if i == limit or not 0 <= token < self._vocab_size or token in self._ends:
                return tokens[:i]
        return tokens

    def _observed(self, request_id: str, accepted: int, token: int) -> None:
        try:
            self._sources[request_id].observe(accepted, token)
        except Exception:
            self._drop(request_id)

    def _drop(self, request_id: str) -> None:
        """Drop a source that failed; its reply continues without it."""
        self.of_sources.failures += 1
        self._sources.pop(request_id, None)
        _log.warning("request %s: its draft source failed and is dropped", request_id, exc_info=True)

    def _drop_drafter(self) -> None:
        """Drop a drafter that failed; replies continue without it."""
        assert self.drafter is not None
        self.of_drafter.failures += 1 + self.drafter.failures
        self.drafter = None
        _log.exception("the drafter failed and is dropped")
