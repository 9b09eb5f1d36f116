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
import multiprocessing
import os
import resource
import signal
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
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
    """A process that tries grammars, and our end of the pipe to it. number: of the trial that it runs, if any."""

    process: "multiprocessing.process.BaseProcess"
    pipe: "Connection[tuple[str, str], str | None]"
    memory_bytes: int
    number: int | None = None

    @classmethod
    def forked(cls, vocabulary: Vocabulary) -> "_Child":
        ours, theirs = multiprocessing.Pipe()
        process = multiprocessing.get_context("fork").Process(
            target=_serve, args=(ours, theirs, vocabulary), daemon=True
        )
        process.start()
        theirs.close()
        assert process.pid is not None
        return cls(process, ours, _memory_bytes(process.pid))

    def start(self, number: int, text: str, field: str) -> None:
        self.number = number
        with contextlib.suppress(BrokenPipeError):  # `take` tells of its end
            self.pipe.send((text, field))

    def take(self) -> bool:
        """Pass on the result that has come; False if the child has ended or is of no more use."""
        number, self.number = self.number, None
        try:
            problem, ended = self.pipe.recv(), False
        except (EOFError, ConnectionError):
            problem, ended = TOO_EXPENSIVE, True
        if number is not None:
            os.write(_STDOUT, json.dumps([number, problem]).encode() + b"\n")
        assert self.process.pid is not None
        return not ended and _memory_bytes(self.process.pid) <= self.memory_bytes + KEPT_BYTES

    def end(self) -> None:
        self.pipe.close()
        self.process.kill()
        self.process.join()


def main() -> None:
    """Serve until stdin ends."""
    os.nice(NICE)
    stdin, vocabulary = _Stdin(), None
    children: list[_Child] = []
    while not stdin.ended:
        ready = wait([_STDIN, *(child.pipe for child in children)])
        for child in [each for each in children if each.pipe in ready]:
            if not child.take():
                child.end()
                children.remove(child)
        for line in stdin.read() if _STDIN in ready else ():
            if vocabulary is None:
                coded, eos_ids = json.loads(line)
                tokens = [base64.b64decode(token) for token in coded]
                vocabulary = Vocabulary(tokens, eos_ids, _spelling(tokens))
                continue
            idle = next((child for child in children if child.number is None), None)
            if idle is None:
                idle = _Child.forked(vocabulary)
                children.append(idle)
            idle.start(*json.loads(line))
    for child in children:
        child.end()


def _spelling(tokens: list[bytes]) -> Callable[[bytes], list[int]]:
    """Of a text that a grammar forces, tokens that spell it: any will do, where only compiling is tried."""
    ids, longest = {token: i for i, token in enumerate(tokens)}, max(map(len, tokens))

    def spelled(text: bytes) -> list[int]:
        result, at = list[int](), 0
        while at < len(text):
            ends = range(min(len(text), at + longest), at, -1)
            end = next((end for end in ends if text[at:end] in ids), None)
            if end is None:
                return result  # the library takes what is spelled
            result.append(ids[text[at:end]])
            at = end
        return result

    return spelled


def _serve(parents: "Connection", trials: "Connection", vocabulary: Vocabulary) -> NoReturn:
    """Compile one grammar after another within the limits. Beyond them, the kernel ends this process."""
    try:
        parents.close()  # so that this process notices the end of the other one
        os.close(_STDOUT)
        limit = _memory_bytes(os.getpid()) + MEMORY_BYTES
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        while True:
            text, field = trials.recv()
            signal.setitimer(signal.ITIMER_PROF, CPU_S)  # of CPU time; its signal ends the process
            problem = None
            try:
                compiled(GrammarSource(text, field), vocabulary)
            except InvalidRequest as error:
                problem = error.problems[0].problem
            signal.setitimer(signal.ITIMER_PROF, 0)
            trials.send(problem)
    except BaseException:  # no more trials, a panic of the library, or no memory
        os._exit(1)


def _memory_bytes(process: int) -> int:
    """Of the addresses of a process."""
    return int(Path(f"/proc/{process}/statm").read_text().split()[0]) * resource.getpagesize()


if __name__ == "__main__":
    main()
