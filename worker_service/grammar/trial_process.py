"""`python -m penstock.worker_service.grammar.trial_process`: tries grammars, in processes with limits.

The library has no limit of its own for some schemas: `multipleOf` of a large prime keeps it busy for minutes, and nothing can
interrupt it. This process builds the vocabulary once and forks, so it must not have threads. A child tries one grammar after
another, as a fork for each costs ten times what most grammars do; it ends with one that is too expensive.

stdin: frames of JSON, each after its length in eight bytes: first the vocabulary (tokens in base64, ids of its ends), then
[number, grammar, field] for each trial. stdout: a line of JSON for each trial, [number, problem], null for none, as they end.
"""

import base64
import contextlib
import json
import os
import resource
import select
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from llguidance import LLTokenizer, TokenizerWrapper

from penstock.services.domain.errors import InvalidRequest
from penstock.worker_service.grammar.source import GrammarSource
from penstock.worker_service.grammar.token_grammar import Vocabulary, compiled

CPU_S, MEMORY_BYTES = 1, 512 << 20
KEPT_BYTES = 32 << 20
"""What a child may keep of the grammars before: the next one has so much less."""
NICE = 10  # the worker's steps come first
TOO_EXPENSIVE = f"cannot be enforced: compiling it takes more than {CPU_S} s or {MEMORY_BYTES >> 20} MB"
_STDIN, _STDOUT = 0, 1


class _Tokens:
    """The tokens of a vocabulary, as the library asks for them."""

    bos_token_id = None

    def __init__(self, tokens: list[bytes], eos_id: int) -> None:
        self.tokens, self.eos_token_id = tokens, eos_id
        self.special_token_ids = list[int]()

        self._ids = {token: i for i, token in enumerate(tokens)}
        self._longest = max(map(len, tokens))

    def __call__(self, text: bytes) -> list[int]:
        """Tokens that spell a text which the grammar forces: any will do, where only compiling is tried."""
        ids, at = list[int](), 0
        while at < len(text):
            ends = range(min(len(text), at + self._longest), at, -1)
            end = next((end for end in ends if text[at:end] in self._ids), None)
            if end is None:
                return ids  # the library takes what is spelled
            ids.append(self._ids[text[at:end]])
            at = end
        return ids


class _Frames:
    """Splits what comes from a pipe into frames."""

    def __init__(self, pipe: int) -> None:
        self._pipe, self._buffer, self.ended = pipe, bytearray(), False

    def read(self) -> Iterator[Any]:
        """Read once, and yield what is complete."""
        data = os.read(self._pipe, 1 << 20)
        self.ended = not data
        self._buffer += data
        while len(self._buffer) >= 8 and len(self._buffer) >= 8 + (size := int.from_bytes(self._buffer[:8])):
            yield json.loads(self._buffer[8 : 8 + size])
            del self._buffer[: 8 + size]


@dataclass(slots=True)
class _Child:
    """A process that tries grammars. trials, results: the ends of its pipes. number: of the trial that it runs, if any."""

    process: int
    trials: int
    results: int
    memory_bytes: int
    number: int | None = None

    def start(self, frame: tuple[int, str, str]) -> None:
        self.number = frame[0]
        text = json.dumps(frame).encode()
        data = len(text).to_bytes(8) + text
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
    frames, vocabulary = _Frames(_STDIN), None
    children: list[_Child] = []
    while not frames.ended:
        ready, _, _ = select.select([_STDIN, *(child.results for child in children)], [], [])
        for child in [each for each in children if each.results in ready]:
            if not child.take():
                child.end()
                children.remove(child)
        for frame in frames.read() if _STDIN in ready else ():
            if vocabulary is None:
                vocabulary = _vocabulary(*frame)
                continue
            idle = next((child for child in children if child.number is None), None)
            if idle is None:
                idle = _fork(vocabulary, children)
                children.append(idle)
            idle.start(frame)
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


def _vocabulary(tokens: list[str], eos_ids: list[int]) -> Vocabulary:
    texts = [base64.b64decode(token) for token in tokens]
    wrapper = TokenizerWrapper(_Tokens(texts, eos_ids[0]))
    return Vocabulary(LLTokenizer(wrapper, n_vocab=len(texts), eos_token=eos_ids[0], slices=None), eos_ids, len(texts))


def _serve(trials: int, results: int, vocabulary: Vocabulary) -> NoReturn:
    """Compile one grammar after another within the limits. Beyond them, the kernel ends this process."""
    try:
        limit = _memory_bytes(os.getpid()) + MEMORY_BYTES
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        frames = _Frames(trials)
        while not frames.ended:
            for number, text, field in frames.read():
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
