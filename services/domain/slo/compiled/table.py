"""The requests that the compiled scheduler plans for, by order of arrival. No I/O, no clock.

A worker keeps one table of its running requests. Only what changes is written between two steps, so that planning and
committing a step cost microseconds each, whatever the number of requests.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from penstock.services.compilation import compiled
from penstock.services.domain.slo.attainment import PACE_WINDOW_TOKENS
from penstock.services.domain.slo.compiled import admission, step
from penstock.services.domain.slo.compiled.certified_step import (
    ALONE,
    MOST_HELD,
    STATES,
    certified_step,
    certify_after,
    ended,
    may_end_s,
)
from penstock.services.domain.slo.compiled.layout import (
    AGAIN,
    BEST_EFFORT,
    CONTEXT,
    COUNTS,
    DECODING,
    DUE_S,
    KEPT_SHARE,
    KIND,
    LATE_PACES,
    LEFT,
    PENDING,
    PLACED,
    RELEASE_S,
    STANDARD,
    TIMES,
    TPOT_S,
    Certificate,
    Columns,
    F,
    Kv,
    N,
    StepModel,
)
from penstock.services.domain.slo.compiled.replay import AdmissionQuestion
from penstock.types.slo import SloClass

MAX_COUNTS = 1 << 16
"""Combinations of counts per pace in one decision: two arrays of this size are a megabyte."""
MAX_PACES = 16  # more are halved first, then the rarest neighbours share one
FIRST_CAPACITY = 64  # columns; doubled when they are full

# Rows of `pace`: tokens since the request came to this table, seconds that their paces allowed, and of the last tokens when
# each came less what was allowed until then (see `attainment`).
_TOKENS, _ALLOWED_S, _LEAD_S = 0, 1, 2
_PACE = _LEAD_S + PACE_WINDOW_TOKENS


@dataclass(frozen=True, slots=True)
class TableRequest:
    """A request as the scheduler sees it.

    due_s: when its next token is due, on the clock of the steps; infinite for none.
    tpot_s: its tightest pace; infinite for none.
    pending_tokens: to compute before its next token. context_tokens: whose KV is there. decoding: it has produced tokens.
    output_tokens: predicted, still to come, at least 1. again_tokens: after these, if the reply continues; 0 if it cannot.
    placed: it has a place in the batch, as every one that decodes has.
    """

    request_id: str
    pending_tokens: int
    output_tokens: int
    due_s: float = math.inf
    tpot_s: float = math.inf
    context_tokens: int = 0
    decoding: bool = False
    placed: bool = False
    again_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A copy of a table's columns, to decide on while a step is computed; `ids` by column."""

    ids: tuple[str, ...]
    counts: N
    times: F

    @classmethod
    def of(cls, requests: Sequence[TableRequest] = ()) -> "Snapshot":
        """The columns of promised requests."""
        counts, times = np.zeros((COUNTS, len(requests)), np.int64), np.zeros((TIMES, len(requests)))
        for at, request in enumerate(requests):
            _write(counts, times, at, request)
        return cls(tuple(request.request_id for request in requests), counts, times)


@dataclass(frozen=True, slots=True)
class Decision:
    """Who is admitted, by the candidates' order; when prompts may complete, by id, of those running and those admitted.

    replays: how many certificates were tried. kv_tokens: the most KV that the running requests under a promise and those
    admitted hold at any time; infinite where no certificate passed, so that no request is admitted. at_s: when the next step
    begins, as it was taken.
    """

    admitted: tuple[bool, ...]
    release_s: dict[str, float]
    replays: int
    kv_tokens: float
    at_s: float


class RequestTable:
    """Columns of the running requests. The loop is: `plan`, compute, `commit`."""

    def __init__(self) -> None:
        self._counts, self._times = np.zeros((COUNTS, FIRST_CAPACITY), np.int64), np.zeros((TIMES, FIRST_CAPACITY))
        self._pace = np.zeros((_PACE, FIRST_CAPACITY))
        self._grants = np.zeros(FIRST_CAPACITY, np.int64)
        self._certified, self._before = np.zeros(STATES), np.zeros(STATES)
        self.ids: list[str] = []

    @property
    def most_held(self) -> float:
        """The most KV tokens that the promised requests hold at any time, as far as that is certified."""
        return float(self._certified[MOST_HELD])

    def due_s(self, request_id: str) -> float:
        """When its next token is due. ValueError if it is not here."""
        return float(self._times[DUE_S, self.ids.index(request_id)])

    def append(self, request: TableRequest, slo_class: SloClass) -> None:
        """Add a request after all others. ValueError if its id is taken."""
        if request.request_id in self.ids:
            raise ValueError(f"{request.request_id} is here already")
        n = len(self.ids)
        if n == self._counts.shape[1]:
            self._counts, self._times, self._pace, self._grants = (
                np.concatenate([a, np.zeros_like(a)], axis=-1)
                for a in (self._counts, self._times, self._pace, self._grants)
            )
        _write(self._counts, self._times, n, request)
        self._pace[:, n], self._grants[n] = 0.0, 0
        if slo_class is SloClass.BEST_EFFORT:
            self._counts[KIND, n], self._counts[PLACED, n] = BEST_EFFORT, 1
        else:
            self._certified[:] = 0.0
        self.ids.append(request.request_id)

    def remove(self, request_id: str) -> None:
        """Take a request out; no error where it is not here."""
        if request_id not in self.ids:
            return
        at, n = self.ids.index(request_id), len(self.ids)
        if self._counts[KIND, at] == STANDARD:
            ended(self._certified, self._counts[LEFT, at])
        for a in (self._counts, self._times, self._pace):
            a[:, at : n - 1] = a[:, at + 1 : n]
        self._grants[at : n - 1] = self._grants[at + 1 : n]
        del self.ids[at]

    def place(self, request_id: str, context_tokens: int, pending_tokens: int) -> None:
        """A request has its place, and so many tokens whose KV is there already."""
        at = self.ids.index(request_id)
        self._counts[PLACED, at] = 1
        if (self._counts[CONTEXT, at], self._counts[PENDING, at]) != (context_tokens, pending_tokens):
            self._counts[CONTEXT, at], self._counts[PENDING, at] = context_tokens, pending_tokens
            ended(self._certified, 1)
            ended(self._before, 1)

    def plan(self, now_s: float, model: StepModel, kv: Kv, *, again: bool = False) -> float:
        """Plan the step that begins now, see `grants`; the seconds it is predicted to take, 0 for an empty step.

        again: instead of the step planned last.
        """
        if again:
            self._certified[:MOST_HELD] = self._before[:MOST_HELD]
        self._before[:] = self._certified
        return float(certified_step(now_s, self._columns(), len(self.ids), model, kv, self._certified, self._grants))

    def lengthen(self, end_s: float, aside: int, model: StepModel, kv: Kv) -> bool:
        """Whether all promises are kept if the planned step ends at `end_s` and holds `aside` tokens of KV more."""
        kv = Kv(kv.tokens - aside, kv.partial_tokens)
        passes = certify_after(end_s, self._columns(), len(self.ids), model, kv, self._certified, self._grants)
        self._certified[MOST_HELD] += aside if passes else 0
        return bool(passes)

    def may_end_s(self, end_s: float, accepted: Mapping[str, int], model: StepModel, kv: Kv) -> tuple[float, bool]:
        """When the tokens of the planned step may come, which has been computed by `end_s`; whether those accepted may, too.

        accepted: by request, how many drafted tokens are right.
        """
        counts = np.array([accepted.get(request_id, 0) for request_id in self.ids], np.int64)
        drafts = counts.any()
        end_s = may_end_s(end_s, self._columns(), len(self.ids), model, kv, self._certified, self._grants, counts)
        return float(end_s), bool(counts.any() == drafts)

    def _columns(self) -> Columns:
        return Columns(self._counts, self._times)

    def grants(self) -> list[int]:
        """Tokens of each column in the planned step."""
        planned: list[int] = self._grants[: len(self.ids)].tolist()
        return planned

    def yields(self) -> dict[str, float]:
        """When the tokens are due that the planned step yields under a promise, by request."""
        n = len(self.ids)
        counts, grants = self._counts[:, :n], self._grants[:n]
        yielding = (counts[KIND] == STANDARD) & (grants > 0) & (grants == counts[PENDING])
        return {self.ids[at]: float(self._times[DUE_S, at]) for at in np.flatnonzero(yielding)}

    def advance(self, request_id: str, tokens: int, end_s: float) -> None:
        """So many more tokens of a request count than the step had planned that was committed last and ended at `end_s`.

        The token after them is due a pace after that step, as without them, and within its window of ten gaps.
        """
        at = self.ids.index(request_id)
        self._counts[CONTEXT, at] += tokens
        self._counts[LEFT, at] -= tokens
        due_s, tpot_s, pace = float(self._times[DUE_S, at]), float(self._times[TPOT_S, at]), self._pace[:, at]
        if tpot_s == math.inf:
            return
        for _ in range(tokens):
            due_s = step.next_due_s(due_s, end_s, tpot_s, 1)
            _count_token(pace, end_s, tpot_s)
        self._times[DUE_S, at] = min(due_s, _window_due_s(pace, tpot_s))

    def commit(self, end_s: float, skipped: Sequence[str] = ()) -> None:
        """The planned step has ended; those skipped were not computed."""
        for request_id in skipped:
            if request_id in self.ids:
                self._grants[self.ids.index(request_id)] = 0
                ended(self._certified, 1)
        n = len(self.ids)
        _commit(end_s, self._counts, self._times, self._pace, n, self._grants)
        self._grants[:n] = 0

    def snapshot(self, planned: bool = False, end_s: float = 0.0) -> Snapshot:
        """A copy as things are now or, with `planned`, as they will be when the planned step ends at `end_s`."""
        n = len(self.ids)
        counts, times = self._counts[:, :n].copy(), self._times[:, :n].copy()
        if planned:
            _commit(end_s, counts, times, self._pace[:, :n].copy(), n, self._grants)
        outlived = (counts[KIND] == STANDARD) & (counts[LEFT] < 1)
        counts[LEFT, outlived] = np.maximum(1, counts[AGAIN, outlived])
        return Snapshot(tuple(self.ids), counts, times)

    def apply(self, decision: Decision) -> None:
        """Take over what was certified of the requests that are here, those admitted among them."""
        self._certified[:] = ALONE, decision.at_s, decision.kv_tokens
        for at, request_id in enumerate(self.ids):
            if request_id in decision.release_s:
                self._times[RELEASE_S, at] = decision.release_s[request_id]


def decide(now_s: float, snapshot: Snapshot, candidates: Sequence[TableRequest], model: StepModel, kv: Kv) -> Decision:
    """Decide on all candidates together (at most MAX_CANDIDATES; the rest is declined for now).

    now_s: when the next step begins. kv: what the requests under a promise in the snapshot and the candidates may hold
    together at any time. Releases the interpreter lock while it computes.
    """
    asking = list(candidates[: admission.MAX_CANDIDATES])
    new, running = Snapshot.of(asking), len(snapshot.ids)
    accepted, tpots_s = np.zeros(len(asking), np.int64), _paces(snapshot, new.times[TPOT_S])
    result = Certificate(np.full(running + len(asking), -np.inf), np.full(1, np.inf))
    question = AdmissionQuestion(
        now_s, Columns(snapshot.counts, snapshot.times), running, Columns(new.counts, new.times), model, kv
    )
    replays = admission.decide(question, tpots_s, accepted, result)
    admitted = [r.request_id for r, yes in zip(asking, accepted.tolist(), strict=True) if yes]
    released = dict(zip((*snapshot.ids, *admitted), result.release_s.tolist(), strict=False))
    answers = [*map(bool, accepted.tolist()), *[False] * (len(candidates) - len(asking))]
    return Decision(tuple(answers), released, replays, float(result.most_held[0]), now_s)


def _paces(snapshot: Snapshot, new_tpots_s: F) -> F:
    """The paces that the program tells apart, ascending: (L).

    Its states are the counts of accepted prompts per pace, at most MAX_COUNTS of them. Requests may have any number of paces,
    so close ones share the tightest of them, which is safe: the certificate replays each request with its own pace.
    """
    prompts = (snapshot.counts[KIND] == STANDARD) & (snapshot.counts[DECODING] == 0)
    entries = np.concatenate([snapshot.times[TPOT_S][prompts], new_tpots_s])
    tpots_s = np.unique(np.concatenate([snapshot.times[TPOT_S], new_tpots_s]))
    counts = np.bincount(np.searchsorted(tpots_s, entries), minlength=len(tpots_s))
    while np.log1p(counts).sum() > np.log(MAX_COUNTS):
        if len(tpots_s) > MAX_PACES:  # every second one, so that many paces cost little
            first = np.arange(0, len(tpots_s), 2)
            counts, tpots_s = np.add.reduceat(counts, first), tpots_s[first]
        else:
            at = int(np.argmin(counts[:-1] + counts[1:]))
            counts[at] += counts[at + 1]
            counts, tpots_s = np.delete(counts, at + 1), np.delete(tpots_s, at + 1)
    return tpots_s


def _write(counts: N, times: F, at: int, request: TableRequest) -> None:
    counts[KIND, at], counts[DECODING, at] = STANDARD, request.decoding
    counts[CONTEXT, at], counts[PENDING, at] = request.context_tokens, request.pending_tokens
    counts[LEFT, at], counts[AGAIN, at] = max(1, request.output_tokens), request.again_tokens
    counts[PLACED, at] = request.placed or request.decoding
    times[DUE_S, at], times[TPOT_S, at], times[RELEASE_S, at] = request.due_s, KEPT_SHARE * request.tpot_s, -np.inf


@compiled(error_model="numpy")
def _commit(end_s: float, counts: N, times: F, pace: F, requests: int, grants: N) -> None:
    """step.commit with measured times: a request that lags is due earlier, so that its window of ten gaps is still kept."""
    for i in range(requests):
        if grants[i] > 0 and grants[i] == counts[PENDING, i] and times[TPOT_S, i] < np.inf:
            _count_token(pace[:, i], end_s, times[TPOT_S, i])
    step.commit(end_s, counts, times, requests, grants)
    for i in range(requests):
        if grants[i] > 0 and counts[DECODING, i] == 1 and times[TPOT_S, i] < np.inf:
            times[DUE_S, i] = min(times[DUE_S, i], _window_due_s(pace[:, i], times[TPOT_S, i]))


@compiled(error_model="numpy")
def _count_token(pace: F, end_s: float, tpot_s: float) -> None:
    """A token of a request has come at `end_s`. pace: of its column."""
    k = int(pace[_TOKENS])
    pace[_TOKENS] = k + 1
    if k > 0:
        pace[_ALLOWED_S] += tpot_s / KEPT_SHARE
    pace[_LEAD_S + k % PACE_WINDOW_TOKENS] = end_s - pace[_ALLOWED_S]


@compiled(error_model="numpy")
def _window_due_s(pace: F, tpot_s: float) -> float:
    """When the next token is due for its window; infinite before the first one.

    So early that a step which ends late by LATE_PACES still keeps the window, however many before it were late. In a first
    window, by what `step.next_due_s` leaves: without late steps, this is never earlier than that.
    """
    k = int(pace[_TOKENS])
    oldest = _LEAD_S + max(0, k - PACE_WINDOW_TOKENS) % PACE_WINDOW_TOKENS
    late = min(LATE_PACES, min(k, PACE_WINDOW_TOKENS) * (1 - KEPT_SHARE))
    return pace[oldest] + pace[_ALLOWED_S] + (1 - late) * tpot_s / KEPT_SHARE if k > 0 else np.inf
