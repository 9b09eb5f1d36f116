"""Lets each model answer each prompt once, for hours: `nice -n 19 chrt -i 0 python -m benchmarks.real_models answers`.

Answers are texts, which some licences keep out of this project: they go to `ANSWERS`, a line each as they come, and are not
asked again. What is asked, in this order for every round of prompts: greedy answers of all models; at the end of the first
rounds whether small models believe answers of theirs (one token), and samples of the smallest useful model.
"""

import json
import math
import time
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from benchmarks.real_models.prompts import EARLY_ROUNDS, MAX_TOKENS, MODELS, Task, rounds
from penstock.services.clock import SystemClock
from penstock.types.prompts import ChatMessage, ChatPrompt, TokenPrompt
from penstock.types.replies import TokenFrame
from penstock.types.requests import GenerationRequest
from penstock.types.sampling import SamplingParams
from penstock.types.workers import EngineFinished
from penstock.worker_service.engine.core import EngineCore
from penstock.worker_service.engine.llamacpp.engine import LlamaCppEngineOptions, llamacpp_core
from tests.support.real_models import FOLDER

ANSWERS = Path.home() / ".cache" / "penstock-real-answers"
AT_ONCE, KV_TOKENS = 8, 12_288
SAMPLES, TEMPERATURE = 4, 0.7
SAMPLED = MODELS[0]
BELIEVED = ((MODELS[0], MODELS[0]), (MODELS[1], MODELS[0]), (MODELS[1], MODELS[1]))
"""Who says whether whose answers are right."""
BELIEF = "Question:\n{}\n\nProposed answer:\n{}\n\nIs the proposed answer correct? Reply with one word, Yes or No."
YES_NO_LOGPROBS = 20


@dataclass(frozen=True, slots=True)
class Question:
    """What one model is asked: `kind` is `answer`, `sample-1` ... or `belief:MODEL`, whose answer it judges."""

    kind: str
    task: Task
    text: str
    sampling: SamplingParams


class Store:
    """The answers so far, a file for each model and kind of question."""

    def __init__(self, folder: Path = ANSWERS) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def read(self, model: str, kind: str) -> dict[str, dict[str, Any]]:
        """By prompt. The last line may be half written."""
        rows: dict[str, dict[str, Any]] = {}
        file = self._file(model, kind)
        for line in file.read_text().splitlines() if file.is_file() else ():
            try:
                row = json.loads(line)
            except ValueError:
                continue
            rows[row["id"]] = row
        return rows

    def append(self, model: str, kind: str, row: dict[str, Any]) -> None:
        with self._file(model, kind).open("a") as file:
            file.write(json.dumps(row) + "\n")

    def _file(self, model: str, kind: str) -> Path:
        return self._folder / f"{model}.{kind.replace(':', '-')}.jsonl"


def loaded(model: str) -> EngineCore:
    options = LlamaCppEngineOptions(FOLDER / f"{model}.gguf", model, kv_tokens=KV_TOKENS, max_running=AT_ONCE)
    return llamacpp_core(options, SystemClock())[0]


def outputs(
    core: EngineCore, requests: Iterator[GenerationRequest]
) -> Iterator[tuple[str, TokenFrame | EngineFinished]]:
    """(id, output) of requests whose prompts are tokens, AT_ONCE at a time. A failed one raises its error."""
    running = 0
    while True:
        for request in islice(requests, AT_ONCE - running):
            assert isinstance(request.prompt, TokenPrompt)
            core.add(request, [*request.prompt.token_ids])
            running += 1
        if not running:
            return
        for name, output in core.step():
            if isinstance(output, Exception):
                raise output
            if isinstance(output, TokenFrame | EngineFinished):
                running -= isinstance(output, EngineFinished)
                yield name, output


class Asker:
    """Models that stay loaded."""

    def __init__(self, store: Store) -> None:
        self._store, self._cores = store, dict[str, EngineCore]()

    def ask(self, model: str, questions: list[Question]) -> None:
        """Answer what is not answered yet, AT_ONCE at a time, and store each answer at its end."""
        known = {kind: self._store.read(model, kind) for kind in {question.kind for question in questions}}
        left = [question for question in questions if question.task.id not in known[question.kind]]
        if not left:
            return
        print(f"{time.strftime('%H:%M:%S')} {model}: {len(left)} x {left[0].kind}, {left[0].task.set}", flush=True)
        core, running = self._core(model), dict[str, _Running]()
        for name, output in outputs(core, (self._started(core, question, running) for question in left)):
            if isinstance(output, TokenFrame):
                running[name].take(output)
            else:
                ended = running.pop(name)
                self._store.append(model, ended.question.kind, ended.row(output))

    def _core(self, model: str) -> EngineCore:
        if model not in self._cores:
            self._cores[model] = loaded(model)
        return self._cores[model]

    def _started(self, core: EngineCore, question: Question, running: dict[str, "_Running"]) -> GenerationRequest:
        tokens = core.tokenizer.encode(ChatPrompt((ChatMessage("user", question.text),)))
        name = f"{question.task.id}/{question.kind}"
        running[name] = _Running(question, len(tokens))
        return GenerationRequest(name, TokenPrompt(tuple(tokens)), question.sampling)


class _Running:
    """A question that is being answered."""

    def __init__(self, question: Question, prompt_tokens: int) -> None:
        self.question, self.prompt_tokens = question, prompt_tokens
        self._text, self._logprobs, self._top = "", list[float](), list[tuple[str, float]]()

    def take(self, frame: TokenFrame) -> None:
        self._text += frame.text
        self._logprobs += [position.chosen.logprob for position in frame.logprobs]
        if not self._top and frame.logprobs:
            first = frame.logprobs[0].top
            self._top = [(each.token_bytes.decode(errors="replace"), round(each.logprob, 4)) for each in first]

    def row(self, finished: EngineFinished) -> dict[str, Any]:
        return {
            "id": self.question.task.id,
            "text": self._text,
            "reason": finished.reason.value,
            "tokens": [self.prompt_tokens, finished.usage.output_tokens],
            "logprobs": [round(logprob, 4) for logprob in self._logprobs],
            "first": self._top,
            "at": round(time.time()),
        }


def answers(some: list[Task]) -> list[Question]:
    return [
        Question("answer", task, task.text, SamplingParams(0.0, max_tokens=MAX_TOKENS[task.set], top_logprobs=0))
        for task in some
    ]


def samples(some: list[Task]) -> list[Question]:
    """All of a prompt together: they share its KV."""
    return [
        Question(
            f"sample-{i}",
            task,
            task.text,
            SamplingParams(TEMPERATURE, seed=i, max_tokens=MAX_TOKENS[task.set], top_logprobs=0),
        )
        for task in some
        for i in range(1, SAMPLES + 1)
    ]


def beliefs(store: Store, some: list[Task], answerer: str) -> list[Question]:
    """Whether each recorded answer is right, by one token."""
    given = store.read(answerer, "answer")
    return [
        Question(
            f"belief:{answerer}",
            task,
            BELIEF.format(task.shown, given[task.id]["text"]),
            SamplingParams(0.0, max_tokens=1, top_logprobs=YES_NO_LOGPROBS),
        )
        for task in some
        if task.id in given
    ]


def yes_share(row: dict[str, Any]) -> float:
    """P(yes) among yes and no, of a belief; one half where the model says neither."""
    shares = {"yes": 0.0, "no": 0.0}
    for token, logprob in row["first"]:
        if (reply := token.strip().lower()) in shares:
            shares[reply] += math.exp(logprob)
    total = sum(shares.values())
    return shares["yes"] / total if total else 0.5


def answer_all(recorded: Mapping[str, Container[str]]) -> None:
    """recorded: by model, the prompts whose answers have records, which are not asked again."""
    store = Store()
    asker = Asker(store)
    for number, some in enumerate(rounds()):
        for model in MODELS:
            asker.ask(model, answers([task for task in some if task.id not in recorded[model]]))
        if number == EARLY_ROUNDS:  # after the talk
            early = [task for _, tasks in zip(range(EARLY_ROUNDS), rounds(), strict=False) for task in tasks]
            for believer, answerer in BELIEVED:
                asker.ask(believer, beliefs(store, early, answerer))
            asker.ask(SAMPLED, samples([task for task in early if task.set == "gsm8k"]))
            asker.ask(SAMPLED, samples([task for task in early if task.set == "humaneval"]))
