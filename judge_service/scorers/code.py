"""Verifies code: runs the answer's Python program with the tests of the reference, in a sandbox."""

import asyncio
import re
from collections.abc import Sequence as Seq

from judge_service.sandbox import Sandbox, SandboxUnavailable
from judge_service.scorers.interface import JudgedAnswer, RawScore, ScorerKind
from services.background import end
from services.domain.errors import Unavailable, invalid

_BLOCK = re.compile(r"^```[ \t]*([\w+-]*)[^\n]*\n(.*?)(?:^```|\Z)", re.MULTILINE | re.DOTALL)
_PYTHON = ("", "py", "python", "python3")


def program_in(answer: str) -> str:
    """The longest fenced block of Python in an answer; the whole answer without any."""
    blocks = [code for language, code in _BLOCK.findall(answer) if language.lower() in _PYTHON]
    return max(blocks, key=len) if blocks else answer


class CodeScorer:
    """100 if the answer's program passes the tests, Python code that runs after it in the same namespace; 0 otherwise."""

    kind = ScorerKind.CODE
    needs_logprobs = False
    needs_reference = True
    scores_unfinished = False

    def __init__(self, sandbox: Sandbox, *, concurrency: int) -> None:
        self._sandbox, self._slots = sandbox, asyncio.Semaphore(concurrency)

    async def start(self) -> None:
        """Make sure that the sandbox works.

        Raises:
            ValueError: It does not.
        """
        try:
            await self._sandbox.start()
        except SandboxUnavailable as error:
            raise ValueError(str(error)) from error

    async def close(self) -> None:
        pass

    async def score(self, answers: Seq[JudgedAnswer]) -> list[RawScore]:
        for i, item in enumerate(answers):
            if item.reference is None:
                raise invalid(f"items[{i}].reference", "this scorer needs the tests, a Python program")
        tasks = [asyncio.create_task(self._passes(item)) for item in answers]
        try:
            return [RawScore(float(passes), 100.0 * passes) for passes in await asyncio.gather(*tasks)]
        finally:  # after a failure or a cancellation, end the other runs
            await end(*tasks)

    async def _passes(self, item: JudgedAnswer) -> bool:
        async with self._slots:
            try:
                return await self._sandbox.passes(program_in(item.answer), item.reference or "")
            except (SandboxUnavailable, OSError) as error:
                raise Unavailable(f"the sandbox cannot run programs: {error}") from error
