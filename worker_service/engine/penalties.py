"""What a request changes about the logits of single tokens: penalties for repetition, and biases. No I/O.

Everything is a function of the request's parameters and of the reply's tokens so far, so a reply that is resumed, preempted,
moved or verified as a draft continues unchanged.

The definitions are SGLang's, in its order: the repetition penalty of CTRL (Keskar et al. 2019, section 4.1) first, then the
frequency and presence penalties of OpenAI's API, then the biases. All count the tokens of the reply, not those of the prompt.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.types.sampling import SamplingParams


class LogitChanges(NamedTuple):
    """Changes at one position: the logits `x` of `token_ids`, each once, become `penalized(x, divisors) + summands`."""

    token_ids: npt.NDArray[np.int64]
    divisors: npt.NDArray[np.float32]
    summands: npt.NDArray[np.float32]


def logit_changes(sampling: SamplingParams, output: Sequence[int], vocab_size: int) -> LogitChanges | None:
    """The changes at the position after `output`, the reply's tokens so far; None if there are none.

    Tokens beyond the vocabulary are left out.
    """
    counts = dict[int, int]()
    if sampling.penalizes and len(output):
        ids, times = np.unique(np.asarray(output, np.int64), return_counts=True)
        counts = dict(zip(ids.tolist(), times.tolist(), strict=True))
    biases = dict(sampling.logit_bias)
    tokens = [token for token in counts.keys() | biases.keys() if token < vocab_size]
    if not tokens:
        return None
    summands = [
        biases.get(token, 0.0)
        - (sampling.frequency_penalty * counts[token] + sampling.presence_penalty if token in counts else 0.0)
        for token in tokens
    ]
    divisors = [sampling.repetition_penalty if token in counts else 1.0 for token in tokens]
    return LogitChanges(np.array(tokens, np.int64), np.array(divisors, np.float32), np.array(summands, np.float32))
