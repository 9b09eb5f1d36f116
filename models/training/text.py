"""Tasks about words and letters."""

import random
from collections.abc import Callable

from models.training.drafts import Draft, asked, sorted_text
from models.training.wording import Phrasing
from models.training.words import COMMON, letters, word

_WORD = "[ the word|]"
REVERSE = (
    f"[Reverse|Turn around|Flip|Mirror]{_WORD} {{w}}[.|]",
    f"[Spell|Write|Say|Type]{_WORD} {{w}} [backwards|in reverse|from back to front|the other way round][.|]",
    "[What is|How do you write|How do you spell] {w} [backwards|in reverse|reversed]?",
    "{w} [backwards|reversed|in reverse][?|.|]",
)
UPPER = (
    f"[Write|Put|Give|Type|Print|Spell]{_WORD} {{w}} [in capitals|in capital letters|in upper case|in uppercase|in all caps][.|]",
    f"[Make|Turn]{_WORD} {{w}} [upper case|uppercase|all capitals|capital][.|]",
    f"[Capitalize all letters of|Uppercase|Convert to upper case:|Make capital:]{_WORD} {{w}}[.|]",
    "{w} in [capitals|upper case|capital letters][?|.|]",
)
REMOVE = (
    "[Remove|Take away|Delete|Drop|Strip|Take out|Erase] [every|each|all] '{c}' from {w}[.|]",
    "[What is|Write|Give] {w} without [the letter|any|every] '{c}'[.|?|]",
    "[What is left|What remains] of {w} without [the letter|any|every] '{c}'?",
)
SHIFT = (
    "[Shift|Move] [the letters of|each letter of|every letter of|all letters of] {w} by {k}[.|]",
    "[Shift|Move|Caesar shift] {w} by {k}[ letters| places|][.|]",
)
COUNT = (
    "[Count|Count up|Tell me how often you see|Find the number of times of] the letter '{c}' in {w}[.|]",
    "[How many times|How often] [is|do you see|do you find] [the letter |]'{c}' in {w}?",
    "[How many times|How often] does [the letter |]'{c}' [appear|occur|stand] in {w}?",
    "[How many|Number of|Count of] [letters |]'{c}' [are in|are there in|in] {w}[?|.|]",
    "[Count the|Count all|Count every] '{c}' in {w}[.|]",
)
_WORDS = "[ these words| the words| this list| the list| the following words| these|]"
REORDER = (
    f"[Reverse the order|Reverse the order of|Reverse|Turn around|Flip]{_WORDS}: {{x}}[.|]",
    f"[List|Write|Give|Put]{_WORDS} [from last to first|in reverse order|backwards|last one first]: {{x}}[.|]",
    "{x}. [Reverse the order.|List them from last to first.|Write them in reverse order.|Turn the list around.]",
)
ALPHABETIZE = (
    f"[Sort|Order|Arrange|Put|List|Write]{_WORDS} [by alphabet|in alphabetical order|alphabetically|from a to z|by the alphabet]: {{x}}[.|]",
    f"[Alphabetize|Alphabetical order of|Sort by alphabet]{_WORDS}: {{x}}[.|]",
    "{x}. [Sort them|Put them|List them|Write them] [by alphabet|in alphabetical order|alphabetically|from a to z][.|]",
)
INITIALS = (
    "[First letters|First letters of|The first letters of|Initials|Initials of|The initials of]: {x}[.|]",
    "[Give|Write|List|Take|Find|Join|What are] the [initials|first letters] of {x}[.|?|]",
    "[Join|Take|Write] the first letter of each[ word|]: {x}[.|]",
)
_APPLY: dict[str, Callable[[str, str], str]] = {
    "reverse": lambda w, c: w[::-1],
    "upper": lambda w, c: w.upper(),
    "first": lambda w, c: w[1:],
    "last": lambda w, c: w[:-1],
    "double": lambda w, c: w + w,
    "swap": lambda w, c: w[-1] + w[1:-1] + w[0],
    "append": lambda w, c: w + c,
}
_LENGTHS = ((3, 4), (5, 6), (7, 8), (9, 10), (11, 13))
_COMMON = tuple(sorted(COMMON))


def reverse(rng: random.Random, level: int, say: Phrasing) -> Draft:
    w = word(rng, *_LENGTHS[level - 1])
    return asked(say(REVERSE, w=say.quoted(w)), [], w[::-1], f"reverse {w}")


def upper(rng: random.Random, level: int, say: Phrasing) -> Draft:
    w = word(rng, *_LENGTHS[level - 1])
    return asked(say(UPPER, w=say.quoted(w)), [], w.upper(), f"upper {w}")


def remove(rng: random.Random, level: int, say: Phrasing) -> Draft:
    gone = rng.choice("aeiou")
    w = letters(rng, rng.randint(*_LENGTHS[level - 1]) + 2)
    w = "".join(gone if rng.random() < 0.25 else c for c in w) + rng.choice("bdgkmnprst")
    return asked(say(REMOVE, c=gone, w=say.quoted(w)), [], w.replace(gone, ""), f"remove {gone} {w}")


def shift(rng: random.Random, level: int, say: Phrasing) -> Draft:
    k, w = rng.randint(1, (1, 1, 2, 2, 3)[level - 1]), letters(rng, rng.randint(*_LENGTHS[level - 1]))
    moved = "".join(chr((ord(c) - 97 + k) % 26 + 97) for c in w)
    return asked(say(SHIFT, w=say.quoted(w), k=k), [], moved, f"shift {w},{k}")


def count(rng: random.Random, level: int, say: Phrasing) -> Draft:
    letter = rng.choice("abcdeiorst")
    w = "".join(letter if rng.random() < 0.3 else c for c in letters(rng, (4, 6, 9, 12, 16)[level - 1]))
    marks, total = [], 0
    for c in w:
        total += c == letter
        marks.append(f"{c}{total}")
    return asked(say(COUNT, c=letter, w=say.quoted(w)), [" ".join(marks)], total, f"count {letter} {w}")


def _some_words(rng: random.Random, level: int) -> list[str]:
    return rng.sample(_COMMON, (3, 4, 5, 6, 7)[level - 1])


def reorder(rng: random.Random, level: int, say: Phrasing) -> Draft:
    words = _some_words(rng, level)
    return asked(say(REORDER, x=", ".join(words)), [], ", ".join(words[::-1]), f"reorder {sorted_text(words)}")


def alphabetize(rng: random.Random, level: int, say: Phrasing) -> Draft:
    words = _some_words(rng, level)
    return asked(
        say(ALPHABETIZE, x=say.listed(words)), [], ", ".join(sorted(words)), f"alphabetize {sorted_text(words)}"
    )


def initials(rng: random.Random, level: int, say: Phrasing) -> Draft:
    words = _some_words(rng, level)
    return asked(say(INITIALS, x=say.listed(words)), [], "".join(w[0] for w in words), f"initials {sorted_text(words)}")


def word_step(rng: random.Random, w: str, before: str) -> tuple[str, str, str]:
    """(kind, its letter, the word after it): a step that leaves 3 to 16 letters and is not the one before."""
    while True:
        kind = rng.choice([kind for kind in _APPLY if kind != before])
        c = rng.choice("abcdefghijklmnopqrstuvwxyz")
        c = c.upper() if w.isupper() else c
        after = _APPLY[kind](w, c)
        if 3 <= len(after) <= 16 and not (kind == "upper" and w.isupper()):
            return kind, c, after
