"""Code and documentation use the usual technical words, so that newcomers recognise them.

The tables below give the word to use for each word that is refused. `EXEMPT` lists the files that still have old words.
"""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import ROOT

LOCALS = {
    "told": "response, message, record",
    "said": "message, line, text",
    "asked": "request, question",
    "made": "the result's own name",
    "found": "result, match, or the thing that was found",
    "wanted": "expected, requested, target",
    "kept": "remaining, stored",
    "mine": "own, indices, variables",
    "word": "text, report",
}
"""Local variables and parameters that name an act instead of a thing -> better names."""

NAMES = {
    "Gate": "AdmissionQueue",
    "Familiar": "PrefixAffinity",
    "Peers": "InstancePool",
    "Splice": "ReplyAssembler",
    "Patience": "RetryPolicy",
    "Stand": "Accept",
    "Climb": "Escalate",
    "Panel": "ScorerRegistry",
    "Seat": "RegisteredScorer",
    "ReplySession": "ReplyMultiplexer, ReplyDemultiplexer",
    "Draining": "InFlightRequests",
    "Conversation": "ResumableRequest",
    "told_errors": "cli_error_handling",
    "transfer_desk": "TransferQueue",
    "leash": "parent_death_signal",
    "keeper": "PlanPublisher",
}
"""Functions, classes and modules -> the name that the field uses."""

PHRASES = {
    r"anew": "again",
    r"nobody|somebody": "name the component",
    r"whoever": "name the component",
    r"likeliest": "most likely",
    r"for ever": "forever, without limit",
    r"under way": "active, running, in flight",
    r"beside": "next to, concurrently with, in addition to",
    r"goes? on at|goes? on elsewhere": "continues on",
    r"is away": "is unavailable",
    r"suspect(?:ed)?": "ejected",
    r"so (?:long|many|often) as": "as long as, while",
    r"(?<!leave )(?<!leaves )(?<!nothing )behind(?! (?:an?|one|each|every|Penstock)\b)": "after; `behind a proxy` may stay",
    r"(?:stands?(?!-in)|stood|standing)": "is, is kept, is accepted, means",
    r"go(?:es|ing)? on|went on": "continues",
    r"besides": "in addition to, other than",
    r"twins?": "compiled version, counterpart",
    r"the very": "the same, exactly the",
    r"hand(?:s|ed)? on": "passes on",
}
"""Expressions in comments, docstrings, messages and pages -> what to write."""

CODE = (
    "penstock",
    "services",
    "judge_service",
    "worker_service",
    "router_service",
    "planner_service",
    "benchmarks",
    "scripts",
    "examples",
)
PAGES = (
    "README.md",
    "CONTRIBUTING.md",
    "docs/*.md",
    "docs/tutorials/*.md",
    "docs/how-to/*.md",
    "docs/reference/*.md",
    "docs/explanation/*.md",
    "docs/adr/*.md",
    "protos/**/*.proto",
    "examples/*.yaml",
    "deploy/*.yaml",
)
EXEMPT: tuple[str, ...] = ("penstock/proto",)  # generated
_PHRASE = re.compile(r"\b(?:" + "|".join(f"({phrase})" for phrase in PHRASES) + r")\b", re.IGNORECASE)


def code_files(folder: str) -> Iterator[Path]:
    for path in sorted((ROOT / folder).rglob("*.py")):
        name = path.relative_to(ROOT).as_posix()
        if not any(name == exempt or name.startswith(f"{exempt}/") for exempt in EXEMPT):
            yield path


def names_in(source: str) -> Iterator[tuple[int, str, str]]:
    """(line, name, better name) of each refused name that a module defines."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and node.name.strip("_") in NAMES:
            yield node.lineno, node.name, NAMES[node.name.strip("_")]
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id in LOCALS:
            yield node.lineno, node.id, LOCALS[node.id]
        if isinstance(node, ast.arg) and node.arg in LOCALS:
            yield node.lineno, node.arg, LOCALS[node.arg]


def phrases_in(text: str, line: int = 1) -> Iterator[tuple[int, str, str]]:
    """(line, phrase, what to write) of each refused phrase in a text that begins at `line`."""
    better = [*PHRASES.values()]
    for match in _PHRASE.finditer(text):
        assert match.lastindex is not None
        yield line + text.count("\n", 0, match.start()), match[0], better[match.lastindex - 1]


def prose_in(source: str) -> Iterator[tuple[int, str]]:
    """(line, text) of the comments and strings of a module."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type in (tokenize.COMMENT, tokenize.STRING):
            yield token.start[0], token.string


def problems(path: Path) -> list[str]:
    source = path.read_text()
    found = list(names_in(source)) if path.suffix == ".py" else []
    texts = prose_in(source) if path.suffix == ".py" else [(1, source)]
    found += [problem for line, text in texts for problem in phrases_in(text, line)]
    where = path.relative_to(ROOT)
    return [f"{where}:{line}: '{word}': write {better}" for line, word, better in sorted(found)]


@pytest.mark.parametrize("folder", CODE)
def test_code_uses_the_usual_words(folder: str) -> None:
    assert [problem for path in code_files(folder) for problem in problems(path)] == []


@pytest.mark.parametrize("pattern", PAGES)
def test_pages_use_the_usual_words(pattern: str) -> None:
    paths = sorted(ROOT.glob(pattern))
    assert paths
    assert [problem for path in paths for problem in problems(path)] == []


def test_exempt_files_exist() -> None:
    assert [exempt for exempt in EXEMPT if not (ROOT / exempt).exists()] == []


def test_refused_words_are_reported_with_their_line() -> None:
    source = 'def f(asked: int) -> None:\n    """First.\n\n    Computed anew.\n    """\n    told = asked  # beside\n'
    names = [(line, name) for line, name, _ in names_in(source)]
    assert sorted(names) == [(1, "asked"), (6, "told")]
    phrases = [(line, phrase) for at, text in prose_in(source) for line, phrase, _ in phrases_in(text, at)]
    assert phrases == [(4, "anew"), (6, "beside")]
