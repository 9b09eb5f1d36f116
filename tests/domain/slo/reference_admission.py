"""Which new requests are admitted, all of them decided together: the dynamic program of SLOs-Serve, section 3.2.1. No I/O.

This is the reference: plain, exact and slow. Workers and the simulator run its compiled form
(`services.domain.slo.compiled.admission`), which is held, as trying every subset is, to the same value and count.

Sets: requests i = 1..N by prefill deadline, ties by order of arrival; those running are forced in. Paces l = 1..L.
Variables: which new requests are accepted. State: last accepted request i, memory m, counts n = (n_1, .., n_L) per pace.
Objective: the greatest total value; of equals the greatest count; of equals the greatest budget left.
Constraints: memory m <= M; the prefill budget is never negative at the deadline of an accepted request; decodes fit.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from penstock.services.domain.latency import StepLatencyModel, StepLoad

BUDGET_TOLERANCE_TOKENS = 1e-6


@dataclass(frozen=True, slots=True)
class Tier:
    """One pace: seconds per output token, infinite for none; how many running requests decode at it."""

    tpot_s: float
    decoding: int = 0


@dataclass(frozen=True, slots=True)
class Committed:
    """A running request whose prompt is not computed yet: forced in.

    due_s: prefill deadline, from now. tokens: prompt tokens still to compute. tier: index of its pace.
    """

    due_s: float
    tokens: int
    tier: int


@dataclass(frozen=True, slots=True)
class PromiseCandidate:
    """A new request. memory: tokens of KV it will need at most. value: what attaining its SLO is worth."""

    due_s: float
    tokens: int
    tier: int
    memory: int = 0
    value: float = 1.0


@dataclass(frozen=True, slots=True)
class AdmittedCandidates:
    """accepted: indices of candidates, ascending; value and count of them."""

    accepted: tuple[int, ...]
    value: float

    @property
    def count(self) -> int:
        return len(self.accepted)


@dataclass(frozen=True, slots=True)
class BudgetModel:
    """How many prompt tokens per second can be computed in addition to decodes: the rate of PB*(t, n), equation 3.

    Batches are as large as the tightest pace t0 allows (Algorithm 2); in each, pace l takes n_l t0 / tpot_l tokens. So

        PB*(t, n) = t * (tokens that fit in t0 - sum over l of n_l t0 / tpot_l) / t0.

    The paper takes floor(t / t0) batches. That loses what lies between deadlines closer than a batch, so the rate is additive
    here, and what the program accepts is checked by a replay of the steps.

    max_step_tokens: of a step. context_tokens: mean context of a decode. reserve: best effort's share of each step.
    """

    tiers: tuple[Tier, ...]
    latency: StepLatencyModel
    max_step_tokens: int
    context_tokens: float = 0.0
    reserve: float = 0.0

    def tokens_per_s(self, counts: tuple[int, ...]) -> float:
        """Prompt tokens per second in addition to so many decodes per pace; negative if the decodes alone do not fit."""
        decoding = [(n, tier.tpot_s) for n, tier in zip(counts, self.tiers, strict=True) if n]
        step_s = min((tpot_s for _, tpot_s in decoding), default=math.inf)
        step_s = min(step_s, self.latency.base_s(self.max_step_tokens) / (1 - self.reserve))
        decodes = sum(n * step_s / tpot_s for n, tpot_s in decoding)
        context = StepLoad(1, round(self.context_tokens * decodes))
        fitting = self.latency.tokens_within((1 - self.reserve) * step_s, self.max_step_tokens - 1, context)
        return (fitting + 1 - decodes) / step_s


def admit(
    candidates: Sequence[PromiseCandidate],
    committed: Sequence[Committed],
    budget: BudgetModel,
    free_memory: int = 0,
) -> AdmittedCandidates | None:
    """The best set of candidates that can be admitted. None if those committed do not fit even by themselves.

    free_memory: tokens of KV that are not reserved.
    """
    tokens_per_s = functools.cache(budget.tokens_per_s)
    # Requests by prefill deadline; of equal deadlines the one that came first. (With a strict `pDDL_j < pDDL_i`, as printed,
    # requests that arrive together with equal deadlines exclude each other: Figure 3 would admit one.)
    entries: list[tuple[float, int, int, Committed | PromiseCandidate]] = [
        *((c.due_s, 0, i, c) for i, c in enumerate(committed)),
        *((c.due_s, 1, i, c) for i, c in enumerate(candidates)),
    ]
    entries.sort(key=lambda entry: entry[:3])
    start = tuple(tier.decoding for tier in budget.tiers)
    if tokens_per_s(start) < 0:
        return None
    # best[i][m, n]: the Pareto front of (value, budget, accepted) with i the last accepted; i = 0 is none, now.
    best: list[dict[tuple[int, tuple[int, ...]], list[tuple[float, float, tuple[int, ...]]]]] = [
        {(0, start): [(0.0, 0.0, ())]}
    ]
    times = [0.0, *(entry[0] for entry in entries)]
    for i, (due_s, _, index, request) in enumerate(entries, 1):
        extended: dict[tuple[int, tuple[int, ...]], list[tuple[float, float, tuple[int, ...]]]] = {}
        forced = isinstance(request, Committed)
        memory = 0 if isinstance(request, Committed) else request.memory
        value = 0.0 if isinstance(request, Committed) else request.value
        # DP[i, m, pb, n] = max over j before i, with no forced request between them, of
        #     DP[j, m - m_i, pb + p_i - PB*(pDDL_i - pDDL_j, n - 1), n - 1] + v_i
        # written forwards: with i accepted after j, pb_i = pb_j + PB*(pDDL_i - pDDL_j, n_j) - p_i must not be negative.
        for j in range(i - 1, -1, -1):
            for (used, counts), front in best[j].items():
                if used + memory > free_memory:
                    continue
                grown = tuple(n + (tier == request.tier) for tier, n in enumerate(counts))
                if tokens_per_s(grown) < 0:
                    continue
                gained = tokens_per_s(counts) * max(0.0, due_s - max(0.0, times[j]))
                for worth, left, accepted in front:
                    after = left + gained - request.tokens
                    chosen = accepted if forced else (*accepted, index)
                    if after >= -BUDGET_TOLERANCE_TOKENS:
                        _keep(extended.setdefault((used + memory, grown), []), (worth + value, after, chosen))
            if j > 0 and isinstance(entries[j - 1][3], Committed):
                break
        best.append(extended)
    last = max((i for i, entry in enumerate(entries, 1) if isinstance(entry[3], Committed)), default=0)
    ends = [label for states in best[last:] for front in states.values() for label in front]
    if not ends:
        return None
    value, _, accepted = max(ends, key=lambda label: (label[0], len(label[2]), label[1]))
    return AdmittedCandidates(tuple(sorted(accepted)), value)


def _keep(front: list[tuple[float, float, tuple[int, ...]]], label: tuple[float, float, tuple[int, ...]]) -> None:
    """Add a label unless one there is at least as good in value and budget; drop those that it beats."""
    if any(other[0] >= label[0] and other[1] >= label[1] for other in front):
        return
    front[:] = [other for other in front if other[0] > label[0] or other[1] > label[1]]
    front.append(label)
