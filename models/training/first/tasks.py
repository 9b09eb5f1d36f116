"""Nineteen tasks whose answers can be checked, each at five levels of difficulty.

A task turns (random numbers, level) into a problem: prompt, full reply (with its working where the task shows any) and
final answer. The reply ends in the answer; where there is working, the last line is `Answer: ...`.

Held out: a problem belongs to the held-out split by a checksum of its *content* (task and operands), independent of its
wording, so no phrasing of a held-out problem is ever trained on.
"""

import random
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from models.training.columns import columns_added, columns_multiplied, columns_subtracted
from models.training.words import COMMON, letters, word

LEVELS = (1, 2, 3, 4, 5)
HELD_OUT_SHARE = 16  # one problem in sixteen


@dataclass(frozen=True, slots=True)
class Problem:
    """One problem. `key`: identifies its content, independent of its wording."""

    task: str
    level: int
    prompt: str
    reply: str
    answer: str
    key: str

    @property
    def held_out(self) -> bool:
        return zlib.crc32(self.key.encode()) % HELD_OUT_SHARE == 0


def final_answer(reply: str) -> str:
    """The final answer of a reply: the text after the last `Answer:`, or the whole reply without one; stripped."""
    return reply.rsplit("Answer:", 1)[-1].strip()


def is_correct(answer: str, reply: str) -> bool:
    return final_answer(reply) == answer


# A maker returns (content key, wordings of the prompt, working lines, answer).
_Made = tuple[str, tuple[str, ...], list[str], str]
_Maker = Callable[[random.Random, int], _Made]


def _number(rng: random.Random, digits: int) -> int:
    return rng.randint(10 ** (digits - 1) if digits > 1 else 0, 10**digits - 1)


def _add(rng: random.Random, level: int) -> _Made:
    digits = level + 1
    a, b = _number(rng, rng.randint(digits - 1, digits)), _number(rng, digits)
    if rng.random() < 0.5:
        a, b = b, a
    wordings = (f"What is {a} + {b}?", f"Add {a} and {b}.", f"{a} + {b} = ?")
    return f"{a}+{b}", wordings, columns_added(a, b), str(a + b)


def _subtract(rng: random.Random, level: int) -> _Made:
    digits = level + 1
    a, b = _number(rng, digits), _number(rng, rng.randint(digits - 1, digits))
    a, b = max(a, b), min(a, b)
    wordings = (f"What is {a} - {b}?", f"Subtract {b} from {a}.", f"{a} - {b} = ?")
    return f"{a}-{b}", wordings, columns_subtracted(a, b), str(a - b)


def _multiply(rng: random.Random, level: int) -> _Made:
    if level == 1:
        a, b = rng.randint(0, 12), rng.randint(0, 12)
        lines: list[str] = []
    else:
        a, b = _number(rng, (0, 2, 3, 4, 2)[level - 1]), _number(rng, (0, 1, 1, 1, 2)[level - 1])
        lines = columns_multiplied(a, b)
    return f"{a}*{b}", (f"What is {a} * {b}?", f"Multiply {a} by {b}.", f"{a} * {b} = ?"), lines, str(a * b)


def _steps(rng: random.Random, level: int) -> _Made:
    value = start = rng.randint(1, 20)
    lines, sentences = [], []
    for _ in range((2, 3, 5, 8, 12)[level - 1]):
        kinds = ["add"] * 3 + ["take"] * (3 if value >= 20 else 0)
        kinds += ["double"] * (value <= 200) + ["halve"] * (value % 2 == 0 and value > 30)
        kind, n = rng.choice(kinds), rng.randint(1, 19)
        if kind == "add":
            before, value = value, value + n
            sentences.append(f"Add {n}.")
            lines.append(f"{before}+{n}={value}")
        elif kind == "take":
            before, value = value, value - n
            sentences.append(f"Take {n}.")
            lines.append(f"{before}-{n}={value}")
        elif kind == "double":
            before, value = value, value * 2
            sentences.append("Double.")
            lines.append(f"{before}*2={value}")
        else:
            before, value = value, value // 2
            sentences.append("Halve.")
            lines.append(f"{before}/2={value}")
    steps = " ".join(sentences)
    return f"{start} {steps}", (f"Start with {start}. {steps}", f"Begin at {start}. {steps}"), lines, str(value)


def _sum(rng: random.Random, level: int) -> _Made:
    numbers = [rng.randint(0, 99) for _ in range((3, 4, 6, 8, 10)[level - 1])]
    lines, total = [], numbers[0]
    for n in numbers[1:]:
        lines.append(f"{total}+{n}={total + n}")
        total += n
    text = ", ".join(map(str, numbers))
    return text, (f"Add up: {text}", f"What is the sum of {text}?"), lines, str(total)


def _count_by(rng: random.Random, level: int) -> _Made:
    terms, step = (4, 8, 16, 30, 70)[level - 1], rng.randint(1, (2, 5, 9, 12, 12)[level - 1])
    first = rng.randint(0, 99)
    if rng.random() < 0.5:
        first, step = first + step * (terms - 1), -step
    values = [first + i * step for i in range(terms)]
    text = f"from {values[0]} to {values[-1]} by {abs(step)}"
    return text, (f"Count {text}.", f"List the numbers {text}."), [], ", ".join(map(str, values))


def _binary(rng: random.Random, level: int) -> _Made:
    n = rng.randint((1, 8, 32, 128, 512)[level - 1], (15, 63, 127, 511, 2047)[level - 1])
    lines, quotient = [], n
    while quotient:
        lines.append(f"{quotient}=2*{quotient // 2}+{quotient % 2}")
        quotient //= 2
    return str(n), (f"Write {n} in binary.", f"What is {n} in base 2?"), lines, f"{n:b}"


def _sort(rng: random.Random, level: int) -> _Made:
    numbers = rng.sample(range(100), (3, 4, 5, 6, 8)[level - 1])
    text = ", ".join(map(str, numbers))
    return text, (f"Sort: {text}", f"Sort from small to large: {text}"), [], ", ".join(map(str, sorted(numbers)))


def _extreme(rng: random.Random, level: int) -> _Made:
    numbers = rng.sample(range((30, 100, 300, 1000, 1000)[level - 1]), (2, 3, 4, 6, 8)[level - 1])
    text = ", ".join(map(str, numbers))
    if rng.random() < 0.5:
        return f"max {text}", (f"Which is the largest: {text}?", f"Largest of {text}?"), [], str(max(numbers))
    return f"min {text}", (f"Which is the smallest: {text}?", f"Smallest of {text}?"), [], str(min(numbers))


_LENGTHS = ((3, 4), (5, 6), (7, 8), (9, 10), (11, 12))


def _reverse(rng: random.Random, level: int) -> _Made:
    w = word(rng, *_LENGTHS[level - 1])
    return w, (f"Reverse '{w}'.", f"Spell '{w}' backwards."), [], w[::-1]


def _upper(rng: random.Random, level: int) -> _Made:
    w = word(rng, *_LENGTHS[level - 1])
    return w, (f"Write '{w}' in capitals.", f"Make '{w}' upper case."), [], w.upper()


def _remove(rng: random.Random, level: int) -> _Made:
    length = rng.randint(*_LENGTHS[level - 1]) + 2
    gone = rng.choice("aeiou")
    w = "".join(gone if rng.random() < 0.25 else c for c in letters(rng, length)) + rng.choice("bdgkmnprst")
    text = f"every '{gone}' from '{w}'"
    return text, (f"Remove {text}.", f"Take away {text}."), [], w.replace(gone, "")


def _shift(rng: random.Random, level: int) -> _Made:
    k, w = rng.randint(1, (1, 1, 2, 2, 3)[level - 1]), letters(rng, rng.randint(*_LENGTHS[level - 1]))
    moved = "".join(chr((ord(c) - 97 + k) % 26 + 97) for c in w)
    text = f"'{w}' by {k}"
    return text, (f"Shift the letters of {text}.", f"Move each letter of {text}."), [], moved


def _count(rng: random.Random, level: int) -> _Made:
    length, letter = (4, 6, 9, 12, 16)[level - 1], rng.choice("abcdeiorst")
    w = "".join(letter if rng.random() < 0.3 else c for c in letters(rng, length))
    marks, total = [], 0
    for c in w:
        total += c == letter
        marks.append(f"{c}{total}")
    lines = [" ".join(marks)]
    text = f"'{letter}' in '{w}'"
    return text, (f"Count the letter {text}.", f"How many times is {text}?"), lines, str(w.count(letter))


def _word_list(rng: random.Random, level: int) -> list[str]:
    return rng.sample(COMMON, (3, 4, 5, 6, 7)[level - 1])


def _reorder(rng: random.Random, level: int) -> _Made:
    words = _word_list(rng, level)
    text = ", ".join(words)
    return text, (f"Reverse the order: {text}", f"List from last to first: {text}"), [], ", ".join(reversed(words))


def _alphabetize(rng: random.Random, level: int) -> _Made:
    words = _word_list(rng, level)[1:]
    text = ", ".join(words)
    return text, (f"Sort by alphabet: {text}", f"Put in alphabetical order: {text}"), [], ", ".join(sorted(words))


def _initials(rng: random.Random, level: int) -> _Made:
    words = _word_list(rng, level)
    text = ", ".join(words)
    return text, (f"First letters of: {text}", f"Give the initials of {text}."), [], "".join(w[0] for w in words)


def _progression(rng: random.Random, level: int) -> _Made:
    step = rng.randint((1, 2, 3, 5, 12)[level - 1], (3, 6, 12, 25, 60)[level - 1]) * rng.choice((1, 1, 1, -1))
    first = rng.randint(0, (20, 50, 90, 200, 500)[level - 1]) + (8 * abs(step) if step < 0 else 0)
    shown = [first + i * step for i in range(4)]
    following = [first + i * step for i in range(4, 7)]
    text = ", ".join(map(str, shown))
    return text, (f"What comes next: {text}?", f"Give the next three: {text}"), [], ", ".join(map(str, following))


def _parity(rng: random.Random, level: int) -> _Made:
    numbers = [rng.randint(0, 99) for _ in range((3, 4, 6, 8, 10)[level - 1])]
    kind, rest = rng.choice((("even", 0), ("odd", 1)))
    remaining = [n for n in numbers if n % 2 == rest]
    text = ", ".join(map(str, numbers))
    wordings = (f"Keep the {kind} numbers: {text}", f"Which are {kind}: {text}?")
    return f"{kind} {text}", wordings, [], ", ".join(map(str, remaining)) or "none"


TASKS: dict[str, _Maker] = {
    "add": _add,
    "subtract": _subtract,
    "multiply": _multiply,
    "steps": _steps,
    "sum": _sum,
    "count_by": _count_by,
    "binary": _binary,
    "sort": _sort,
    "extreme": _extreme,
    "reverse": _reverse,
    "upper": _upper,
    "remove": _remove,
    "shift": _shift,
    "count": _count,
    "reorder": _reorder,
    "alphabetize": _alphabetize,
    "initials": _initials,
    "progression": _progression,
    "parity": _parity,
}


def make(task: str, level: int, rng: random.Random) -> Problem:
    """One problem of `task` at `level` (1 to 5), of either split."""
    key, wordings, lines, answer = TASKS[task](rng, level)
    reply = "\n".join([*lines, f"Answer: {answer}"]) if lines else answer
    return Problem(task, level, rng.choice(wordings), reply, answer, f"{task} {key}")


def stream(seed: int, *, held_out: bool, weights: dict[tuple[str, int], float] | None = None) -> Iterator[Problem]:
    """Problems of one split without end, drawn by `seed`; (task, level) uniformly or by `weights`."""
    rng = random.Random(seed)
    kinds = [(task, level) for task in TASKS for level in LEVELS]
    chances = [weights.get(kind, 1.0) for kind in kinds] if weights else None
    while True:
        task, level = rng.choices(kinds, chances)[0]
        problem = make(task, level, rng)
        if problem.held_out is held_out:
            yield problem


def held_out(count: int, seed: int) -> list[Problem]:
    """`count` distinct held-out problems, all (task, level) pairs as equally often as `count` allows."""
    rng = random.Random(seed)
    kinds = [(task, level) for task in TASKS for level in LEVELS]
    problems: dict[str, Problem] = {}
    while len(problems) < count:
        rng.shuffle(kinds)
        for task, level in kinds[: count - len(problems)]:
            for _ in range(2000):  # a few kinds hold few problems: then the next kind is taken
                problem = make(task, level, rng)
                if problem.held_out and problem.key not in problems:
                    problems[problem.key] = problem
                    break
    return list(problems.values())
