"""Token ids of chats as rows, and batches of rows: chats of similar length share a batch."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from models.training.tokenizer import SPECIAL, build

IGNORED = -100  # the label of a token that is not trained on

_TOKENIZER = build()
BOS, END, PAD, SYSTEM, USER, ASSISTANT = (int(i) for i in _TOKENIZER.convert_tokens_to_ids(list(SPECIAL)))


def text_ids(text: str) -> list[int]:
    """Token ids of plain text, without special tokens: one id per byte, faster than the tokenizer."""
    return [_BYTE_IDS[b] for b in text.encode()]


def _byte_ids() -> list[int]:
    from tokenizers import pre_tokenizers

    table = {}
    pre = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    for code in range(0x180):
        text, symbol = chr(code), pre.pre_tokenize_str(chr(code))[0][0]
        for byte, char in zip(text.encode(), symbol, strict=True):
            table[byte] = int(_TOKENIZER.convert_tokens_to_ids(char))
    return [table.get(b, 0) for b in range(256)]  # bytes that training text never contains


_BYTE_IDS = _byte_ids()


Row = tuple[list[int], list[int]]
"""Token ids of a chat, and as many labels."""


@dataclass(frozen=True, slots=True)
class Batch:
    """`input_ids`, `labels`: (B, T) int64; labels are the inputs, IGNORED outside replies."""

    input_ids: torch.Tensor
    labels: torch.Tensor


def pad(rows: Sequence[Row]) -> Batch:
    """One batch of rows, each filled up to the longest with PAD, and IGNORED as the label."""
    width = max(len(ids) for ids, _ in rows)
    ids = np.full((len(rows), width), PAD)
    labels = np.full((len(rows), width), IGNORED)
    for i, (row, marks) in enumerate(rows):
        ids[i, : len(row)] = row
        labels[i, : len(marks)] = marks
    return Batch(torch.from_numpy(ids), torch.from_numpy(labels))


def pack(rows: Iterable[Row], tokens_per_batch: int) -> list[Batch]:
    """Batches of consecutive rows with at most `tokens_per_batch` tokens, padding included; a longer row is a batch alone.

    Rows sorted by length need the least padding.
    """
    packed, batch, width = list[Batch](), list[Row](), 0
    for row in rows:
        width = max(width, len(row[0]))
        if batch and (len(batch) + 1) * width > tokens_per_batch:
            packed.append(pad(batch))
            batch, width = [], len(row[0])
        batch.append(row)
    return [*packed, pad(batch)] if batch else packed
