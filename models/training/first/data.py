"""Training batches: problems become chats, chats of similar length share a batch, only replies are trained on."""

import random
from collections.abc import Iterator

from models.training.first import tasks
from models.training.rows import ASSISTANT, BOS, END, IGNORED, SYSTEM, USER, Batch, Row, pack, pad, text_ids

SYSTEM_PROMPTS = ("You are a helpful assistant.", "Answer briefly.", "You solve small puzzles.")


def turn_ids(problem: tasks.Problem) -> tuple[list[int], list[int]]:
    """(prompt ids up to the assistant token, reply ids with the end token)."""
    return [USER, *text_ids(problem.prompt), END, ASSISTANT], [*text_ids(problem.reply), END]


def _chat(problems: list[tasks.Problem], system: str | None) -> Row:
    ids, labels = [BOS], [IGNORED]
    if system is not None:
        message = [SYSTEM, *text_ids(system), END]
        ids += message
        labels += [IGNORED] * len(message)
    for problem in problems:
        prompt, reply = turn_ids(problem)
        ids += prompt + reply
        labels += [IGNORED] * len(prompt) + reply
    return ids, labels


def batches(
    seed: int, tokens_per_batch: int, *, long_share: float, weights: dict[tuple[str, int], float] | None = None
) -> Iterator[Batch]:
    """Yield training batches without end. `long_share` of them hold chats of several turns, up to 2,048 tokens long."""
    rng = random.Random(seed)
    source = tasks.stream(seed + 1, held_out=False, weights=weights)
    while True:
        pool = sorted(
            (_chat([next(source)], rng.choice(SYSTEM_PROMPTS) if rng.random() < 0.03 else None) for _ in range(4096)),
            key=lambda row: len(row[0]),
        )
        packed = pack(pool, tokens_per_batch)
        packed += [_long(rng, source, tokens_per_batch) for _ in range(round(len(packed) * long_share))]
        rng.shuffle(packed)
        yield from packed


def _long(rng: random.Random, source: Iterator[tasks.Problem], tokens_per_batch: int) -> Batch:
    length = rng.choice((256, 256, 512, 512, 512, 1024, 2048))
    rows = []
    for _ in range(max(1, tokens_per_batch // length)):
        turns: list[tasks.Problem] = []
        while len((row := _chat(turns, None))[0]) < length:
            turns.append(next(source))
        rows.append((row[0][:length], row[1][:length]))
    return pad(rows)
