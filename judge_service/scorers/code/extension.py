"""Verifies code: runs the answer's Python program with tests, in a sandbox. The entry point `code`."""

import ast
import asyncio
import logging
import re
from collections.abc import Sequence as Seq
from typing import Literal, Self

from penstock.judge_service.scorers.code.examples import code_in, examples_in
from penstock.judge_service.scorers.code.sandbox.bubblewrap import Sandbox, SandboxUnavailable
from penstock.judge_service.scoring.extension import ScorerSite, TimedScorer
from penstock.judge_service.scoring.interface import RawScore, Scorer
from penstock.services.background import gathered
from penstock.services.domain.errors import Unavailable, invalid
from penstock.types.judging import JudgedAnswer
from penstock.types.prompts import ChatPrompt, Prompt, TextPrompt

_log = logging.getLogger(__name__)

_BLOCK = re.compile(r"^```[ \t]*([\w+-]*)[^\n]*\n(.*?)(?:^```|\Z)", re.MULTILINE | re.DOTALL)
_PYTHON = ("", "py", "python", "python3")


def program_in(answer: str) -> str:
    """The longest fenced block of Python in an answer; the whole answer without any."""
    blocks = [code for language, code in _BLOCK.findall(answer) if language.lower() in _PYTHON]
    return max(blocks, key=len) if blocks else answer


NOTHING_SHOWN = 0.5
"""Raw score where the prompt shows no examples, or the answer holds no program."""


def has_program(answer: str) -> bool:
    """Whether an answer holds a Python program, as a fenced block or alone."""
    if program_in(answer) is not answer:
        return True
    try:
        compile(answer, "answer", "exec", flags=ast.PyCF_ONLY_AST)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return True


class CodeScorer(Scorer):
    """Runs the answer's program, and then in its namespace each test: the reference, or the examples that the prompt shows.

    raw: 1 if all pass, 0 if not; in between for what has no tests. Score without calibration: the same in percent.
    """

    def __init__(
        self, sandbox: Sandbox, *, concurrency: int, from_prompt: bool = False, optional: bool = False
    ) -> None:
        """from_prompt: tests are the prompt's examples. optional: where the sandbox does not work, nothing is run."""
        self._sandbox, self._slots = sandbox, asyncio.Semaphore(concurrency)
        self._from_prompt, self._optional, self._works = from_prompt, optional, True

    async def start(self) -> None:
        """Make sure that the sandbox works."""
        try:
            await self._sandbox.start()
        except SandboxUnavailable as error:
            if not self._optional:
                raise ValueError(str(error)) from error
            _log.warning("programs are not run, so they are scored as if the prompt showed no examples: %s", error)
            self._works = False

    async def score(self, answers: Seq[JudgedAnswer]) -> list[RawScore]:
        if not self._from_prompt:
            for i, item in enumerate(answers):
                if item.reference is None:
                    raise invalid(f"items[{i}].reference", "this scorer needs the tests, a Python program")
        return [RawScore.of_share(raw) for raw in await gathered(*map(self._raw, answers))]

    async def _raw(self, item: JudgedAnswer) -> float:
        program, preamble, tests = program_in(item.answer), "", [item.reference or ""]
        if self._from_prompt:
            if not self._works or not has_program(item.answer):
                return NOTHING_SHOWN
            task = _task(item.prompt)
            if not (tests := examples_in(task)):
                return NOTHING_SHOWN
            preamble = code_in(task)
        async with self._slots:
            try:
                return float(await self._sandbox.passed(program, tests, preamble) == len(tests))
            except (SandboxUnavailable, OSError) as error:
                raise Unavailable(f"the sandbox cannot run programs: {error}") from error


def _task(prompt: Prompt) -> str:
    """What the user asked last; empty for tokens."""
    match prompt:
        case ChatPrompt(messages=messages):
            return next((message.content for message in reversed(messages) if message.role == "user"), "")
        case TextPrompt(text=text):
            return text
    return ""


class Code(TimedScorer):
    """`code`: whether the answer's program passes tests, in a sandbox. `timeout_s` is for the program with its tests."""

    tests: Literal["reference", "prompt"] = "reference"
    """Where the tests are: the reference, a Python program; or the examples that the prompt itself shows, such as doctests or
    `f(1) == 2`. An answer to a prompt that shows none has a score in the middle, as has one without a program."""
    sandbox: Literal["required", "optional"] = "required"
    """`optional`: where the sandbox does not work, the judge starts all the same and runs nothing."""

    def patient(self) -> Self:
        return self  # its limit is part of what its score means

    def needs_reference(self) -> bool:
        return self.tests == "reference"

    def stated_weight(self) -> tuple[float, float] | None:
        return (6.0, 0.5) if self.tests == "prompt" else None

    def build(self, site: ScorerSite) -> CodeScorer:
        return CodeScorer(
            Sandbox(self.limit_s(site)),
            concurrency=self.concurrency,
            from_prompt=self.tests == "prompt",
            optional=self.sandbox == "optional",
        )
