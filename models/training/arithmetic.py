"""Tasks about numbers: sums in columns, chains of steps, binary, progressions."""

import random

from models.training.columns import columns_added, columns_multiplied, columns_subtracted
from models.training.drafts import Draft, asked, number, sorted_text  # fmt: skip
from models.training.wording import Phrasing

_ASK = "[What is|What's|Calculate|Compute|Work out|Find|Give me|Solve|How much is|What do you get for|What does this make:] "
ADD = (
    _ASK + "{a}[ + | plus |+]{b}[?|.|]",
    "[Add|Sum up|Add up|Add together|Find the sum of|What is the sum of|Give the sum of|The sum of] {a} and {b}[.|?|]",
    "{a}[ + | plus |+]{b}[ = ?| =|=|=?| equals| is| makes what?| is what?]",
    "[Add|Put] {b} [to|on top of] {a}[.|]",
    "[What do|How much do] {a} and {b} [make|give|add up to][ together|]?",
)
SUBTRACT = (
    _ASK + "{a}[ - | minus |-| less ]{b}[?|.|]",
    "[Subtract|Take|Take away|Deduct|Remove] {b} from {a}[.|]",
    "{a}[ - | minus |-]{b}[ = ?| =|=|=?| equals| is| makes what?| is what?]",
    "[What is|Give|Find|Compute] the difference [between|of] {a} and {b}[.|?]",
    "[How much|What] is left [if|when] [you take|I take|one takes] {b} [from|away from] {a}?",
)
MULTIPLY = (
    _ASK + "{a}[ * | times | x |*| multiplied by ]{b}[?|.|]",
    "[Multiply|Take] {a} [by|times] {b}[.|]",
    "{a}[ * | times | x |*]{b}[ = ?| =|=|=?| equals| is| makes what?| is what?]",
    "[What is|Give|Find|Compute] the product of {a} and {b}[.|?]",
)
CHAIN = (
    "[Start with|Begin with|Begin at|Start at|Start from|Take|Let x be|Take the number|I have] {start}. {steps}",
    "[Start with|Begin with|Start from|Take|Here is a number:] {start}. {steps} [What do you get?|What is the result?|What is it now?|"
    "Where do you end?|Give the result.]",
    "{start}. {steps} [What do you get?|What is the result?|What is it now?|The result?]",
)
STEP = {
    "add": ("[Add|Plus|Then add|Next, add|Now add|And add] {n}.", "[Increase|Raise] it by {n}."),
    "take": (
        "[Take away|Take|Subtract|Minus|Then subtract|Next, subtract|Now take away|Then take away] {n}.",
        "[Decrease|Lower|Reduce] it by {n}.",
    ),
    "double": ("[Double|Double it|Then double it|Next, double it|Multiply by 2|Times 2|Now double].",),
    "halve": ("[Halve|Halve it|Then halve it|Next, halve it|Divide by 2|Take half of it|Now halve].",),
    "triple": ("[Triple|Triple it|Then triple it|Multiply by 3|Times 3|Now triple].",),
}
EXPRESSION = (
    _ASK + "{x}[?|.|]",
    "{x}[ = ?| =|=|=?|]",
    "[Evaluate|Simplify|The value of|What is the value of] {x}[.|?|]",
)
BINARY = (
    "[Write|Give|Show|Convert|Put|Express] {n} [in|to|into|as] binary[.|]",
    "[What is|How do you write|Write|Give me] {n} in [base 2|binary|base two][?|.|]",
    "[Binary|Binary form|The binary form] of {n}[?|.|]",
)
NEXT = (
    "[What comes next|What comes next in|Continue|Go on|Carry on|Continue the row|Extend|Which numbers follow|What follows|Next]"
    "[: | ]{x}[?|.|, ...|]",
    "[Give|Tell me|Write|Find|What are] the next three[ numbers| terms|][: | after | of ]{x}[.|?|]",
)
COUNT_BY = (
    "[Count|List the numbers|Write the numbers|Go|Give the numbers|Say the numbers|Numbers|Count up or down] from {a} to {b} "
    "[by|in steps of|by steps of] {k}[.|]",
)


def add(rng: random.Random, level: int, say: Phrasing) -> Draft:
    a, b = number(rng, rng.randint(level, level + 1)), number(rng, level + 1)
    if rng.random() < 0.5:
        a, b = b, a
    return asked(say(ADD, a=a, b=b), columns_added(a, b), a + b, f"add {sorted_text((a, b))}")


def subtract(rng: random.Random, level: int, say: Phrasing) -> Draft:
    a, b = sorted((number(rng, level + 1), number(rng, rng.randint(level, level + 1))), reverse=True)
    return asked(say(SUBTRACT, a=a, b=b), columns_subtracted(a, b), a - b, f"subtract {a},{b}")


def multiply(rng: random.Random, level: int, say: Phrasing) -> Draft:
    if level == 1:
        a, b = rng.randint(0, 12), rng.randint(0, 12)
    else:
        a, b = number(rng, (2, 3, 2, 3)[level - 2]), number(rng, (1, 1, 2, 2)[level - 2])
    lines = columns_multiplied(a, b) if level > 1 else []
    return asked(say(MULTIPLY, a=a, b=b), lines, a * b, f"multiply {sorted_text((a, b))}")


def chain_step(rng: random.Random, value: int, say: Phrasing) -> tuple[str, str, str, int]:
    """(wording of the step, its working, its key, the value after it)."""
    kinds = ["add"] * 3 + ["take"] * (3 if value >= 20 else 0) + ["triple"] * (value <= 60)
    kinds += ["double"] * (value <= 200) + ["halve"] * (value % 2 == 0 and value > 30)
    kind, n = rng.choice(kinds), rng.randint(1, 19)
    sign, n = {"add": ("+", n), "take": ("-", n), "double": ("*", 2), "halve": ("/", 2), "triple": ("*", 3)}[kind]
    after = {"+": value + n, "-": value - n, "*": value * n, "/": value // 2}[sign]
    return say.phrase(STEP[kind], n=n), f"{value}{sign}{n}={after}", f"{sign}{n}", after


def chain(rng: random.Random, level: int, say: Phrasing) -> Draft:
    value = start = rng.randint(1, 40)
    sentences, lines, keys = [], [], []
    for _ in range((2, 4, 6, 9, 13)[level - 1]):
        text, line, key, value = chain_step(rng, value, say)
        sentences.append(text)
        lines.append(line)
        keys.append(key)
    prompt = say(CHAIN, start=start, steps=" ".join(sentences))
    return asked(prompt, lines, value, f"chain {start}{''.join(keys)}")


def binary(rng: random.Random, level: int, say: Phrasing) -> Draft:
    n = rng.randint((1, 8, 32, 128, 512)[level - 1], (31, 63, 255, 511, 2047)[level - 1])
    lines, quotient = [], n
    while quotient:
        lines.append(f"{quotient}=2*{quotient // 2}+{quotient % 2}")
        quotient //= 2
    return asked(say(BINARY, n=n), lines, f"{n:b}", f"binary {n}")


def progression(rng: random.Random, level: int, say: Phrasing) -> Draft:
    step = rng.randint((1, 2, 3, 5, 12)[level - 1], (3, 6, 12, 25, 60)[level - 1]) * rng.choice((1, 1, 1, -1))
    first = rng.randint(0, (20, 50, 90, 200, 500)[level - 1]) + (8 * abs(step) if step < 0 else 0)
    shown, following = [first + i * step for i in range(4)], [first + i * step for i in range(4, 7)]
    return asked(say(NEXT, x=", ".join(map(str, shown))), [], ", ".join(map(str, following)), f"next {first},{step}")


def count_by(rng: random.Random, level: int, say: Phrasing) -> Draft:
    terms, step = (4, 8, 14, 22, 36)[level - 1], rng.randint(1, (2, 5, 9, 12, 12)[level - 1])
    first = rng.randint(0, 99)
    values = [first + i * step for i in range(terms)]
    if rng.random() < 0.5:
        values.reverse()
    prompt = say(COUNT_BY, a=values[0], b=values[-1], k=step)
    return asked(prompt, [], ", ".join(map(str, values)), f"count_by {first},{step},{terms}")
