"""A given answer as a draft: how it is aligned with the reply, and how much of it is worth verifying."""

import random
from collections.abc import Sequence
from typing import Any

import pytest

from penstock.worker_service.speculation.given_answer import (
    LONGEST_MATCH,
    LOST,
    MAX_COUNT,
    NEAREST_MATCHES,
    GivenAnswer,
    RunAcceptance,
)
from penstock.worker_service.speculation.windows import FIRST_SHARE, LAST_PASSES, RowShare, best_window, row_price

TEXT = b"The quick brown fox jumps over the lazy dog; then it sleeps in the warm evening sun until the next day begins."


def answer(tokens: Sequence[int], price: float = 0.0) -> GivenAnswer:
    return GivenAnswer(tokens, RunAcceptance(), lambda: price)


def passes(given: GivenAnswer, reply: Sequence[int], limit: int = 10_000) -> int:
    """Passes in which a verifier that writes `reply` writes it with this source: each yields what is right, and one token."""
    at = count = 0
    while at < len(reply):
        proposed = given.propose(reply[:at], limit)
        assert len(proposed) <= limit
        accepted = 0
        while (
            accepted < len(proposed) and at + accepted < len(reply) - 1 and proposed[accepted] == reply[at + accepted]
        ):
            accepted += 1
        given.observe(accepted, reply[at + accepted])
        at, count = at + accepted + 1, count + 1
    return count


def test_the_same_answer_is_one_pass() -> None:
    """However long it is; a limit on the tokens of a pass divides it."""
    assert passes(answer(TEXT), TEXT) == 1
    assert passes(answer(TEXT), TEXT, limit=9) == -(-len(TEXT) // 10)


@pytest.mark.parametrize(
    ("change", "most"),
    [
        ((b"quick", b"quiet"), 3),  # two tokens in place of two
        ((b"brown", b"brOwn"), 2),  # one in place of one: the next position
        ((b"lazy ", b""), 8),  # left out
        ((b"dog", b"dog and the black cat"), 24),  # put in: generated as without a draft, then aligned again
        ((b"The quick brown fox jumps over", b"Over there"), 14),  # another beginning
    ],
)
def test_a_difference_costs_passes_where_it_is(change: tuple[bytes, bytes], most: int) -> None:
    """Not behind it: the reply is found again in the answer. Without realignment, everything behind it would be lost."""
    reply = TEXT.replace(*change)
    assert reply != TEXT
    assert passes(answer(TEXT), reply) <= most


def test_an_unrelated_answer_costs_nothing_but_rows() -> None:
    """Each pass yields its own token at least; where no part of the answer comes up, hardly anything is proposed any more."""
    reply = bytes(random.Random(1).choices(range(200, 240), k=300))
    given = answer(TEXT, price=0.06)
    assert passes(given, reply) == len(reply)
    later = GivenAnswer(TEXT, given._acceptance, lambda: 0.06)
    later.align(reply[:9])
    assert later._run == LOST
    assert later.propose((), 100) == ()


@pytest.mark.parametrize("seed", range(20))
def test_never_more_passes_than_tokens(seed: int) -> None:
    """For any answer and reply over a small alphabet, which are full of misleading matches, and at any limit."""
    rng = random.Random(seed)
    for _ in range(20):
        given, reply = (bytes(rng.choices(b"abc", k=rng.randrange(1, 80))) for _ in range(2))
        assert passes(answer(given), reply, rng.randrange(1, 20)) <= len(reply)


def test_of_equal_matches_the_nearest_is_taken() -> None:
    """In a text that repeats itself, the reply continues at the occurrence where it is: with the first, it would take ten."""
    rows = [b"row: %s;" % name for name in (b"alpha", b"beta", b"gamma", b"delta", b"epsilon", b"zeta", b"eta")] * 3
    reply = b"".join([*rows[:12], b"XYZ; ", *rows[12:]])
    assert passes(answer(b"".join(rows)), reply) <= 8


def test_a_resumed_reply_goes_on_as_if_it_had_begun_here() -> None:
    """The proposals behind any number of tokens are those of a source that has seen the reply from its beginning."""
    reply = TEXT.replace(b"jumps over", b"leaps across").replace(b"warm ", b"")
    for resumed in range(len(reply)):
        here, there = answer(TEXT), answer(TEXT)
        for token in reply[:resumed]:
            here.propose((), 1_000)
            here.observe(0, token)
        there.align(reply[:resumed])
        assert there.propose((), 1_000) == here.propose((), 1_000)


def test_tokens_that_were_not_verified_are_no_misses() -> None:
    """A proposal may be cut by the engine, or not verified; the token that the verifier draws tells whether it was right."""
    given = answer(TEXT)
    for token in TEXT[:40]:
        assert given.propose((), 100)[0] == token
        given.observe(0, token)
    assert given.propose((), 100) == tuple(TEXT[40:])


def test_the_work_per_token_is_bounded() -> None:
    """An answer that repeats one token has a match at every position; a few are compared, as far as the longest match."""
    given = answer(b"a" * 16_384)

    class Counted(tuple[int, ...]):
        reads = 0

        def __getitem__(self, key: Any) -> Any:
            Counted.reads += isinstance(key, int)
            return super().__getitem__(key)

    given._answer = Counted(given._answer)
    for token in b"xxaaxxaaxxaa":
        Counted.reads = 0
        given.observe(0, token)
        assert Counted.reads <= NEAREST_MATCHES * (LONGEST_MATCH + 1) + 1


def test_acceptance_follows_what_is_seen() -> None:
    """Also after much else has been counted, since counts are halved at their limit."""
    acceptance = RunAcceptance()
    for _ in range(3 * int(MAX_COUNT)):
        acceptance.add(20, right=True)
    assert acceptance.after(20) > 0.99
    assert acceptance.after(0) == RunAcceptance().after(0)
    for _ in range(int(MAX_COUNT)):
        acceptance.add(20, right=False)
    assert acceptance.after(20) < 0.3


def test_an_answer_that_is_often_wrong_is_proposed_in_short_pieces() -> None:
    given, reply = answer(TEXT * 20, price=0.06), bytes(t if i % 3 else 0 for i, t in enumerate(TEXT * 20))
    before = len(given.propose((), 100))
    passes(given, reply)
    assert 0 < len(answer(TEXT, price=0.06).propose((), 100)) == before
    again = GivenAnswer(TEXT, given._acceptance, lambda: 0.06)
    assert len(again.propose((), 100)) < before


@pytest.mark.parametrize("seed", range(30))
def test_the_window_is_the_best_of_all(seed: int) -> None:
    """By enumeration: no other window yields more tokens per cost."""
    rng = random.Random(seed)
    acceptance = [rng.random() ** rng.choice((0.1, 0.5, 1.0)) for _ in range(rng.randrange(12))]
    price = rng.choice((0.01, 0.06, 0.3, 0.8, 1.0))
    standing = [1.0]
    for probability in acceptance:
        standing.append(standing[-1] * probability)
    ratios = [sum(standing[: w + 1]) / (1 + price * w) for w in range(len(standing))]
    assert ratios[best_window(acceptance, price)] == pytest.approx(max(ratios))


def test_a_row_is_dearer_the_more_replies_share_a_pass() -> None:
    """In a large batch a proposed row costs as much as a token, and doubtful ones are skipped."""
    prices = [row_price(replies, FIRST_SHARE) for replies in (1, 4, 16, 64, 10_000)]
    assert prices[0] == pytest.approx(FIRST_SHARE)
    assert prices == sorted(prices)
    assert prices[-1] == pytest.approx(1.0, abs=0.01)
    windows = [best_window([0.95] * 100, price) for price in prices]
    assert windows == sorted(windows, reverse=True)
    assert windows[0] > 10
    assert windows[-1] == 0


@pytest.mark.parametrize("share", [0.0, 0.15, 0.55, 0.98])
def test_what_a_row_costs_is_learned_from_passes(share: float) -> None:
    """Of passes that take a fifth more or less than their rows say, and anew where another model serves."""
    learned, rng = RowShare(), random.Random(3)
    assert learned.value == FIRST_SHARE
    for one_s, expected in ((0.02, 0.5), (0.1, share)):
        for _ in range(int(6 * LAST_PASSES)):
            rows = rng.choice((1, 1, 2, 4, 9))
            learned.add(rows, one_s * (1 - expected + expected * rows) * rng.uniform(0.8, 1.2))
        assert learned.value == pytest.approx(expected, abs=0.06)


def test_passes_over_as_many_rows_say_nothing_of_a_row() -> None:
    learned = RowShare()
    for _ in range(50):
        learned.add(4, 0.1)
    assert learned.value == FIRST_SHARE
    for _ in range(10):
        learned.add(8, 0.2)
    assert learned.value == 1.0
