"""Which draft tokens stand: exact in both rules."""

import math
from collections.abc import Callable
from collections.abc import Sequence as Seq

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.domain.randomness import uniform
from worker_service.speculation import acceptance


def test_matching_stops_at_the_first_difference() -> None:
    assert acceptance.matching([1, 2, 3], [1, 2, 3, 4]) == (3, 4)
    assert acceptance.matching([1, 9, 3], [1, 2, 3, 4]) == (1, 2)
    assert acceptance.matching([9], [1, 2]) == (0, 1)


def test_rejection_keeps_the_targets_distribution() -> None:
    """Over many draws, the first token comes out as often as the target says, whatever the draft's distribution."""
    target = np.array([[0.5, 0.3, 0.2, 0.0], [0.25, 0.25, 0.25, 0.25]], np.float32)
    q = ([0, 1, 2, 3], [0.1, 0.2, 0.3, 0.4])
    rng = np.random.default_rng(5)
    counts = np.zeros(4)
    rounds = 40_000
    for _ in range(rounds):
        draft = [int(rng.choice(4, p=q[1]))]
        accepted, token = acceptance.rejection(draft, target, [q], rng.random(2), rng.random(2))
        counts[draft[0] if accepted else token] += 1
    assert np.abs(counts / rounds - target[0]).max() < 0.01


def test_a_draft_from_the_targets_own_distribution_always_stands() -> None:
    target = np.array([[0.5, 0.5], [0.5, 0.5], [1.0, 0.0]], np.float32)
    q = ([0, 1], [0.5, 0.5])
    assert acceptance.rejection([0, 1], target, [q, q], np.array([0.99, 0.99, 0.5]), np.array([0.1] * 3)) == (2, 0)


Rule = Callable[..., tuple[int, int]]
TOKENS, LENGTH = 8, 3
DRAWS, PLANTED_DRAWS = 200_000, 20_000  # an error is noticed in a tenth of the draws


def accept_everything(draft: Seq[int], target: acceptance.Floats, *arguments: object) -> tuple[int, int]:
    """A planted error: draft tokens are never rejected."""
    *_, draws = arguments
    assert isinstance(draws, np.ndarray)
    return len(draft), acceptance.drawn(target[-1], float(draws[-1]))


def no_residual(
    draft: Seq[int],
    target: acceptance.Floats,
    drafted: Seq[tuple[Seq[int], Seq[float]]],
    chances: acceptance.Floats,
    draws: acceptance.Floats,
) -> tuple[int, int]:
    """A planted error: what replaces a rejected token is drawn from the target's own distribution."""
    accepted, token = acceptance.rejection(draft, target, drafted, chances, draws)
    return accepted, token if accepted == len(draft) else acceptance.drawn(target[accepted], float(draws[accepted]))


def chi_square(rule: Rule, draws: int) -> float:
    """Pearson's statistic of joint triples of tokens, drawn with drafts of up to two tokens, against the target's."""
    rng = np.random.default_rng(15)
    shapes = [(TOKENS,) * depth for depth in range(LENGTH)]
    target = [rng.dirichlet(np.full(TOKENS, 8.0), shape) for shape in shapes]
    drafter = [rng.dirichlet(np.full(TOKENS, 2.0), shape) for shape in shapes]
    sums = [rows.cumsum(-1) for rows in drafter]
    counts = np.zeros((TOKENS,) * LENGTH)
    ids = range(TOKENS)
    for numbers in rng.random((draws, LENGTH, LENGTH, 3)):
        tokens: tuple[int, ...] = ()
        while len(tokens) < LENGTH:
            uniform_numbers = numbers[len(tokens)]
            text, distributions = tokens, []
            for chance in uniform_numbers[: LENGTH - len(tokens) - 1, 0]:
                distributions.append((ids, drafter[len(text)][text]))
                text += (min(TOKENS - 1, int(np.searchsorted(sums[len(text)][text], chance, side="right"))),)
            draft = text[len(tokens) :]
            rows = np.stack([target[depth][text[:depth]] for depth in range(len(tokens), LENGTH)])
            verified = rule(
                draft, rows, distributions, uniform_numbers[: len(rows), 1], uniform_numbers[: len(rows), 2]
            )
            tokens += (*draft[: verified[0]], verified[1])
        counts[tokens] += 1
    first, second, third = target
    expected = draws * first[:, None, None] * second[:, :, None] * third
    return float(((counts - expected) ** 2 / expected).sum())


@pytest.mark.parametrize(
    "rule", [pytest.param(acceptance.rejection, marks=pytest.mark.slow), accept_everything, no_residual]
)
def test_joint_triples_have_the_targets_distribution_and_planted_errors_are_noticed(rule: Rule) -> None:
    """At p = 0.001; the bound is Wilson and Hilferty's for the chi-square distribution."""
    freedom = TOKENS**LENGTH - 1
    bound = freedom * (1 - 2 / (9 * freedom) + 3.0902 * math.sqrt(2 / (9 * freedom))) ** 3
    sound = rule is acceptance.rejection
    assert (chi_square(rule, DRAWS if sound else PLANTED_DRAWS) < bound) == sound


@given(st.lists(st.floats(0, 1, width=32), min_size=1, max_size=8).filter(lambda w: sum(w) > 1e-3), st.floats(0, 0.999))
def test_a_draw_never_hits_weight_zero(weights: list[float], chance: float) -> None:
    assert weights[acceptance.drawn(np.array(weights), chance)] > 0


def test_uniform_numbers_are_uniform_and_differ_by_seed_offset_and_purpose() -> None:
    values = np.array([uniform(seed, offset) for seed in range(100) for offset in range(100)])
    assert abs(values.mean() - 0.5) < 0.01
    assert abs(values.var() - 1 / 12) < 0.005
    assert len(set(values)) == len(values)
    assert uniform(1, 2, 0) != uniform(1, 2, 1)
