"""Chains of more than one drafting model: what is chosen, what the target sees, what failures and exploring cost."""

import itertools
import random
from collections.abc import Sequence as Seq
from dataclasses import replace

import pytest

from penstock.services.domain.speculation.choice import (
    EXPLORED_SHARE,
    ChainCandidate,
    Estimate,
    best,
    candidates,
    chains,
    tokens_per_s,
    windows,
)
from penstock.services.domain.speculation.estimates import Acceptance, DraftCost, PassCost
from penstock.worker_service.speculation.acceptance import matching
from penstock.worker_service.speculation.sources import DraftRequest
from tests.worker.test_speculation_choice import MAX_WINDOW, VirtualMachine, VirtualModel, draft_cost, learned

REPLIES, WIDTHS = (1, 8, 64), (1, 2, 4, 8)


def passes(fixed_s: float, row_s: float) -> PassCost:
    return PassCost({(n, w): fixed_s + row_s * n * w for n in REPLIES for w in WIDTHS})


def test_chains_are_all_subsets_in_which_each_model_behind_the_first_can_verify() -> None:
    able = [Estimate(Acceptance(3), draft_cost(1e-5), passes(1e-3, 1e-5)) for _ in range(3)]
    assert chains(able) == [(0,), (1,), (2,), (0, 1), (0, 2), (1, 2), (0, 1, 2)]
    able[1] = Estimate(Acceptance(3), draft_cost(1e-5))
    assert chains(able) == [(0,), (1,), (2,), (0, 2), (1, 2)]
    assert all(c.window + len(c.chain) - 1 <= 3 for c in candidates(able, windows(3)))


@pytest.mark.parametrize("replies", [1, 8, 64])
@pytest.mark.parametrize("seed", range(12))
def test_the_choice_among_chains_is_the_enumerated_optimum(replies: int, seed: int) -> None:
    """Three models of random cost and acceptance, by the formula written out: the sum over how far a draft comes."""
    rng = random.Random(seed)
    target = passes(rng.uniform(2e-3, 2e-2), 2e-5)
    models = [
        Estimate(
            learned(rng.uniform(0.3, 0.95)), draft_cost(rng.choice([5e-6, 2e-4])), passes(rng.uniform(1e-4, 2e-3), 1e-5)
        )
        for _ in range(3)
    ]
    for lower, upper in itertools.combinations(range(3), 2):
        models[lower].by[upper] = learned(rng.uniform(0.3, 0.99))
    rates: dict[ChainCandidate | None, float] = {None: replies / target.seconds(replies, replies)}
    for size in (1, 2, 3):
        for chain in itertools.combinations(range(3), size):
            for window in windows(MAX_WINDOW):
                if window + size - 1 <= MAX_WINDOW:
                    rates[ChainCandidate(chain, window)] = _rate(replies, target, models, chain, window)
    candidate, rate = best(replies, target, models, windows(MAX_WINDOW))
    # What is learned of lengths and of conditional shares varies in the last digits.
    assert rates[candidate] == pytest.approx(max(rates.values()), rel=2e-3)
    assert rate == pytest.approx(rates[candidate], rel=2e-3)


def _rate(replies: int, target: PassCost, models: Seq[Estimate], chain: tuple[int, ...], window: int) -> float:
    lengths = {window: 1.0}  # probability of each length of a proposal
    seconds = models[chain[0]].cost.seconds(replies, replies * window)
    for at, upper in enumerate(chain[1:]):
        rows = 1 + sum(length * p for length, p in lengths.items())
        verifier = models[upper].passes
        assert verifier is not None
        seconds += verifier.seconds(replies, replies * rows)
        after = dict[int, float]()
        for length, p in lengths.items():
            for count, q in _counts(models[chain[at]].by[upper], length).items():
                after[count + 1] = after.get(count + 1, 0.0) + p * q
        lengths = after
    rows = sum(length * p for length, p in lengths.items())
    last = models[chain[-1]].acceptance
    tokens = sum(p * q * (1 + n) for length, p in lengths.items() for n, q in _counts(last, length).items())
    return replies * tokens / (target.seconds(replies, replies * (1 + rows)) + seconds)


def _counts(acceptance: Acceptance, length: int) -> dict[int, float]:
    """The probability of each number of accepted tokens of a draft."""
    counts, reached = dict[int, float](), 1.0
    for i in range(length):
        counts[i] = reached * (1 - acceptance.share(i))
        reached *= acceptance.share(i)
    return counts | {length: reached}


class Positions:
    """The target's text, and models whose token at a position differs from it at random, the same in every call."""

    def __init__(self, shares: Seq[float]) -> None:
        self.shares = shares

    def tokens(self, model: int, request: DraftRequest, count: int) -> list[int]:
        """Of a model, or of the target if it is -1, from the offset of a request.

        Model m agrees where the dice of the position are below its share, so where a small model is right, a larger one is.
        """
        return [self._token(model, f"{request.request_id} {request.offset + k}") for k in range(count)]

    def _token(self, model: int, position: str) -> int:
        rng = random.Random(position)
        dice, own = rng.random(), rng.randrange(10, 1000)
        return own if model < 0 or dice < self.shares[model] else model


class TextModel(VirtualModel):
    """A model of a text, which can verify, too."""

    def __init__(self, text: Positions, index: int, cost: DraftCost, passes: PassCost) -> None:
        super().__init__(cost, passes)
        self._text, self._index, self._pass_s = text, index, passes.seconds
        self.seen: list[tuple[int, ...]] = []

    def tokens(self, request: DraftRequest, count: int) -> list[int]:
        return self._text.tokens(self._index, request, count)

    def verify(self, requests: Seq[DraftRequest], drafts: Seq[Seq[int]]) -> list[list[int]]:
        self.check()
        self.seen += map(tuple, drafts)
        self.spent_s += self._pass_s(len(requests), sum(1 + len(draft) for draft in drafts))
        return [self.tokens(r, len(draft) + 1) for r, draft in zip(requests, drafts, strict=True)]


class Machine(VirtualMachine):
    """A target and two models: one fast, one good."""

    def __init__(self, shares: tuple[float, float] = (0.7, 0.98)) -> None:
        self.text = Positions(shares)
        fast = TextModel(self.text, 0, draft_cost(1e-4), passes(1e-4, 1e-6))
        self.good = TextModel(self.text, 1, draft_cost(8e-3), passes(2.5e-3, 1e-5))
        super().__init__((fast, self.good), passes(30e-3, 4e-5))
        self.offsets = dict[str, int]()
        self.proposed: list[tuple[DraftRequest, tuple[int, ...]]] = []

    def request(self, name: str) -> DraftRequest:
        return replace(super().request(name), offset=self.offsets.setdefault(name, 0))

    def accepted(self, request: DraftRequest, draft: Seq[int]) -> int:
        count, _ = matching(draft, self.text.tokens(-1, request, len(draft) + 1))
        if draft:
            self.proposed.append((request, tuple(draft)))
        self.offsets[request.request_id] += 1 + count
        return count


def test_a_chain_is_found_where_it_is_the_best_and_gives_what_is_predicted() -> None:
    """The good model is too slow to draft every token, and fast enough to check those of the fast one."""
    machine = Machine()
    machine.serve(300, 1)
    assert machine.drafter.current[0] == ("m0", "m1")
    rate = machine.serve(1500, 1)
    chooser = machine.drafter.chooser
    alone = tokens_per_s(1, chooser.target, chooser.models, None)
    single = max(
        tokens_per_s(1, chooser.target, chooser.models, ChainCandidate((m,), w))
        for m in (0, 1)
        for w in windows(MAX_WINDOW)
    )
    assert rate > 1.03 * single > alone
    assert rate == pytest.approx(tokens_per_s(1, chooser.target, chooser.models, chooser.current), rel=0.1)


def test_what_a_model_rejects_the_next_one_never_sees() -> None:
    """Every token that the target verifies is the last model's own, and every one that the last model sees is the first's."""
    machine = Machine(shares=(0.5, 0.9))
    candidate = ChainCandidate((0, 1), 5)
    machine.drafter.chooser.choose = lambda replies, missing: candidate  # type: ignore[method-assign]  # noqa: ARG005
    machine.drafter.chooser.explore = lambda replies, missing: None  # type: ignore[method-assign]  # noqa: ARG005
    machine.serve(200, 2)
    assert len(machine.proposed) == 400
    for request, draft in machine.proposed:
        assert list(draft) == machine.text.tokens(1, request, len(draft))
    assert all(len(draft) == 5 for draft in machine.good.seen)
    assert min(len(draft) for _, draft in machine.proposed) == 1, "the first token was wrong and replaced"
    first = machine.speculating[0]
    assert 0.1 * first.verified < first.accepted < 0.4 * first.verified, (
        "a run of right tokens ends at the first wrong one"
    )


def test_a_failing_model_makes_the_chain_shorter_and_its_drafts_are_used() -> None:
    machine = Machine()
    machine.serve(300, 1)
    assert "m1" in machine.drafter.current[0]
    machine.good.fails = True
    before = len(machine.proposed)
    machine.serve(1, 1)
    assert machine.drafter.failures == 1
    assert len(machine.proposed) == before + 1, "what the first model drafted goes to the target"
    machine.serve(100, 1)
    assert machine.drafter.current[0] == ("m0",)
    assert chains(machine.drafter.chooser.models) == [(0,)]


def test_exploring_chains_costs_at_most_a_hundredth() -> None:
    """Models that never draft what stands, in runs long enough to try each of the three chains, if seldom."""
    machine = Machine(shares=(0.0, 0.0))
    machine.serve(200, 4)
    assert machine.drafter.current == ((), 0)
    began = len(machine.proposed)
    rate = machine.serve(3000, 4)
    alone = 4 / machine.cost.seconds(4, 4)
    assert len(machine.proposed) - began >= 6
    assert rate >= (1 - EXPLORED_SHARE - 0.003) * alone
