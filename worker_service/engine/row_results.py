"""What the rows of a step get from its logits: tokens and logprobs. For every runner that computes logits."""

from collections.abc import Sequence as Seq

import numpy as np

from penstock.worker_service.engine import sampling
from penstock.worker_service.engine.logits import Logits
from penstock.worker_service.engine.runner import RawLogprobs, Row, RowResult


def row_results(rows: Seq[Row], logits: Logits) -> list[RowResult]:
    """Convert (positions, V) logits to tokens and logprobs of their rows.

    A row whose logits are not finite (bad KV from a transfer, an overflow in half precision) gets an error instead.
    """
    places = [
        sampling.Position(row.sampling, row.offset + i, row.output_before(i)) for row in rows for i in range(row.logits)
    ]
    (best, finite), free = logits.best(), logits
    logits = sampling.adjusted(logits, places)
    if any(row.allowed is not None for row in rows):
        logits = _restricted(rows, logits)
    if logits is not free:
        best, still = logits.best()
        finite = [both[0] and both[1] for both in zip(finite, still, strict=True)]
    chosen = sampling.choose(logits, places, best)
    results, at = [], 0
    telling = [row for row in rows if row.logits and row.sampling.top_logprobs is not None]
    logprobs_iter = iter(_logprobs(rows, free, chosen)) if telling else iter(())
    for row in rows:
        own = slice(at, at + row.logits)
        at += row.logits
        row_logprobs = [next(logprobs_iter) for _ in range(row.logits)] if row.sampling.top_logprobs is not None else []
        error = None if all(finite[own]) else FloatingPointError("the model's logits are not finite")
        results.append(RowResult(chosen[own], row_logprobs, error))
    return results


def _restricted(rows: Seq[Row], logits: Logits) -> Logits:
    """The logits without the tokens that their rows do not allow."""
    places: list[int] = []
    masks, at = [], 0
    for row in rows:
        if row.allowed is not None and row.logits:
            places += range(at, at + row.logits)
            masks.append(row.allowed)
        at += row.logits
    return logits.restricted(places, np.concatenate(masks)) if places else logits


def _logprobs(rows: Seq[Row], logits: Logits, chosen: list[int]) -> list[RawLogprobs]:
    picked: list[int] = []
    counts: list[int] = []
    at = 0
    for row in rows:
        if row.sampling.top_logprobs is not None:
            picked += range(at, at + row.logits)
            counts += [row.sampling.top_logprobs] * row.logits
        at += row.logits
    return sampling.logprobs(logits.rows(picked), [chosen[i] for i in picked], counts)
