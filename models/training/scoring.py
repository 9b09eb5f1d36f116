"""Exact match of greedy replies, measured in one forward pass.

Greedy decoding generates the reference reply if and only if every token of it is the most likely one given the previous ones.
"""

import torch
from transformers import LlamaForCausalLM

from models.training.rows import BOS, PAD


@torch.inference_mode()
def exact_replies(model: LlamaForCausalLM, turns: list[tuple[list[int], list[int]]], batch: int = 50) -> list[bool]:
    """Whether greedy decoding would generate exactly the reply of each (prompt, reply) turn."""
    order = sorted(range(len(turns)), key=lambda i: len(turns[i][0]) + len(turns[i][1]))
    exact = [False] * len(turns)
    for at in range(0, len(order), batch):
        chosen = order[at : at + batch]
        rows = [[BOS, *turns[i][0], *turns[i][1]] for i in chosen]
        width = max(map(len, rows))
        ids = torch.tensor([row + [PAD] * (width - len(row)) for row in rows], device=model.device)
        best = model(input_ids=ids, use_cache=False).logits.argmax(-1)  # (B, T)
        for i, row, predicted in zip(chosen, rows, best.tolist(), strict=True):
            start = 1 + len(turns[i][0])
            exact[i] = predicted[start - 1 : len(row) - 1] == row[start:]
    return exact
