"""The tasks by name, each at five levels; streams of problems to train on, and held-out sets.

Two things are held out: problems, by a checksum of their content (operands that commute and lists in another order count
as the same problem; a chat is held out if any of its turns is), and wordings, by a checksum of theirs.
"""

import functools
import random
from collections.abc import Iterator

from models.training import arithmetic, followups, forms, lists, text, tools
from models.training.drafts import Maker
from models.training.problems import Problem
from models.training.wording import Noise, Phrasing, clean, is_held_out, surface

LEVELS = (1, 2, 3, 4, 5)
TASKS: dict[str, Maker] = {
    "add": arithmetic.add,
    "subtract": arithmetic.subtract,
    "multiply": arithmetic.multiply,
    "chain": arithmetic.chain,
    "binary": arithmetic.binary,
    "progression": arithmetic.progression,
    "count_by": arithmetic.count_by,
    "sort": lists.sort,
    "sum": lists.add_up,
    "extreme": lists.extreme,
    "keep": lists.keep,
    "reverse": text.reverse,
    "upper": text.upper,
    "remove": text.remove,
    "shift": text.shift,
    "count": text.count,
    "reorder": text.reorder,
    "alphabetize": text.alphabetize,
    "initials": text.initials,
    "form": forms.form,
    "tools": tools.tools,
    "follow_numbers": followups.numbers,
    "follow_list": followups.list_of_numbers,
    "follow_word": followups.letters,
    "smalltalk": forms.smalltalk,
}
KINDS = tuple((task, level) for task in TASKS for level in LEVELS)
# How often a task is drawn in training against the others: what is long or learnt slowly oftener.
SHARES = {
    "chain": 1.5, "tools": 1.0, "form": 1.5, "smalltalk": 0.7, "upper": 0.6, "reorder": 0.8, "initials": 0.7, "binary": 0.7,
    "count_by": 0.8,
}  # fmt: skip


def make(task: str, level: int, seed: str, *, held_out_wording: bool = False, noise: Noise = surface) -> Problem:
    """The problem of `task` at `level` for `seed`; wording and noise are drawn independently of its content."""
    say = Phrasing(random.Random(f"{seed} wording"), held_out=held_out_wording, noise=noise)
    draft = TASKS[task](random.Random(f"{task} {level} {seed}"), level, say)
    return draft.named(task, level, say.used)


def stream(
    seed: int, *, by_level: tuple[float, ...] = (1.0,) * len(LEVELS), by_task: dict[str, float] | None = None
) -> Iterator[Problem]:
    """Problems to train on, without end: no held-out content, no held-out wording.

    by_level, by_task: how often they are drawn, on top of SHARES; tasks that `by_task` does not name count 1.
    """
    rng = random.Random(seed)
    more = by_task or {}
    chances = [SHARES.get(task, 1.0) * more.get(task, 1.0) * by_level[level - 1] for task, level in KINDS]
    while True:
        task, level = rng.choices(KINDS, chances)[0]
        problem = make(task, level, f"{rng.getrandbits(64):x}")
        if not problem.held_out:
            yield problem


def held_out(count: int, seed: int, *, noise: Noise = clean, held_out_wording: bool = False) -> list[Problem]:
    """`count` held-out problems of distinct content, all (task, level) pairs as equally often as `count` allows.

    The contents depend on `count` and `seed` alone: the same problems come in every wording and noise.
    """
    return [make(*kind_key, held_out_wording=held_out_wording, noise=noise) for kind_key in _held_out(count, seed)]


@functools.cache
def _held_out(count: int, seed: int) -> tuple[tuple[str, int, str], ...]:
    """What `make` needs for each of them: task, level, seed."""
    rng = random.Random(seed)
    kinds, chosen = list(KINDS), dict[str, tuple[str, int, str]]()
    while len(chosen) < count:
        rng.shuffle(kinds)
        for task, level in kinds[: count - len(chosen)]:
            for _ in range(2000):  # a few kinds hold few problems: then the next kind is taken
                name = f"{rng.getrandbits(64):x}"
                problem = make(task, level, name, noise=clean)
                if problem.held_out and problem.key not in chosen:
                    chosen[problem.key] = (task, level, name)
                    break
    return tuple(chosen.values())


def single_turns(count: int, seed: int) -> list[Problem]:
    """`count` held-out problems that one message asks: without tools or earlier turns."""
    return [problem for problem in held_out(2 * count, seed) if len(problem.messages) == 1][:count]


def has_held_out_wording(problem: Problem) -> bool:
    return any(is_held_out(wording) for wording in problem.wordings)
