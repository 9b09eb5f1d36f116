"""The forward pass of a model through transformers' own modules, which call the paged attention: the reference."""

import torch
from transformers import AttentionInterface, PreTrainedModel

from penstock.worker_service.engine.torch.attention import PagedBatch

MODULE_ATTENTION = "penstock_paged"


class ModuleForward:
    """transformers' own modules, which call the paged attention through its attention interface."""

    def __init__(self, model: PreTrainedModel) -> None:
        model.set_attn_implementation(MODULE_ATTENTION)
        self._body = model.model

    def __call__(
        self, tokens: torch.Tensor, positions: torch.Tensor, paged: PagedBatch, rows: torch.Tensor | None
    ) -> torch.Tensor:
        hidden: torch.Tensor = self._body(
            input_ids=tokens[None], position_ids=positions[None], use_cache=False, paged=paged
        ).last_hidden_state[0]
        return hidden if rows is None else hidden[rows]


def _paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float,
    paged: PagedBatch,
    **_: object,
) -> tuple[torch.Tensor, None]:
    """Called by transformers in every layer: q (1, H, N, D), k and v (1, Hkv, N, D) -> (1, N, H, D)."""
    layer: int = module.layer_idx  # type: ignore[assignment]
    heads = query.shape[1]
    qkv = torch.cat((query, key, value), 1).squeeze(0).transpose(0, 1).flatten(1).contiguous()
    attended = paged.attend(layer, qkv, heads, scaling)
    return attended.view(1, len(attended), heads, -1), None


AttentionInterface.register(MODULE_ATTENTION, _paged_attention)
