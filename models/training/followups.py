"""Chats of two and three turns: each follow-up continues from the last result ("now add 7", "and the largest?")."""

import random

from models.training import arithmetic, lists, text
from models.training.columns import columns_added, columns_multiplied, columns_subtracted
from models.training.drafts import Draft, sorted_text
from models.training.problems import Message
from models.training.wording import Phrasing
from models.training.words import word

_THEN = "[Now|And now|Then|Next,|OK, now|Good. Now|]"
NUMBER = {
    "+": (
        f"{_THEN} [add|plus] {{n}}[.|]",
        f"{_THEN} add {{n}} to [it|that|the result][.|]",
        "[Plus|And] {n} more[.|?]",
    ),
    "-": (f"{_THEN} [take away|subtract|minus] {{n}}[.|]", f"{_THEN} subtract {{n}} from [it|that|the result][.|]"),
    "*": (f"{_THEN} [multiply by|times] {{n}}[.|]", f"{_THEN} multiply [it|that|the result] by {{n}}[.|]"),
}
LIST = {
    "up": (f"{_THEN} sort [them|it] [from small to large|in ascending order|upwards][.|]",),
    "down": (f"{_THEN} sort [them|it] [from large to small|in descending order|downwards][.|]", "[And now in|Now in|In] descending order[.|?]"),
    "reverse": (f"{_THEN} reverse [them|it|the order|the list][.|]",),
    "even": (f"{_THEN} [keep|keep only|pick] the even [ones|numbers][.|]", "[Which of them|Which|And which] are even?"),
    "odd": (f"{_THEN} [keep|keep only|pick] the odd [ones|numbers][.|]", "[Which of them|Which|And which] are odd?"),
    "add": (f"{_THEN} add {{n}} to [each|all of them|every number][.|]",),
    "double": (f"{_THEN} double [them|each|all][.|]",),
    "first": (f"{_THEN} [drop|remove|leave out] the first[ one| number|][.|]",),
    "last": (f"{_THEN} [drop|remove|leave out] the last[ one| number|][.|]",),
    "sum": (f"{_THEN} [add them up|sum them|give the sum][.|]", "[And what is|What is|What's] [the sum|their sum][?|]"),
    "largest": ("[And the|The|Which is the|What is the] [largest|biggest][ of them| one|]?",),
    "smallest": ("[And the|The|Which is the|What is the] [smallest|least][ of them| one|]?",),
}  # fmt: skip
WORD = {
    kind: tuple(f"{_THEN} {pattern}" for pattern in patterns)
    for kind, patterns in {
        "reverse": ("[reverse it|turn it around|write it backwards|spell it backwards][.|]",),
        "upper": ("[write it in capitals|put it in capitals|make it upper case][.|]",),
        "first": ("[drop|remove|leave out] the first letter[.|]",),
        "last": ("[drop|remove|leave out] the last letter[.|]",),
        "double": ("[double it|write it twice|repeat it][.|]",),
        "swap": ("[swap|exchange] the first and the last letter[.|]",),
        "append": ("[add|append|put] '{c}' [at the end|to the end][.|]",),
    }.items()
}
_TURNS = (1, 1, 2, 2, 2)  # follow-ups at each level


def _chat(first: Draft, later: list[tuple[str, list[str], str, str]]) -> Draft:
    """The first turn and its follow-ups: (prompt, working, answer, key); the last one's reply is the problem's."""
    messages, reply, keys = list(first.messages), first.reply, [*first.keys]
    for prompt, lines, answer, key in later:
        draft = Draft((), lines, answer, ())
        messages += [Message("assistant", reply), Message("user", prompt)]
        reply = draft.reply
        keys.append(f"{keys[-1]} then {key}")
    prompt, lines, answer, _ = later[-1]
    return Draft(tuple(messages), lines, answer, tuple(keys))


def numbers(rng: random.Random, level: int, say: Phrasing) -> Draft:
    maker = rng.choice((arithmetic.add, arithmetic.subtract, arithmetic.chain, lists.add_up))
    first = maker(rng, min(level, 3), say)
    value, later = int(first.answer), list[tuple[str, list[str], str, str]]()
    for _ in range(_TURNS[level - 1]):
        sign = rng.choice("++-" if value >= 20 else "+") if level < 3 or rng.random() < 0.7 else "*"
        n = rng.randint(2, 9) if sign == "*" else rng.randint(1, (19, 19, 50, 99, 99)[level - 1])
        if sign == "-":
            n = min(n, value)
        lines = {
            "+": columns_added, "-": columns_subtracted, "*": columns_multiplied,
        }[sign](value, n)  # fmt: skip
        value = {"+": value + n, "-": value - n, "*": value * n}[sign]
        later.append((say(NUMBER[sign], n=n).lstrip(), lines, str(value), f"{sign}{n}"))
    return _chat(first, later)


def list_of_numbers(rng: random.Random, level: int, say: Phrasing) -> Draft:
    values = rng.sample(range(1, 100), (3, 4, 5, 6, 7)[level - 1])
    kind = rng.choice(("sort", "keep"))
    if kind == "keep" and (evens := [n for n in values if n % 2 == 0]) and len(evens) > 1:
        prompt, now = say(lists.KEEP, kind="even", x=say.listed(values)), evens
    else:
        kind, prompt, now = "sort", say(lists.SORT_UP, x=say.listed(values)), sorted(values)
    first = Draft((Message("user", prompt),), [], lists.row(now), (f"{kind} {sorted_text(values)}",))
    later = list[tuple[str, list[str], str, str]]()
    for turn in range(_TURNS[level - 1]):
        last = turn == _TURNS[level - 1] - 1
        ends = ("sum", "largest", "smallest")
        if last and rng.random() < 0.5:
            op = rng.choice(ends)
            lines, result = lists.end_lines(op, now)
            later.append((say(LIST[op]).lstrip(), lines, str(result), op))
            break
        op, n, now = lists.list_step(rng, now, [kind for kind in LIST if kind not in ends])
        later.append((say(LIST[op], n=n).lstrip(), [], lists.row(now), f"{op}{n if op == 'add' else ''}"))
    return _chat(first, later)


def letters(rng: random.Random, level: int, say: Phrasing) -> Draft:
    w = word(rng, *((3, 4), (4, 5), (5, 6), (6, 7), (7, 8))[level - 1])
    if rng.random() < 0.5:
        first, now, before = (
            Draft((Message("user", say(text.REVERSE, w=say.quoted(w))),), [], w[::-1], (f"reverse {w}",)),
            w[::-1],
            "reverse",
        )
    else:
        first, now, before = (
            Draft((Message("user", say(text.UPPER, w=say.quoted(w))),), [], w.upper(), (f"upper {w}",)),
            w.upper(),
            "upper",
        )
    later = list[tuple[str, list[str], str, str]]()
    for _ in range(_TURNS[level - 1]):
        kind, c, now = text.word_step(rng, now, before)
        before = kind
        later.append((say(WORD[kind], c=c).lstrip(), [], now, f"{kind}{c if kind == 'append' else ''}"))
    return _chat(first, later)
