"""How a problem is put into words: many wordings for each task, some of them held out, and the surface noise of real prompts.

A pattern such as `[Sort|Order] {x}[ from small to large| in ascending order]` stands for several wordings. A wording is held
out by a checksum of its text, so that a model can be asked in wordings it was never trained on.
"""

import random
import re
import zlib
from collections.abc import Callable
from collections.abc import Sequence as Seq

HELD_OUT_SHARE = 6  # one wording in six is never trained on
TRIES = 60  # at drawing a wording of the split that is asked for
MARKS = ".?!:"
PREFIXES = (
    "Please", "please", "Can you", "Could you", "Could you please", "Would you", "Hi,", "Hello,", "Now", "I want you to",
    "Hey, please", "Quick question:", "Question:", "Task:", "Help me:", "Tell me:", "Hello.", "One more:", "Next:",
)  # fmt: skip
SUFFIXES = (
    "Thanks.", "Thanks!", "Thank you.", "thanks", "thank you", "please", "Please.", "Thanks a lot!", "Thanks in advance.",
    "Many thanks.", "Thank you!", "pls", "Answer quickly.", "I need this today.",
)  # fmt: skip
_CHOICE = re.compile(r"\[([^\[\]]*)\]")
_FIELD = re.compile(r"\{(\w+)\}")

Noise = Callable[[str, random.Random], str]


def expand(pattern: str, rng: random.Random) -> str:
    """One wording of a pattern."""
    return _CHOICE.sub(lambda match: rng.choice(match[1].split("|")), pattern)


def expansions(pattern: str) -> list[str]:
    """All wordings of a pattern."""
    match = _CHOICE.search(pattern)
    if match is None:
        return [pattern]
    return [
        text
        for option in match[1].split("|")
        for text in expansions(pattern[: match.start()] + option + pattern[match.end() :])
    ]


def is_held_out(wording: str) -> bool:
    return zlib.crc32(wording.encode()) % HELD_OUT_SHARE == 0


def clean(text: str, rng: random.Random) -> str:
    """No noise."""
    return text


def surface(text: str, rng: random.Random) -> str:
    """Noise as people type it: courtesies, another final mark or none, case, spaces. Half of the texts stay as they are."""
    if rng.random() < 0.5:
        return text
    if rng.random() < 0.3:
        text = polite(text, rng)
    if rng.random() < 0.4:
        text = other_mark(text, rng)
    if rng.random() < 0.35:
        text = lower_first(text, rng)
    if rng.random() < 0.25:
        text = thanked(text, rng)
    if rng.random() < 0.06:
        text += rng.choice((" ", "\n", "  "))
    if rng.random() < 0.04:
        text = text.replace(" ", "  ", 1)
    return text


def polite(text: str, rng: random.Random) -> str:
    """A courtesy in front; what follows mostly begins with a small letter then."""
    prefix = rng.choice(PREFIXES)
    return f"{prefix} {lower_first(text, rng) if prefix[-1] not in '.:' or rng.random() < 0.5 else text}"


def please(text: str, rng: random.Random) -> str:
    return f"Please {lower_first(text, rng)}"


def thanked(text: str, rng: random.Random) -> str:
    """A courtesy at the end, after a mark."""
    return f"{text if text[-1] in MARKS else text + rng.choice(('.', ',', '', '.'))} {rng.choice(SUFFIXES)}"


def thanks(text: str, rng: random.Random) -> str:
    return f"{text if text[-1] in MARKS else text + '.'} Thanks."


def other_mark(text: str, rng: random.Random) -> str:
    """Another final mark than the one there is, or none."""
    bare = text.rstrip(MARKS)
    return bare + rng.choice([mark for mark in ("", "", ".", ".", "?", "!") if bare + mark != text])


def flipped_mark(text: str, rng: random.Random) -> str:
    """Without its final mark, or with a full stop where there was none."""
    return text[:-1] if text[-1] in MARKS else text + "."


def lower_first(text: str, rng: random.Random) -> str:
    return text[:1].lower() + text[1:]


class Phrasing:
    """Puts problems into words: `held_out` wordings or trained ones, with `noise`. Remembers the wordings it used."""

    def __init__(self, rng: random.Random, *, held_out: bool = False, noise: Noise = surface) -> None:
        self.rng, self.used = rng, list[str]()
        self.held_out, self._noise = held_out, noise

    def __call__(self, patterns: Seq[str], **fields: object) -> str:
        """One of the patterns' wordings, filled in, with noise.

        Raises:
            ValueError: All the patterns' wordings are held out, and trained ones are asked for.
        """
        return self.noisy(self.phrase(patterns, **fields))

    def phrase(self, patterns: Seq[str], **fields: object) -> str:
        """Like a call, without noise: for a part of a message. Patterns that have no held-out wording give a trained one."""
        for _ in range(TRIES):
            wording = expand(self.rng.choice(patterns), self.rng)
            if is_held_out(wording) is self.held_out:
                break
        else:
            if not self.held_out:
                raise ValueError(f"all wordings of {patterns[0]!r} are held out")
        self.used.append(wording)
        return _FIELD.sub(lambda match: str(fields[match[1]]), wording)

    def noisy(self, text: str) -> str:
        return self._noise(text, self.rng)

    def listed(self, items: Seq[object]) -> str:
        """Items in a row, mostly `a, b, c`."""
        texts = [str(item) for item in items]
        style = self.rng.random()
        if style < 0.1:
            return ",".join(texts)
        if style < 0.2:
            return " ".join(texts)
        if style < 0.3 and len(texts) > 1:
            return ", ".join(texts[:-1]) + " and " + texts[-1]
        return ", ".join(texts)

    def quoted(self, word: str) -> str:
        """A word in quotation marks of either kind, or bare."""
        mark = self.rng.choice(("'", "'", "'", '"', '"', ""))
        return f"{mark}{word}{mark}"
