"""A smaller model in the engine's process that drafts for running replies, with KV blocks of its own."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from penstock.services.domain.randomness import uniform
from penstock.types.sampling import SamplingParams
from penstock.worker_service.engine.runner import Draft, ModelRunner, Row
from penstock.worker_service.scheduling.blocks import BlockPool
from penstock.worker_service.speculation.sources import DraftRequest

KNOWN_TOKENS = 8
"""With up to this many tokens without KV, drafting begins at once; more are computed as a prompt first."""
GREEDY = SamplingParams(temperature=0.0)


DraftLoop = Callable[[list[Draft], float], list[list[int]]]
"""Drafts for some sequences: the tokens of each, whose KV, but that of the last one, is in the pool then. A greedy draft ends
before the first token with less than this chance to be accepted."""


@runtime_checkable
class DraftsInLoop(Protocol):
    """A ModelRunner that may have a loop of its own for drafts."""

    def compiled_draft(self) -> DraftLoop | None: ...


@dataclass(slots=True)
class _State:
    """The KV that the model has for one reply: of its first `tokens` tokens, and of `draft` after them."""

    blocks: list[int] = field(default_factory=list)
    tokens: int = 0
    draft: list[int] = field(default_factory=list)


class DraftModel:
    """Drafts with one model. Not thread-safe: used by the engine's thread.

    A reply's state is dropped when it ends, or when another reply needs its blocks; it is computed again when it is drafted
    next.
    """

    known_tokens = KNOWN_TOKENS

    def __init__(self, runner: ModelRunner, blocks: int, *, max_context_tokens: int, max_step_tokens: int) -> None:
        """runner: of the model, with its compiled loop if it has one."""
        self._runner, self._max_context_tokens, self._max_step_tokens = runner, max_context_tokens, max_step_tokens
        self._pool = BlockPool(blocks, runner.kv_layout.block_tokens, reuse=False)
        self._states: dict[str, _State] = {}  # least recently drafted first
        self._loop = runner.compiled_draft() if isinstance(runner, DraftsInLoop) else None

    @property
    def compiled(self) -> bool:
        """Whether the compiled loop drafts."""
        return self._loop is not None

    def missing(self, request: DraftRequest) -> int:
        """How many tokens of the reply have no KV yet."""
        state = self._states.get(request.request_id)
        return len(request.tokens) - (self._standing(state, request.tokens) if state is not None else 0)

    def catch_up(self, requests: Sequence[DraftRequest]) -> None:
        """Compute the KV of tokens that are missing, at most max_step_tokens of them."""
        budget, active = self._max_step_tokens, {request.request_id for request in requests}
        rows = []
        for request in requests:
            state = self._state(request)
            count = min(budget, len(request.tokens) - 1 - state.tokens)
            if count < 1 or not self._reserve(state, state.tokens + count, active):
                continue
            part = request.tokens[state.tokens : state.tokens + count]
            rows.append(Row(part, state.tokens, list(state.blocks), 0, GREEDY, 0, sequence=request.request_id))
            state.tokens += count
            budget -= count
        if rows:
            self._runner.run(rows)

    def draft(self, requests: Sequence[DraftRequest], window: int, least: float = 0.0) -> list[list[int] | None]:
        """Up to `window` tokens for each request; None for one that has to catch up or has no room.

        least: a greedy draft of the compiled loop ends before the first token with less than this chance to be accepted.
        """
        active = {request.request_id for request in requests}
        drafts = dict[int, Draft]()
        for i, request in enumerate(requests):
            state = self._state(request)
            count = min(window, request.limit)
            known = request.tokens[state.tokens :]
            if len(known) > KNOWN_TOKENS or not self._reserve(state, len(request.tokens) + count - 1, active):
                continue
            sampling = request.sampling
            drafts[i] = Draft(
                tokens=list(known),
                start=state.tokens,
                blocks=state.blocks,
                temperature=0.0 if sampling.greedy else sampling.temperature or 1.0,
                top_p=sampling.top_p or 1.0,
                top_k=sampling.top_k or 0,
                chances=[uniform(sampling.seed or 0, request.offset + k) for k in range(count)],
            )
        if not drafts:
            return [None] * len(requests)
        if self._loop is not None:
            results = self._loop(list(drafts.values()), least)
        else:
            results = self._steps([requests[i] for i in drafts], list(drafts.values()))
        drafted = dict(zip(drafts, results, strict=True))
        for i, tokens in drafted.items():
            state = self._states[requests[i].request_id]
            state.tokens, state.draft = len(requests[i].tokens), tokens[:-1]  # the last one has no KV
        return [drafted.get(i) for i in range(len(requests))]

    def verify(self, requests: Sequence[DraftRequest], drafts: Sequence[Sequence[int]]) -> list[list[int] | None]:
        """The model's own tokens at the positions of each draft and after it; None where `draft` would give None.

        Each draft has at least one token. All are computed in one pass; what is accepted keeps its KV.
        """
        active = {request.request_id for request in requests}
        rows = dict[int, Row]()
        for i, (request, draft) in enumerate(zip(requests, drafts, strict=True)):
            state = self._state(request)
            known = request.tokens[state.tokens :]
            if len(known) > KNOWN_TOKENS or not self._reserve(state, len(request.tokens) + len(draft), active):
                continue
            rows[i] = Row(
                [*known, *draft],
                state.tokens,
                state.blocks,
                len(draft) + 1,
                request.sampling,
                request.offset,
                sequence=request.request_id,
            )
        verified: list[list[int] | None] = [None] * len(requests)
        if not rows:
            return verified
        for i, result in zip(rows, self._runner.run(list(rows.values())), strict=True):
            if result.error is not None:
                raise result.error
            request, draft = requests[i], drafts[i]
            state = self._states[request.request_id]
            state.tokens, state.draft = len(request.tokens), list(draft)
            verified[i] = list(result.tokens)
        return verified

    def forget(self, request_id: str) -> None:
        """Drop the state of a reply; no error if there is none."""
        state = self._states.pop(request_id, None)
        if state is not None:
            self._pool.release(state.blocks)

    def _steps(self, requests: Sequence[DraftRequest], drafts: Sequence[Draft]) -> list[list[int]]:
        """Draft with the runner, one step per token for all sequences."""
        results: list[list[int]] = [[] for _ in drafts]
        for k in range(max(len(draft.chances) for draft in drafts)):
            active = [i for i, draft in enumerate(drafts) if k < len(draft.chances)]
            rows = []
            for i in active:
                draft, request = drafts[i], requests[i]
                tokens = draft.tokens if k == 0 else results[i][-1:]
                start = draft.start if k == 0 else draft.start + len(draft.tokens) + k - 1
                offset, name = request.offset + k, request.request_id
                rows.append(Row(tokens, start, draft.blocks, 1, request.sampling, offset, sequence=name))
            for i, result in zip(active, self._runner.run(rows), strict=True):
                if result.error is not None:
                    raise result.error
                results[i].append(result.tokens[0])
        return results

    def _state(self, request: DraftRequest) -> _State:
        """The state of a reply, without drafted tokens that are not accepted; now the most recently used one."""
        state = self._states.pop(request.request_id, None) or _State()
        self._states[request.request_id] = state
        state.tokens, state.draft = self._standing(state, request.tokens), []
        return state

    @staticmethod
    def _standing(state: _State, tokens: Sequence[int]) -> int:
        """How many tokens of the reply have KV; the last one is computed again in any case."""
        count = 0
        for drafted, token in zip(state.draft, tokens[state.tokens :], strict=False):
            if drafted != token:
                break
            count += 1
        return min(state.tokens + count, len(tokens) - 1)

    def _reserve(self, state: _State, tokens: int, active: set[str]) -> bool:
        """Take blocks for so many tokens, if need be from the least recently drafted replies that are not active; False if
        there are too few or the model's context is too short."""
        missing = -(-tokens // self._pool.block_tokens) - len(state.blocks)
        if tokens > self._max_context_tokens:
            return False
        if missing <= 0:
            return True
        for request_id in [name for name in self._states if name not in active]:
            if missing <= self._pool.free:
                break
            self.forget(request_id)
        if missing > self._pool.free:
            return False
        state.blocks += self._pool.take(missing)
        return True
