"""More of the problems that a smaller model fails: it finds them at a fraction of what the larger one needs to learn them.

Selection via proxy: Coleman et al., arXiv 1906.11829. Late in a training nine replies in ten are right and teach nothing.
"""

import itertools
from collections.abc import Iterator

from transformers import LlamaForCausalLM

from models.training.data import turn_ids
from models.training.problems import Problem
from models.training.scoring import exact_replies

POOL = 512  # problems that the smaller model answers at a time
FAILED_PER_RIGHT = 1.5  # problems that it fails, for each problem that it solves


def failed_oftener(source: Iterator[Problem], proxy: LlamaForCausalLM) -> Iterator[Problem]:
    """All problems of `source` that `proxy` fails, and some that it solves; without end, as `source` is."""
    proxy.eval()
    while True:
        pool = list(itertools.islice(source, POOL))
        right = exact_replies(proxy, [turn_ids(problem) for problem in pool])
        solved_left = round((POOL - sum(right)) / FAILED_PER_RIGHT)
        for problem, solved in zip(pool, right, strict=True):
            if not solved:
                yield problem
            elif solved_left:
                solved_left -= 1
                yield problem
