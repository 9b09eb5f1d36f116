"""Which of a request's answers is delivered where the plan delivers the best one."""

from hypothesis import given
from hypothesis import strategies as st

from penstock.services.acceptance.best_answer import best_of

SCORES = st.lists(st.none() | st.integers(0, 4).map(float), min_size=1, max_size=8)


@given(SCORES)
def test_no_answer_that_could_be_compared_is_better(scores: list[float | None]) -> None:
    best, last = best_of(scores), len(scores) - 1
    highest = scores[best]
    if scores[last] is None:
        assert best == last
        return
    assert highest is not None
    assert all(score is None or score <= highest for score in scores)
    assert all(score is None or score < highest for score in scores[best + 1 :])


@given(SCORES)
def test_it_is_enough_to_keep_the_best_of_the_earlier_answers(scores: list[float | None]) -> None:
    """As routers do: each rejected answer is compared with the best one before it."""
    kept: int | None = None
    for i, score in enumerate(scores[:-1]):
        if score is not None and (kept is None or best_of((scores[kept], score)) == 1):
            kept = i
    last = len(scores) - 1
    delivered = last if kept is None or best_of((scores[kept], scores[last])) == 1 else kept
    assert delivered == best_of(scores)
