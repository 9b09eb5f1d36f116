"""Finds answers in which a model got stuck in a loop. No I/O."""

from penstock.services.borders import borders

TAIL_CHARACTERS = 4096
"""What is examined: a model that loops does so until the end of its answer."""
MIN_CHARACTERS = 96
"""Shorter runs occur in good answers: a rule of dashes, zeros of a number."""
MIN_REPEATS = 6
"""Fewer repetitions occur in good answers: rows of a table, lines of a poem."""
MIN_SHARE = 0.5
"""A loop must be at least this share of what is examined: a long answer may contain a table of equal rows."""


def is_repetitive(text: str) -> bool:
    """Whether at least half of the text's end repeats one piece, at least six times and over at least 96 characters."""
    tail = text.rstrip()[-TAIL_CHARACTERS:]
    return loop_characters(tail) >= max(MIN_CHARACTERS, MIN_SHARE * len(tail))


def loop_characters(text: str) -> int:
    """Length of the longest end of a text that consists of MIN_REPEATS or more repetitions of one piece; 0 without any.

    The last or first repetition may be incomplete. The borders of the reversed text give the shortest period of every end.
    """
    ends = enumerate(borders(text[::-1]), 1)
    return max((length for length, border in ends if (length - border) * MIN_REPEATS <= length), default=0)
