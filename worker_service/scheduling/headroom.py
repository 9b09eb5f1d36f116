"""What could still be promised, by the requests that are promised already. No I/O."""

from collections import Counter
from collections.abc import Sequence as Seq

import numpy as np

from penstock.services.domain.instances import SloHeadroom
from penstock.services.domain.slo.compiled.admission import budget_per_s
from penstock.services.domain.slo.compiled.layout import StepModel

MAX_BACKLOG_S = 3600.0
"""The backlog where no prompt can be computed in addition to the decodes."""


def headroom(decodes: Seq[tuple[float, int]], prompt_tokens: int, free_kv_tokens: int, model: StepModel) -> SloHeadroom:
    """decodes: (seconds per token, length in tokens) of promised ones. prompt_tokens: of promised prompts, to be computed."""
    paces = Counter(tpot_s for tpot_s, _ in decodes)
    rate = budget_per_s(
        np.array([*paces.values()], np.int64),
        np.array([*paces], np.float64),
        sum(tokens for _, tokens in decodes) / max(1, len(decodes)),
        model,
    )
    backlog_s = min(MAX_BACKLOG_S, prompt_tokens / rate) if rate > 0 else MAX_BACKLOG_S
    return SloHeadroom(backlog_s, max(0.0, rate), max(0, free_kv_tokens))
