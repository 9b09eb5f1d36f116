"""Forms of replies that cannot be enforced, or cost much: schemas, expressions, grammars. A number makes each new."""

import json
import random
from collections.abc import Callable

from penstock.types.structured import StructuredOutput


def hostile_form(rng: random.Random) -> StructuredOutput:
    name = rng.choice(list(HOSTILE))
    return HOSTILE[name](rng.randrange(10**6))


def _schema(number: int, **schema: object) -> StructuredOutput:
    return StructuredOutput(json_schema=json.dumps({"title": f"{number}", **schema}))


def _alternatives(number: int) -> StructuredOutput:
    pairs = [{"anyOf": [{"properties": {f"k{i}": {"type": t}}} for t in ("string", "null")]} for i in range(16)]
    return _schema(number, allOf=pairs)


def _deep(number: int) -> StructuredOutput:
    return StructuredOutput(json_schema='{"items":' * 60 + f'{{"not": {{"title": "{number}"}}}}' + "}" * 60)


HOSTILE: dict[str, Callable[[int], StructuredOutput]] = {
    "multiple of a prime": lambda n: _schema(n, type="integer", multipleOf=1_000_003),
    "unknown keyword": lambda n: _schema(n, **{"not": {}}),
    "endless reference": lambda n: _schema(n, **{"$ref": "#"}),
    "remote reference": lambda n: _schema(n, **{"$ref": f"http://127.0.0.1:9/{n}"}),
    "no value fits": lambda n: _schema(n, enum=[]),
    "product of alternatives": _alternatives,
    "deep": _deep,
    "wide": lambda n: _schema(n, type="object", properties={f"p{i}": {"type": ["string", "null"]} for i in range(900)}),
    "look-ahead": lambda n: StructuredOutput(regex=f"(?={n})a"),
    "repetition of repetitions": lambda n: StructuredOutput(regex=f"(.{{1,1000}}){{1,1000}}{n}"),
    "huge count": lambda n: StructuredOutput(regex=f"a{{1000000000}}{n}"),
    "ambiguous": lambda n: StructuredOutput(grammar=f'start: a\na: a a | "x" | "{n}" | '),
    "longer and longer": lambda n: StructuredOutput(grammar=f'start: x\nx: y y | y x y | "a"\ny: x | "{n}" | y y y\n'),
    "endless rule": lambda n: StructuredOutput(grammar=f"start: start // {n}"),
    "open brackets": lambda n: StructuredOutput(grammar=f"root ::= {n} " + "(" * 60_000),
    "chain of rules": lambda n: StructuredOutput(
        grammar="root ::= r0\n" + "".join(f'r{i} ::= "{n}" r{i + 1}\n' for i in range(250))
    ),
}
