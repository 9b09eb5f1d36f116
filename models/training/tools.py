"""Two tools, called as Hermes and Qwen models call them: a calculator, and a lookup in a table that the tool holds."""

import json
import random

from models.training.arithmetic import ADD, EXPRESSION, MULTIPLY, SUBTRACT
from models.training.drafts import Draft, number, sorted_text
from models.training.problems import Message, tool_call
from models.training.things import ASK_MANY, ASK_ONE, ASK_TWO, THINGS
from models.training.wording import Phrasing

CALCULATOR_SAYS = (
    "Evaluate an arithmetic expression.", "Calculate the value of an expression.", "A calculator.", "Does arithmetic.",
    "Compute the result of an arithmetic expression with + - * and brackets.",
)  # fmt: skip
LOOKUP_SAYS = (
    "Look up the price of an item.", "Find an item in the table.", "Look up a value in the table by its key.", "Price lookup.",
    "Returns what the table holds for a key.",
)  # fmt: skip
EXPRESSION_SAYS = ("", "The expression.", "The expression to evaluate.", "For example 2+3*4.")
KEY_SAYS = ("", "The key.", "The item's name.", "What to look up.")


def definition(name: str, says: str, parameter: str, parameter_says: str) -> dict[str, object]:
    """A function of one text parameter, as OpenAI's API describes it."""
    described = {"type": "string"} | ({"description": parameter_says} if parameter_says else {})
    parameters = {"type": "object", "properties": {parameter: described}, "required": [parameter]}
    return {"type": "function", "function": {"name": name, "description": says, "parameters": parameters}}


def system_text(definitions: list[dict[str, object]], system: str = "") -> str:
    """The system message with tools, as the chat template renders it."""
    listed = "\n".join(json.dumps(definition) for definition in definitions)
    return f"{system}\n<tools>\n{listed}\n</tools>".lstrip("\n")


def _offered(say: Phrasing) -> Message:
    """Both tools, in any order, described in several ways."""
    rng = say.rng
    both = [
        definition("calculator", rng.choice(CALCULATOR_SAYS), "expression", rng.choice(EXPRESSION_SAYS)),
        definition("lookup", rng.choice(LOOKUP_SAYS), "key", rng.choice(KEY_SAYS)),
    ]
    rng.shuffle(both)
    system = rng.choice(("", "", "You are a helpful assistant.", "Use the tools.", "Call a tool where it helps."))
    return Message("system", system_text(both, system))


def tools(rng: random.Random, level: int, say: Phrasing) -> Draft:
    """A chat with tools, cut before one of the assistant's turns: a call, the next call, or the answer.

    Levels: 1 one calculation of small numbers; 2 one lookup; 3 larger calculations; 4 a lookup, then a product; 5 two lookups
    and one calculation.
    """
    if level in (1, 3):
        expression, value, prompt = _calculation(rng, level, say)
        steps = [(tool_call("calculator", expression=expression), str(value))]
        key = f"tool {expression}"
    else:
        kind = {2: "one", 4: "many", 5: "two"}[level]
        a, b = rng.sample(THINGS, 2)
        n, m, x, y = rng.randint(2, 40), rng.randint(2, 40), rng.randint(2, 99), rng.randint(2, 99)
        patterns = {"one": ASK_ONE, "many": ASK_MANY, "two": ASK_TWO}[kind]
        prompt = say(patterns, n=n, m=m, a=a, b=b)
        steps = [(tool_call("lookup", key=a), str(x))]
        value, key = x, f"tool {kind} {a}={x}"
        if kind == "many":
            value = n * x
            steps.append((tool_call("calculator", expression=f"{n}*{x}"), str(value)))
            key += f" {n}"
        if kind == "two":
            value = n * x + m * y
            steps.append((tool_call("lookup", key=b), str(y)))
            steps.append((tool_call("calculator", expression=f"{n}*{x}+{m}*{y}"), str(value)))
            key = f"tool two {sorted_text((f'{n}*{a}={x}', f'{m}*{b}={y}'))}"
    messages = [_offered(say), Message("user", prompt)]
    until = rng.randrange(len(steps) + 1)
    for call, result in steps[:until]:
        messages += [Message("assistant", call), Message("tool", result)]
    if until == len(steps):
        return Draft(tuple(messages), (), str(value), (key,))
    return Draft(tuple(messages), (), steps[until][0], (key,))


def _calculation(rng: random.Random, level: int, say: Phrasing) -> tuple[str, int, str]:
    """(expression, value, prompt)."""
    kind = rng.choice(("add", "subtract", "multiply") if level == 1 else ("add", "subtract", "multiply", "nested"))
    digits = 2 if level == 1 else rng.randint(3, 6)
    a, b = number(rng, digits), number(rng, digits)
    if kind == "add":
        return f"{a}+{b}", a + b, say(ADD[:3], a=a, b=b)
    if kind == "subtract":
        a, b = max(a, b), min(a, b)
        return f"{a}-{b}", a - b, say(SUBTRACT[:1] + SUBTRACT[2:4], a=a, b=b)
    if kind == "multiply":
        return f"{a}*{b}", a * b, say(MULTIPLY, a=a, b=b)
    c = rng.randint(2, 99)
    text = rng.choice((f"({a}+{b})*{c}", f"{a}*{c}+{b}", f"{a}+{b}*{c}"))
    value = {"(": (a + b) * c, "*": a * c + b, "+": a + b * c}[text[0] if text[0] == "(" else text[len(str(a))]]
    return text, value, say(EXPRESSION, x="".join(f" {s} " if s in "+*" else s for s in text))
