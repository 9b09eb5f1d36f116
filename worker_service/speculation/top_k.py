"""Computes a verifier's distributions from the most likely tokens that a server reports. No I/O."""

from collections.abc import Sequence as Seq

import numpy as np

from services.domain.requests import SamplingParams
from worker_service.speculation.acceptance import Floats


def target_distribution(rows: Seq[Seq[tuple[int, float]]], vocab_size: int, sampling: SamplingParams) -> Floats | None:
    """(len(rows), V) probabilities after temperature, top-k, top-p, min-p; None if the reported tokens do not determine them.

    rows: per position, (token, logprob before temperature) of the K most likely of V tokens in descending order. Any other
    token is at most as likely as the last one, which bounds the remaining mass after temperature t by (V - K) exp(logprob_K
    / t). The top-p set is determined if it is the same with that remaining mass as without it. Top-k goes first: if it is at
    most K, nothing remains.
    """
    target = np.zeros((len(rows), vocab_size), np.float64)
    for i, row in enumerate(rows):
        ids = [token for token, _ in row]
        if sampling.greedy:
            target[i, ids[0]] = 1.0
            continue
        logprobs = np.array([value for _, value in row]) / sampling.temperature
        weights = np.exp(logprobs - logprobs[0])
        unseen = (min(vocab_size, sampling.top_k or vocab_size) - len(row)) * weights[-1]
        if sampling.top_k:
            weights[sampling.top_k :] = 0.0
        before = np.cumsum(weights) - weights
        likely = weights >= sampling.min_p
        drawable = likely & (before < sampling.top_p * weights.sum())
        if unseen > 0 and (
            drawable[-1] or not np.array_equal(drawable, likely & (before < sampling.top_p * (weights.sum() + unseen)))
        ):
            return None
        target[i, ids] = np.where(drawable, weights, 0.0) / weights[drawable].sum()
    return target
