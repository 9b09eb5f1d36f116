"""Who is admitted, all decided together (SLOs-Serve, section 3.2.1): the compiled program and trying every subset agree.

New requests are accepted or not; those committed are forced in. The greatest count wins, where memory suffices, the prefill
budget is never negative at a deadline, and decodes fit.
"""

import functools
import itertools
import math
import random
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from penstock.services.domain.latency import StepLatencyModel, StepLoad
from penstock.services.domain.slo.compiled.admission import Entries, Sets, best_sets
from penstock.services.domain.slo.compiled.layout import Kv, step_model
from penstock.services.domain.slo.compiled.table import (
    MAX_COUNTS,
    MAX_PACES,
    RequestTable,
    TableRequest,
    _paces,
    decide,
)
from penstock.types.slo import SloClass

SIX_PER_UNIT = StepLatencyModel.linear(0.0, 1 / 6, 0.0)
TOLERANCE = 1e-6


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
    """A new request. memory: tokens of KV it will need at most."""

    due_s: float
    tokens: int
    tier: int
    memory: int = 0


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


@dataclass(frozen=True)
class Case:
    candidates: list[PromiseCandidate]
    committed: list[Committed]
    budget: BudgetModel
    free_memory: int


def feasible(case: Case, chosen: tuple[int, ...], rate: Callable[[tuple[int, ...]], float] | None = None) -> bool:
    """The constraints, written out for one subset: budget at every deadline, decodes, memory."""
    rate = rate or case.budget.tokens_per_s
    if sum(case.candidates[i].memory for i in chosen) > case.free_memory:
        return False
    entries = [(c.due_s, 0, i, c.tokens, c.tier) for i, c in enumerate(case.committed)]
    entries += [(case.candidates[i].due_s, 1, i, case.candidates[i].tokens, case.candidates[i].tier) for i in chosen]
    counts = [tier.decoding for tier in case.budget.tiers]
    left, now_s = 0.0, 0.0
    if rate(tuple(counts)) < 0:
        return False
    for due_s, _, _, tokens, tier in sorted(entries):
        left += rate(tuple(counts)) * max(0.0, due_s - now_s) - tokens
        now_s = max(now_s, due_s)
        counts[tier] += 1
        if left < -TOLERANCE or rate(tuple(counts)) < 0:
            return False
    return True


def by_trying(case: Case) -> int | None:
    """The size of the largest subset."""
    every, rate = range(len(case.candidates)), functools.cache(case.budget.tokens_per_s)
    sets = [s for k in range(len(every) + 1) for s in itertools.combinations(every, k) if feasible(case, s, rate)]
    return max(map(len, sets), default=None)


def by_compiled(case: Case) -> int | None:
    tiers, budget = case.budget.tiers, case.budget
    entries: list[tuple[float, int, int, Committed | PromiseCandidate]] = []
    entries += [(c.due_s, 0, i, c) for i, c in enumerate(case.committed)]
    entries += [(c.due_s, 1, i, c) for i, c in enumerate(case.candidates)]
    entries.sort(key=lambda entry: entry[:3])
    n = len(case.candidates) + 1
    found = Sets(np.zeros(n), np.zeros(n, np.int64))
    rows = Entries(
        np.array([e[0] for e in entries], np.float64),
        np.array([e[3].tokens for e in entries], np.int64),
        np.array([e[3].tier for e in entries], np.int64),
        np.array([e[3].memory if isinstance(e[3], PromiseCandidate) else 0 for e in entries], np.int64),
        np.array([e[2] if e[1] else -1 for e in entries], np.int64),
    )
    sound = best_sets(
        rows,
        np.array([t.tpot_s for t in tiers], np.float64),
        np.array([t.decoding for t in tiers], np.int64),
        budget.context_tokens,
        case.free_memory,
        step_model(budget.latency, budget.max_step_tokens, budget.reserve),
        found,
    )
    if not sound:
        return None
    count = int(np.flatnonzero(found.left > -np.inf)[-1])
    assert feasible(case, tuple(i for i in range(len(case.candidates)) if int(found.bits[count]) >> i & 1))
    return count


def drawn(seed: int) -> Case:
    """Up to 8 new beside up to 3 committed; ties in deadlines, binding memory in part of the cases."""
    rng = random.Random(seed)
    latency = rng.choice(
        [SIX_PER_UNIT, StepLatencyModel.linear(0.2, 0.1, 0.001), StepLatencyModel((1, 8, 32), (1, 2, 9))]
    )
    tiers = tuple(Tier(t, rng.randint(0, 3)) for t in rng.sample([1.0, 1.5, 2.0, 3.0, 10.0], rng.randint(1, 3)))
    deadlines = [rng.choice([2.0, 4.0, 6.0, 6.0, 9.5, 12.0, 20.0]) for _ in range(11)]
    binding = rng.random() < 0.5
    candidates = [
        PromiseCandidate(
            deadlines[i],
            rng.randint(1, 24),
            rng.randrange(len(tiers)),
            rng.randint(0, 10) if binding else 0,
        )
        for i in range(rng.randint(1, 8))
    ]
    committed = [
        Committed(deadlines[8 + i], rng.randint(1, 12), rng.randrange(len(tiers))) for i in range(rng.randint(0, 3))
    ]
    budget = BudgetModel(tiers, latency, rng.choice([6, 16, 40]), rng.choice([0.0, 10.0]), rng.choice([0.0, 0.1]))
    return Case(candidates, committed, budget, rng.randint(5, 30) if binding else 0)


def test_the_program_and_every_subset_agree_in_count() -> None:
    """500 seeded cases; among them cases in which nobody fits, memory binds, and committed requests break by themselves."""
    outcomes = {"none": 0, "some": 0, "memory binds": 0, "not even those committed": 0}
    for seed in range(500):
        case = drawn(seed)
        expected = by_trying(case)
        assert by_compiled(case) == expected, seed
        if expected is None:
            outcomes["not even those committed"] += 1
            continue
        outcomes["some" if expected else "none"] += 1
        outcomes["memory binds"] += sum(c.memory for c in case.candidates) > case.free_memory
    assert min(outcomes.values()) >= 10, outcomes


def test_any_number_of_paces_takes_bounded_space_and_admits_nearly_as_a_few_do() -> None:
    """Clients choose paces: sixty different ones at once must not cost 2^60 states, nor admissions where they are close."""
    rng = np.random.default_rng(3)
    model = step_model(StepLatencyModel.linear(0.01, 1e-4, 1e-7), 512, 0.05)
    for many in (False, True):
        table, new = RequestTable(), list[TableRequest]()
        for i in range(160):
            tpot_s = (0.05, 0.1, 0.2)[i % 3] * (1 + (1e-6 * i if many else 0))
            if i < 100:
                decoding = TableRequest(f"r{i}", 1, 50, due_s=tpot_s, tpot_s=tpot_s, context_tokens=100, decoding=True)
                table.append(decoding, SloClass.STANDARD)
            else:
                new.append(TableRequest(f"n{i}", 300, 50, due_s=1.0 + 0.01 * i, tpot_s=tpot_s))
        snapshot = table.snapshot()
        decision = decide(0.0, snapshot, new, model, Kv(1e9, 0))
        if not many:
            expected = sum(decision.admitted)
        assert 0 < sum(decision.admitted) < len(new)
        assert sum(decision.admitted) >= 0.8 * expected, "paces that share one are taken to be the tightest of them"
        tpots_s = _paces(snapshot, rng.uniform(0.01, 1.0, 60))
        assert len(tpots_s) <= MAX_PACES
        assert tpots_s[0] <= 0.05, "the tightest of all stays: a pace is replaced by a tighter one only"
        assert np.all(np.diff(tpots_s) > 0)
        assert (60 / len(tpots_s) + 1) ** len(tpots_s) < 8 * MAX_COUNTS
    assert list(_paces(RequestTable().snapshot(), np.array([0.2, 0.1, 0.2]))) == [0.1, 0.2], "few are told apart"
