"""Training batches: chats of similar length share a batch, every reply in a chat is trained on."""

import random
from collections.abc import Iterator

from models.training.problems import Message, Problem
from models.training.rows import BOS, END, IGNORED, Batch, Row, pack, pad, text_ids
from models.training.tokenizer import ROLES, build

SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "Answer briefly.",
    "You solve small puzzles.",
    "Be brief.",
    "Be helpful.",
)
SYSTEM_SHARE = 0.05  # of the chats without tools begin with a system prompt
POOL = 2048  # chats that are sorted by length at a time
LONGEST = 1200  # tokens of a chat; longer ones are skipped
LONG_LENGTHS = (256, 256, 512, 512, 1024, 2048)  # tokens of several problems in one chat

_TOKENIZER = build()
ROLE_IDS = {role: int(_TOKENIZER.convert_tokens_to_ids(f"<|{role}|>")) for role in ROLES}


def message_ids(message: Message) -> list[int]:
    return [ROLE_IDS[message.role], *text_ids(message.content), END]


def turn_ids(problem: Problem) -> tuple[list[int], list[int]]:
    """(the chat's ids after the begin token, up to the reply; the reply's ids with the end token)."""
    prompt = [i for message in problem.messages for i in message_ids(message)]
    return [*prompt, ROLE_IDS["assistant"]], [*text_ids(problem.reply), END]


def chat_ids(messages: list[Message]) -> Row:
    """(ids, labels) of a chat with its begin token; labels are IGNORED outside the assistant's texts."""
    ids, labels = [BOS], [IGNORED]
    for message in messages:
        part = message_ids(message)
        ids += part
        labels += [IGNORED, *part[1:]] if message.role == "assistant" else [IGNORED] * len(part)
    return ids, labels


def with_reply(problem: Problem) -> list[Message]:
    return [*problem.messages, Message("assistant", problem.reply)]


def batches(source: Iterator[Problem], seed: int, tokens_per_batch: int, long_share: float) -> Iterator[Batch]:
    """Yield training batches without end. `long_share` of them hold chats of several problems."""
    rng = random.Random(seed)
    while True:
        pool = list[Row]()
        while len(pool) < POOL:
            messages = with_reply(next(source))
            if messages[0].role != "system" and rng.random() < SYSTEM_SHARE:
                messages.insert(0, Message("system", rng.choice(SYSTEM_PROMPTS)))
            row = chat_ids(messages)
            if len(row[0]) <= LONGEST:
                pool.append(row)
        pool.sort(key=lambda row: len(row[0]))
        packed = pack(pool, tokens_per_batch)
        packed += [_long(rng, source, tokens_per_batch) for _ in range(round(len(packed) * long_share))]
        rng.shuffle(packed)
        yield from packed


def _long(rng: random.Random, source: Iterator[Problem], tokens_per_batch: int) -> Batch:
    length = rng.choice(LONG_LENGTHS)
    rows = []
    for _ in range(max(1, tokens_per_batch // length)):
        messages: list[Message] = []
        while len((row := chat_ids(messages))[0]) < length:
            problem = next(source)
            if problem.messages[0].role != "system":
                messages += with_reply(problem)
        rows.append((row[0][:length], row[1][:length]))
    return pad(rows)
