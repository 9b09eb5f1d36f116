"""`python -m penstock.worker_service.grammar.trial_process`: tries grammars, in processes with limits.

The library has no limit of its own for some schemas: `multipleOf` of a large prime keeps it busy for minutes, and nothing can
interrupt it. This process builds the vocabulary once and forks, so it must not have threads. A child tries one grammar after
another, as a fork for each costs ten times what most grammars do; it ends with one that is too expensive.

stdin: lines of JSON: first the vocabulary (tokens in base64, ids of its ends), then [number, grammar, field] for each trial.
stdout: a line of JSON for each trial, [number, problem], null for none, as they end.
"""

import base64
import contextlib
import json
import os
import resource
import select
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from penstock.services.domain.errors import InvalidRequest
from penstock.worker_service.grammar.source import GrammarSource
from penstock.worker_service.grammar.token_grammar import Vocabulary, compiled

CPU_S, MEMORY_BYTES = 1, 512 << 20
KEPT_BYTES = 32 << 20
"""What a child may keep of the grammars before: the next one has so much less."""
NICE = 10  # the worker's steps come first
TOO_EXPENSIVE = f"cannot be enforced: compiling it takes more than {CPU_S} s or {MEMORY_BYTES >> 20} MB"
_STDIN, _STDOUT = 0, 1


class _Stdin:
    """Splits what comes from the worker into lines."""

    def __init__(self) -> None:
        self._rest, self.ended = b"", False

    def read(self) -> list[bytes]:
        """Read once; return the lines that are complete."""
        data = os.read(_STDIN, 1 << 20)
        self.ended = not data
        *lines, self._rest = (self._rest + data).split(b"\n")
        return lines


@dataclass(slots=True)
class _Child:
    """A process that tries grammars. trials, results: the ends of its pipes. number: of the trial that it runs, if any."""

    process: int
    trials: int
    results: int
    memory_bytes: int
    number: int | None = None

    def start(self, trial: bytes) -> None:
        self.number, _, _ = json.loads(trial)
        data = trial + b"\n"
        with contextlib.suppress(BrokenPipeError):  # `take` tells of its end
            while data:
                data = data[os.write(self.trials, data) :]

    def take(self) -> bool:
        """Pass on the result that has come; False if the child has ended or is of no more use."""
        result = os.read(self.results, select.PIPE_BUF)
        number, self.number = self.number, None
        if result:
            os.write(_STDOUT, result)
            return _memory_bytes(self.process) <= self.memory_bytes + KEPT_BYTES
        if number is not None:
            os.write(_STDOUT, _line(number, TOO_EXPENSIVE))
        return False

    def end(self) -> None:
        self.close()
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process, signal.SIGKILL)
        os.waitpid(self.process, 0)

    def close(self) -> None:
        os.close(self.trials)
        os.close(self.results)


def main() -> None:
    """Serve until stdin ends."""
    os.nice(NICE)
    stdin, vocabulary = _Stdin(), None
    children: list[_Child] = []
    while not stdin.ended:
        ready, _, _ = select.select([_STDIN, *(child.results for child in children)], [], [])
        for child in [each for each in children if each.results in ready]:
            if not child.take():
                child.end()
                children.remove(child)
        for line in stdin.read() if _STDIN in ready else ():
            if vocabulary is None:
                tokens, eos_ids = json.loads(line)
                vocabulary = Vocabulary([base64.b64decode(token) for token in tokens], eos_ids, _spelled_otherwise)
                continue
            idle = next((child for child in children if child.number is None), None)
            if idle is None:
                idle = _fork(vocabulary, children)
                children.append(idle)
            idle.start(line)
    for child in children:
        child.end()


def _fork(vocabulary: Vocabulary, others: list[_Child]) -> _Child:
    (trials, to_child), (results, from_child) = os.pipe(), os.pipe()
    if (process := os.fork()) == 0:
        for other in others:
            other.close()  # their ends are told by the ends of their pipes
        for pipe in (_STDIN, _STDOUT, to_child, results):
            os.close(pipe)
        _serve(trials, from_child, vocabulary)
    os.close(trials)
    os.close(from_child)
    return _Child(process, to_child, results, _memory_bytes(process))


def _spelled_otherwise(_: bytes) -> list[int]:
    """No tokens for a text that the grammar forces: the library takes others that spell it, which compiling does not need."""
    return []


def _serve(trials: int, results: int, vocabulary: Vocabulary) -> NoReturn:
    """Compile one grammar after another within the limits. Beyond them, the kernel ends this process."""
    try:
        limit = _memory_bytes(os.getpid()) + MEMORY_BYTES
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        for line in os.fdopen(trials, "rb"):
            number, text, field = json.loads(line)
            signal.setitimer(signal.ITIMER_PROF, CPU_S)  # of CPU time; its signal ends the process
            problem = None
            try:
                compiled(GrammarSource(text, field), vocabulary)
            except InvalidRequest as error:
                problem = error.problems[0].problem
            signal.setitimer(signal.ITIMER_PROF, 0)
            os.write(results, _line(number, problem))
    except BaseException:  # a panic of the library, or no memory
        os._exit(1)
    os._exit(0)


def _memory_bytes(process: int) -> int:
    """Of the addresses of a process."""
    return int(Path(f"/proc/{process}/statm").read_text().split()[0]) * resource.getpagesize()


def _line(number: int, problem: str | None) -> bytes:
    """A result, of less than PIPE_BUF."""
    return json.dumps([number, problem]).encode() + b"\n"


if __name__ == "__main__":
    main()
