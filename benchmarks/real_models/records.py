"""What is committed of the answers: a record without text for each.

Records are added; a record that is there stays, so they outlive the answers. Programs are run in the sandbox of the scorer
`code`, a right one passes the tests of the set.
"""

import hashlib
import json
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from benchmarks import report
from benchmarks.real_models.generate import BELIEVED, SAMPLES, Store, yes_share
from benchmarks.real_models.prompts import FILES, MODELS, Task, tasks
from penstock.judge_service.scorers.code.examples import code_in, examples_in
from penstock.judge_service.scorers.code.extension import program_in
from penstock.judge_service.scorers.code.sandbox.bubblewrap import Sandbox
from penstock.judge_service.scoring.comparison import same

FOLDER = report.RESULTS / "real_models"
RUN_S = 20.0


@dataclass(frozen=True, slots=True)
class Record:
    """A model's answer to a prompt. right: None: not known. examples: (shown, passed) by the prompt. believed: P(right) by
    model. samples: whether further answers agree with it; a program agrees if it passes as many examples.
    """

    id: str
    set: str
    right: bool | None
    tokens: tuple[int, int]
    truncated: bool
    mean: float
    least: float
    examples: tuple[int, int]
    hash: str
    believed: dict[str, float] = field(default_factory=dict)
    samples: list[bool] = field(default_factory=list)


def read(model: str) -> dict[str, Record]:
    """The records of a model by prompt, in their order."""
    file = FOLDER / f"{model}.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []
    return {row["id"]: Record(**row) for row in rows}


async def derived(task: Task, row: dict[str, Any], sandbox: Sandbox) -> Record:
    logprobs, text = np.array(row["logprobs"] or [0.0]), row["text"]
    shown = examples_in(task.text) if task.tests else []
    return Record(
        id=task.id,
        set=task.set,
        right=await is_right(task, text, sandbox) and row["reason"] == "stop" if task.tests or task.answer else None,
        tokens=tuple(row["tokens"]),
        truncated=row["reason"] != "stop",
        mean=round(float(logprobs.mean()), 4),
        least=float(logprobs.min()),
        examples=(len(shown), await passed(task, text, shown, sandbox)),
        hash=hashlib.sha256(text.encode()).hexdigest()[:16],
    )


async def is_right(task: Task, text: str, sandbox: Sandbox) -> bool:
    if task.tests:
        return await sandbox.passed(program_in(text), [task.tests], task.shown) == 1
    return same("number", text, task.answer)


async def passed(task: Task, text: str, shown: list[str], sandbox: Sandbox) -> int:
    return await sandbox.passed(program_in(text), shown, code_in(task.text)) if shown else 0


async def update(model: str, store: Store, sandbox: Sandbox) -> int:
    """Add what has come since; returns the number of records."""
    known = read(model)
    answers = store.read(model, "answer")
    sampled = [store.read(model, f"sample-{i}") for i in range(1, SAMPLES + 1)]
    believed = {judge: store.read(judge, f"belief:{model}") for judge, answerer in BELIEVED if answerer == model}
    for task in (task for name in FILES for task in tasks(name)):
        if task.id not in known and task.id in answers:
            known[task.id] = await derived(task, answers[task.id], sandbox)
        if task.id not in answers:
            continue
        record = known[task.id]
        for judge, rows in believed.items():
            if task.id in rows:
                record.believed[judge] = round(yes_share(rows[task.id]), 4)
        if not record.samples and all(task.id in rows for rows in sampled):
            for rows in sampled:
                record.samples.append(await agrees(task, answers[task.id], rows[task.id], sandbox))
    FOLDER.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(asdict(record), separators=(",", ":")) for record in known.values()]
    (FOLDER / f"{model}.jsonl").write_text("".join(line + "\n" for line in lines))
    return len(known)


async def agrees(task: Task, answer: dict[str, Any], sample: dict[str, Any], sandbox: Sandbox) -> bool:
    if not task.tests:
        return same("number", sample["text"], answer["text"])
    shown = examples_in(task.text)
    return await passed(task, sample["text"], shown, sandbox) == await passed(task, answer["text"], shown, sandbox)


async def update_all() -> None:
    store, sandbox = Store(), Sandbox(RUN_S)
    await sandbox.start()
    for model in MODELS:
        print(model, await update(model, store, sandbox), "records")
