"""Word problems of several steps, small tables in the prompt, and who-is-taller puzzles."""

import itertools
import random

from models.training.second.drafts import Draft, asked, sorted_text
from models.training.second.wording import Phrasing

NAMES = (
    "Anna", "Ben", "Carl", "Dora", "Emma", "Finn", "Gina", "Hugo", "Ida", "Jack", "Kate", "Leo", "Mia", "Nick", "Olga", "Paul",
    "Rosa", "Sam", "Tina", "Umar", "Vera", "Will", "Yara", "Zoe",
)  # fmt: skip
THINGS = (
    "apples", "pears", "plums", "eggs", "books", "pens", "cups", "coins", "stamps", "cards", "balls", "shells", "nuts", "keys",
    "stones", "cakes", "roses", "boxes", "hats", "rolls",
)  # fmt: skip
BEGIN = ("{who} [has|owns|starts with|had] {n} {what}.", "[At first,|In the morning,] {who} has {n} {what}.")
EVENTS = {
    "+": (
        "{who} [buys|finds|gets|receives|picks] {n} more[ {what}|].", "[A friend|{other}] gives {who} {n} {what}.",
        "[Then|Later|After that] {who} [buys|finds|gets] {n} more.",
    ),
    "-": (
        "{who} [loses|sells|eats up|throws away|uses|gives away] {n}[ of them| {what}|].", "{who} gives {n}[ {what}|] to {other}.",
        "[Then|Later|After that] {who} [loses|sells|gives away] {n}.",
    ),
    "*": (
        "{who} [buys|gets|finds] {m} [bags|packs|boxes] [of|with] {n} {what}[ each|].",
        "{m} friends give {who} {n} {what} each.",
    ),
    "double": ("[Then|Later|Now] the number of {what} doubles.", "{who} doubles the number of {what}."),
    "halve": ("{who} [gives away|sells|loses] half of [them|the {what}].", "Half of the {what} are [lost|sold|given away]."),
}  # fmt: skip
QUESTION = (
    "How many {what} does {who} have[ now| in the end| left|]?", "How many {what} [are there now|are left]?",
    "[Tell me how|Say how|Find out how] many {what} {who} has now.",
)  # fmt: skip
TABLE = (
    "{rows}\n{question}",
    "[Table|Prices|List|Price list|Here is a table|Use this table|Data]:\n{rows}\n{question}",
)
ASK_ONE = (
    "[What is the price of|How much is|What does the table say for|Look up|What is the value for|Price of] {a}[?|.]",
)
ASK_MANY = (
    "[What do|How much do] {n} {a} cost?", "[What is the price of|Give the price of|How much are] {n} {a}?",
    "[I buy|Someone buys] {n} {a}. How much is that?",
)  # fmt: skip
ASK_TWO = (
    "[What do|How much do] {n} {a} and {m} {b} cost[ together|]?", "[I buy|Someone buys] {n} {a} and {m} {b}. How much is that?",
    "[Give|Find|What is] the [total|price|cost] of {n} {a} and {m} {b}[.|?]",
)  # fmt: skip
ASK_MORE = (
    "[How much more|By how much more] do {a} cost than {b}?", "[What is|Give] the difference [between|in price of] {a} and {b}[?|.]",
)  # fmt: skip
ASK_BEST = (
    "[Which costs the most|Which is the dearest|What has the highest price|Which has the largest value]?",
    "[Name|Give|Find] the [dearest|one that costs most].",
)
ASK_ALL = (
    "[What do all cost together|What is the sum of all prices|What is the total of the table|How much is one of each]?",
    "[Add up|Sum] [all prices|the whole table].",
)
FACT = ("{a} is {more} than {b}.", "{b} is {less} than {a}.")
SCALES = (
    ("taller", "shorter", "tallest", "shortest"),
    ("older", "younger", "oldest", "youngest"),
    ("faster", "slower", "fastest", "slowest"),
)
ASK_TOP = ("Who is the {most}?", "[Name|Tell me|Find|Give] the {most}[ one| of them|].")
ASK_ORDER = ("[List|Order|Sort|Name] them from {most} to {least}.", "[Give|Write] the order from {most} to {least}.")


def story(rng: random.Random, level: int, say: Phrasing) -> Draft:
    """What someone has, after several events; every event is a line of working."""
    who, other = rng.sample(NAMES, 2)
    what, value = rng.choice(THINGS), rng.randint(5, 40)
    sentences, lines, key = [say.phrase(BEGIN, who=who, n=value, what=what)], [], str(value)
    for _ in range((1, 2, 3, 5, 7)[level - 1]):
        kinds = (
            ["+", "+", "*"]
            + ["-", "-"] * (value > 12)
            + ["double"] * (value < 100)
            + ["halve"] * (value % 2 == 0 and value > 20)
        )
        kind, n, m = rng.choice(kinds), rng.randint(2, min(30, value - 2) if value > 12 else 9), rng.randint(2, 6)
        if kind == "*":
            n = rng.randint(2, 12)
            lines += [f"{m}*{n}={m * n}", f"{value}+{m * n}={value + m * n}"]
            value += m * n
        elif kind in "+-":
            after = value + n if kind == "+" else value - n
            lines.append(f"{value}{kind}{n}={after}")
            value = after
        else:
            after = value * 2 if kind == "double" else value // 2
            lines.append(f"{value}{'*' if kind == 'double' else '/'}2={after}")
            value = after
        sentences.append(say.phrase(EVENTS[kind], who=who, other=other, n=n, m=m, what=what))
        key += f" {kind}{n if kind in '+-*' else ''}{f',{m}' if kind == '*' else ''}"
    sentences.append(say.phrase(QUESTION, who=who, what=what))
    return asked(say.noisy(" ".join(sentences)), lines, value, f"story {key}")


def table_rows(rng: random.Random, level: int) -> dict[str, int]:
    return {
        what: rng.randint(2, (9, 12, 20, 30, 60)[level - 1]) for what in rng.sample(THINGS, (3, 4, 5, 6, 8)[level - 1])
    }


def table(rng: random.Random, level: int, say: Phrasing) -> Draft:
    rows = table_rows(rng, level)
    a, b = rng.sample(sorted(rows), 2)
    n, m = rng.randint(2, 9), rng.randint(2, 9)
    kinds = (("one",), ("one", "many"), ("many", "more", "best"), ("two", "more", "best"), ("two", "all"))[level - 1]
    kind = rng.choice(kinds)
    x, y = rows[a], rows[b]
    if kind == "more" and x < y:
        a, b, x, y = b, a, y, x
    patterns = {"one": ASK_ONE, "many": ASK_MANY, "two": ASK_TWO, "more": ASK_MORE, "best": ASK_BEST, "all": ASK_ALL}[
        kind
    ]
    question = say.phrase(patterns, a=a, b=b, n=n, m=m)
    values = list(rows.values())
    if kind == "best" and values.count(max(values)) > 1:
        rows[a] = x = max(values) + 1
    lines, answer = {
        "one": lambda: ([], str(x)),
        "many": lambda: ([f"{a}: {x}", f"{n}*{x}={n * x}"], str(n * x)),
        "two": lambda: (
            [f"{a}: {x}", f"{n}*{x}={n * x}", f"{b}: {y}", f"{m}*{y}={m * y}", f"{n * x}+{m * y}={n * x + m * y}"],
            str(n * x + m * y),
        ),
        "more": lambda: ([f"{a}: {x}", f"{b}: {y}", f"{x}-{y}={x - y}"], str(x - y)),
        "best": lambda: ([], max(rows, key=lambda row: rows[row])),
        "all": lambda: (_summed(values), str(sum(values))),
    }[kind]()
    layout = say.rng.choice(("{}: {}", "{}: {}", "{} {}", "{} = {}", "| {} | {} |", "{},{}"))
    text = ("\n" if layout[0] != "{" or say.rng.random() < 0.8 else "; ").join(
        layout.format(*item) for item in rows.items()
    )
    about = {"one": a, "many": f"{n} {a}", "two": sorted_text((f"{n} {a}", f"{m} {b}")), "more": f"{a},{b}"}.get(
        kind, ""
    )
    key = f"table {sorted_text([f'{what}={price}' for what, price in rows.items()])} {kind} {about}"
    return asked(say(TABLE, rows=text, question=question), lines, answer, key)


def _summed(values: list[int]) -> list[str]:
    lines, total = [], values[0]
    for n in values[1:]:
        lines.append(f"{total}+{n}={total + n}")
        total += n
    return lines


def puzzle(rng: random.Random, level: int, say: Phrasing) -> Draft:
    """Who is the tallest, or all of them in order; the facts come in any order. No working is shown."""
    people = rng.sample(NAMES, (2, 3, 4, 5, 6)[level - 1])
    more, less, most, least = rng.choice(SCALES)
    pairs = list(itertools.pairwise(people))
    rng.shuffle(pairs)
    facts = " ".join(say.phrase(FACT, a=a, b=b, more=more, less=less) for a, b in pairs)
    kind = rng.choice(("most", "least", "order"))
    if kind == "order":
        question, answer = say.phrase(ASK_ORDER, most=most, least=least), ", ".join(people)
    else:
        question = say.phrase(ASK_TOP, most=most if kind == "most" else least)
        answer = people[0] if kind == "most" else people[-1]
    return asked(say.noisy(f"{facts} {question}"), [], answer, f"puzzle {more} {'>'.join(people)}")
