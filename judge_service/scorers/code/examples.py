"""The examples that a programming task shows of itself, as tests. No I/O, and nothing of the text is run here."""

import ast
import builtins
import re
from collections.abc import Iterator
from itertools import chain, islice
from textwrap import dedent

MAX_EXAMPLES = 32
MAX_CHARS, MAX_LINE, MAX_CALLS, MAX_ENDS = 16_000, 400, 256, 64
"""What is read of a prompt: characters, those of a line, calls, and ends of a literal. Longer lines are no examples.

They bound the work for a prompt of any kind to about a second.
"""
_FENCE = re.compile(r"^```[^\n]*$", re.MULTILINE)
_CALL = re.compile(r"(?<![\w.])(?:assert\s+)?([A-Za-z_]\w*)\(")
_IS = re.compile(
    r"`?\s*(?:#\s*)?(?:===?>|=>|==?|➞|→|->|⇒|evaluates to\b|(?:should|must|will)? *(?:returns?|be|give|gives|is)\b)\s*:?\s*",
    re.IGNORECASE,
)
_OUTPUT = re.compile(
    r"\b(?:Input|For)\b *:? *(.{1,200}?)[ ,;.]{0,4}(?:\n\s{0,40}Output *:|the (?:output|result|answer) should be) *(.+)",
    re.IGNORECASE,
)
_DEFINITION = re.compile(r"^[ \t]*(?:async +)?def +([A-Za-z_]\w*) *\(", re.MULTILINE)
_WORDS = {"true": "True", "false": "False", "none": "None", "null": "None"}
_TEST = """\
import math as _math
def _alike(a, b):
    if isinstance(b, float) and isinstance(a, (int, float)):
        return _math.isclose(a, b, rel_tol=1e-6, abs_tol=1e-9)
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)) and len(a) == len(b):
        return all(map(_alike, a, b))
    return a == b
assert _alike({call}, {expected})
"""


def examples_in(prompt: str) -> list[str]:
    """Tests, each a Python program that runs after the answer's; none for a prompt that shows no examples.

    An example is a doctest (`>>> f(1)` and the value below), a call with its value (`f(1) == 2`, `f(1) => 2`, `f(1) returns
    2`), or arguments with a value (`Input: n = 1` and `Output: 2` below, `For n = 1 the output should be 2`) where the prompt
    begins exactly one function. Values are literals; what cannot be read as one is no example.
    """
    text = "\n".join(line for line in prompt[:MAX_CHARS].splitlines() if len(line) <= MAX_LINE)
    begun = set(_DEFINITION.findall(text))
    shown = dict.fromkeys(  # each once
        (call, literal)
        for call, literal in (*islice(_doctests(text), MAX_CALLS), *_calls(text), *_outputs(text, begun))
        if _is_of_task(call.partition("(")[0], begun)
    )
    return [_TEST.format(call=call, expected=literal) for call, literal in list(shown)[:MAX_EXAMPLES]]


def code_in(prompt: str) -> str:
    """The code of a task, which may have imports and helpers that an answer uses; empty without any that can be compiled."""
    text = prompt[: 4 * MAX_CHARS]
    for piece in (*_FENCE.split(text, 2 * MAX_EXAMPLES)[1::2], text):
        code = dedent(piece).strip("\n") + "\n"
        try:
            tree = ast.parse(code)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            continue
        if any(isinstance(each, ast.FunctionDef | ast.ClassDef | ast.Import | ast.ImportFrom) for each in tree.body):
            return code
    return ""


def _is_of_task(name: str, begun: set[str]) -> bool:
    """Whether a function can be the answer's. begun: those that the prompt begins."""
    return name in begun if begun else not hasattr(builtins, name)


def _doctests(text: str) -> Iterator[tuple[str, str]]:
    lines = text.splitlines()
    for i, line in enumerate(lines):
        call = line.strip().removeprefix(">>>").strip()
        if line.strip().startswith(">>>") and _is_call(call):
            value = lines[i + 1].strip() if i + 1 < len(lines) else ""
            if not value or value.startswith((">>>", '"""', "'''")):
                yield call, "None"
            elif (literal := _literal(value)) is not None:
                yield call, literal


def _calls(text: str) -> Iterator[tuple[str, str]]:
    lines = [line for line in text.splitlines() if not line.strip().startswith(("def ", "async def ", ">>>"))]
    for match in islice(chain.from_iterable(map(_CALL.finditer, lines)), MAX_CALLS):
        line = match.string
        end = _closing(line, match.end() - 1)
        call = line[match.start(1) : end]
        relation = _IS.match(line, end)
        if end and relation and _is_call(call) and (literal := _literal(line[relation.end() :])) is not None:
            yield call, literal


def _outputs(text: str, begun: set[str]) -> Iterator[tuple[str, str]]:
    if len(begun) != 1:
        return
    for match in _OUTPUT.finditer(text):
        call, literal = f"{next(iter(begun))}({match[1].strip()})", _literal(match[2])
        if literal is not None and _is_call(call):
            yield call, literal


def _is_call(text: str) -> bool:
    """Whether it is a call with literal arguments."""
    try:
        node = ast.parse(text, mode="eval").body
        if not isinstance(node, ast.Call):
            return False
        for argument in (*node.args, *(keyword.value for keyword in node.keywords)):
            ast.literal_eval(argument)
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return False
    return True


def _literal(text: str) -> str | None:
    """The longest beginning of a line that is a literal, up to a comment or the end of a sentence; None without any."""
    text = text.strip()
    if (begin := re.match(r"[A-Za-z]+", text)) and begin[0].lower() in _WORDS:
        return _WORDS[begin[0].lower()]
    ends = [len(text), *(match.start() for match in re.finditer(r"\.?\s|[.,;)#]", text))]
    for end in sorted(sorted(ends)[:MAX_ENDS], reverse=True):
        candidate = text[:end].rstrip(" .,;")
        try:
            value = ast.literal_eval(candidate)
        except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
            continue
        rest = text[len(candidate) :].lstrip()
        return None if re.match(r"[-+*/%<>=]", rest) else repr(value)  # part of a longer expression
    return None


def _closing(line: str, start: int) -> int:
    """The place after the bracket that closes the one at `start`; 0 without one. Brackets in strings do not count."""
    depth, quote = 0, ""
    for i in range(start, len(line)):
        character = line[i]
        if quote:
            quote = "" if character == quote and line[i - 1] != "\\" else quote
        elif character in "'\"":
            quote = character
        elif character in "([{":
            depth += 1
        elif character in ")]}":
            depth -= 1
            if not depth:
                return i + 1
    return 0
