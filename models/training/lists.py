"""Tasks about lists of numbers: order, extremes, sums and selections."""

import random
from collections.abc import Callable

from models.training.drafts import Draft, asked, sorted_text
from models.training.wording import Phrasing

_THESE = "[ these numbers| the numbers| this list| the list| the following numbers| these| the following|]"
_UP = (
    "[from small to large|from smallest to largest|in ascending order|in increasing order|from low to high|from lowest to highest|"
    "smallest first|upwards|ascending]"
)
_DOWN = (
    "[from large to small|from largest to smallest|in descending order|in decreasing order|from high to low|from highest to lowest|"
    "largest first|downwards|descending]"
)
SORT_UP = (
    f"[Sort|Order|Arrange|Put|Rank|List]{_THESE} {_UP}: {{x}}[.|]",
    f"[Sort|Order|Arrange]{_THESE}: {{x}}[.|]",
    f"[Sort|Order|Arrange] {{x}} {_UP}[.|]",
    f"{{x}}. [Sort|Order|Arrange] [them|these|the list] {_UP}[.|]",
    f"[Numbers|Here are some numbers|My numbers are]: {{x}}. [Sort|Order|Arrange|Put|List] them {_UP}[.|]",
)
SORT_DOWN = (
    f"[Sort|Order|Arrange|Put|Rank|List]{_THESE} {_DOWN}: {{x}}[.|]",
    f"[Sort|Order|Arrange] {{x}} {_DOWN}[.|]",
    f"{{x}}. [Sort|Order|Arrange] [them|these|the list] {_DOWN}[.|]",
    f"[Numbers|Here are some numbers|My numbers are]: {{x}}. [Sort|Order|Arrange|Put|List] them {_DOWN}[.|]",
)
SUM = (
    f"[Add up|Sum|Sum up|Add|Total|Add together]{_THESE}: {{x}}[.|]",
    "[What is|Give|Find|Compute|Calculate] the [sum|total] of {x}[?|.|]",
    f"[Sum|Total|Sum of|The sum of|The total of]{_THESE}: {{x}}[.|?|]",
    "{x}. [What is the sum?|What do they add up to?|Add them up.|Give the total.|How much is that together?]",
)
LARGEST = (
    "[Which is|What is|Which number is|Find|Give|Name] the [largest|biggest|greatest|highest][ number| of| one| of these|]: {x}[?|.|]",
    "[Largest|Biggest|Maximum|Greatest][ of|]: {x}[?|.|]",
    "{x}. [Which is the largest?|Which is the biggest?|What is the maximum?|Give the largest.]",
)
SMALLEST = (
    "[Which is|What is|Which number is|Find|Give|Name] the [smallest|least|lowest][ number| of| one| of these|]: {x}[?|.|]",
    "[Smallest|Least|Minimum|Lowest][ of|]: {x}[?|.|]",
    "{x}. [Which is the smallest?|Which is the least?|What is the minimum?|Give the smallest.]",
)
KEEP = (
    "[Keep|Keep only|Pick|Select|Leave|Find|List|Give|Give only|Show] the {kind} [numbers|ones][ of| in| from|]: {x}[.|?|]",
    "[Which|Which numbers|Which of these] are {kind}: {x}[?|.|]",
    "{x}. [Which are|Keep the ones that are|List the ones that are|Show those that are] {kind}[?|.|]",
)
_APPLY: dict[str, Callable[[list[int], int], list[int]]] = {
    "even": lambda v, n: [x for x in v if x % 2 == 0],
    "odd": lambda v, n: [x for x in v if x % 2],
    "add": lambda v, n: [x + n for x in v],
    "double": lambda v, n: [2 * x for x in v],
    "up": lambda v, n: sorted(v),
    "down": lambda v, n: sorted(v, reverse=True),
    "reverse": lambda v, n: v[::-1],
    "first": lambda v, n: v[1:],
    "last": lambda v, n: v[:-1],
}


def row(values: list[int]) -> str:
    return ", ".join(map(str, values)) or "none"


def _lengths(level: int) -> int:
    return (3, 4, 6, 8, 10)[level - 1]


def sort(rng: random.Random, level: int, say: Phrasing) -> Draft:
    values = rng.sample(range((100, 100, 100, 200, 1000)[level - 1]), (3, 4, 6, 7, 8)[level - 1])
    down = rng.random() < 0.35
    prompt = say(SORT_DOWN if down else SORT_UP, x=say.listed(values))
    return asked(prompt, [], row(sorted(values, reverse=down)), f"sort {sorted_text(values)}")


def running_sum(values: list[int]) -> list[str]:
    lines, total = [], values[0]
    for n in values[1:]:
        lines.append(f"{total}+{n}={total + n}")
        total += n
    return lines


def add_up(rng: random.Random, level: int, say: Phrasing) -> Draft:
    values = [rng.randint(0, 99) for _ in range(_lengths(level))]
    return asked(say(SUM, x=say.listed(values)), running_sum(values), sum(values), f"sum {sorted_text(values)}")


def extreme(rng: random.Random, level: int, say: Phrasing) -> Draft:
    values = rng.sample(range((30, 100, 300, 1000, 1000)[level - 1]), (2, 3, 4, 6, 8)[level - 1])
    largest = rng.random() < 0.5
    prompt = say(LARGEST if largest else SMALLEST, x=say.listed(values))
    return asked(prompt, [], max(values) if largest else min(values), f"extreme {sorted_text(values)}")


def keep(rng: random.Random, level: int, say: Phrasing) -> Draft:
    values = [rng.randint(0, 99) for _ in range(_lengths(level))]
    kind = rng.choice(("even", "odd"))
    remaining = [n for n in values if n % 2 == (kind == "odd")]
    return asked(say(KEEP, kind=kind, x=say.listed(values)), [], row(remaining), f"keep {sorted_text(values)}")


def list_step(rng: random.Random, values: list[int], kinds: list[str]) -> tuple[str, int, list[int]]:
    """(kind, its number, the list after it): a step that leaves at least one number."""
    while True:
        kind, n = rng.choice(kinds), rng.randint(1, 9)
        after = _APPLY[kind](values, n)
        if after:
            return kind, n, after


def end_lines(kind: str, values: list[int]) -> tuple[list[str], int]:
    """(working, result) of a step that ends a chat about a list."""
    if kind == "sum":
        return running_sum(values), sum(values)
    return [], {"largest": max(values), "smallest": min(values)}[kind]
