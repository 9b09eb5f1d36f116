"""What every training run shares: a model's shape on disk, its loss and its optimisers.

Hidden matrices learn by Muon, the rest by AdamW. The weights are kept in bfloat16 (half the size) and the config says
float32, so that every loader computes in float32 and greedy text does not depend on how requests were batched.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from models.training import tokenizer
from models.training.hardware import autocast
from models.training.muon import Muon
from models.training.rows import BOS, END, PAD, Batch

CONTEXT_TOKENS = 2048


class LlamaShape(Protocol):
    """What a recipe says of a model's shape."""

    @property
    def hidden(self) -> int: ...
    @property
    def layers(self) -> int: ...
    @property
    def heads(self) -> int: ...
    @property
    def kv_heads(self) -> int: ...
    @property
    def mlp(self) -> int: ...


def config(recipe: LlamaShape) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=tokenizer.VOCAB_SIZE,
        hidden_size=recipe.hidden,
        intermediate_size=recipe.mlp,
        num_hidden_layers=recipe.layers,
        num_attention_heads=recipe.heads,
        num_key_value_heads=recipe.kv_heads,
        max_position_embeddings=CONTEXT_TOKENS,
        tie_word_embeddings=True,
        bos_token_id=BOS,
        eos_token_id=END,
        pad_token_id=PAD,
    )


def save(model: LlamaForCausalLM, folder: Path, save_tokenizer: Callable[[Path], None] = tokenizer.save) -> None:
    """Write the model in Hugging Face format: bfloat16 tensors, float32 in the config."""
    folder.mkdir(parents=True, exist_ok=True)
    values = {name: value.detach().clone() for name, value in model.state_dict().items()}
    model.generation_config = GenerationConfig(bos_token_id=BOS, eos_token_id=END, pad_token_id=PAD)
    model.to(torch.bfloat16).save_pretrained(str(folder))
    model.to(torch.float32).load_state_dict(values)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"dtype": "float32"}, indent=2, sort_keys=True) + "\n")
    save_tokenizer(folder)


def set_attention(model: LlamaForCausalLM, tokens: int) -> None:
    """Choose the faster attention for rows of so many tokens.

    Forward and backward on a CPU: the fused kernel loses on short rows (0.37 s to 0.29 s at 80), wins on long (0.6 to 4.9).
    """
    model.set_attn_implementation("eager" if model.device.type == "cpu" and tokens <= 160 else "sdpa")


def loss_of(model: LlamaForCausalLM, batch: Batch) -> torch.Tensor:
    """Mean cross-entropy over the reply tokens of a batch; logits are computed only where there is a label."""
    device = model.device
    set_attention(model, batch.input_ids.shape[1])
    with autocast(device):
        hidden = model.model(input_ids=batch.input_ids.to(device), use_cache=False).last_hidden_state  # (B, T, H)
        targets = batch.labels[:, 1:].to(device)
        learnt = targets != -100
        logits = model.lm_head(hidden[:, :-1][learnt])  # (tokens learnt, V)
    return torch.nn.functional.cross_entropy(logits.float(), targets[learnt])


def optimisers(model: LlamaForCausalLM, muon_lr: float, adam_lr: float) -> list[torch.optim.Optimizer]:
    hidden = [
        p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name and "lm_head" not in name
    ]
    inner = {id(p) for p in hidden}
    rest = [p for p in model.parameters() if id(p) not in inner]
    return [
        Muon(hidden, lr=muon_lr),
        torch.optim.AdamW(rest, lr=adam_lr, betas=(0.9, 0.98), weight_decay=0.0),
    ]


def learn(
    model: LlamaForCausalLM, opts: list[torch.optim.Optimizer], peaks: list[float], share: float, loss: torch.Tensor
) -> None:
    """One step of all optimisers, each group at `share` of its peak rate."""
    for group, peak in zip((g for opt in opts for g in opt.param_groups), peaks, strict=True):
        group["lr"] = peak * share
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for opt in opts:
        opt.step()
        opt.zero_grad(set_to_none=True)
