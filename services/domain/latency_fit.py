"""Fits a latency model to measured step times. No I/O."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from penstock.services.domain.errors import invalid
from penstock.services.domain.latency import StepLatencyModel, StepLoad

Floats = npt.NDArray[np.float64]

KNOTS = (1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
REFITS = 3
STALL = 3.0  # a step that took so many times what the fit says was held up by something else: it is left out
LEAST_CONTEXT = 64
"""Tokens of context per row: where all steps have fewer, attention is less than the noise and is not extrapolated from it."""


def fit_latency(samples: list[tuple[StepLoad, float]]) -> tuple[StepLatencyModel, float]:
    """(the model with the least relative squared error, its mean relative error), no coefficient negative.

    The base is a sum of hat functions over KNOTS within the measured numbers of tokens, over fewer of them where samples are
    few; the rest is linear. So the whole is one non-negative least squares problem, each row divided by its seconds; then
    again by the seconds fitted, as dividing by what is noisy favours the samples that are too small (by twice the squared
    noise: 2 % where it is 10 %).

    Raises:
        InvalidRequest: fewer than five samples, or all of one number of tokens.
    """
    from scipy.optimize import nnls  # half a second of imports, which only fitting needs

    tokens = np.array([load.tokens for load, _ in samples], float)
    seconds = np.array([s for _, s in samples], float)
    rest = np.array([(load.context_tokens, load.pairs, load.longest_gap) for load, _ in samples], float)
    if (rest[:, 0] < LEAST_CONTEXT * tokens).all():
        rest[:] = 0.0
    used = _knots(tokens, len(samples) - int(rest.any(axis=0).sum()))
    hats = np.stack([np.interp(tokens, used, np.eye(len(used))[i]) for i in range(len(used))], axis=1)
    scale = np.maximum(rest.max(axis=0), 1.0)
    table = np.hstack([hats, rest / scale])
    scale_s, remaining = seconds, np.ones(len(samples), np.bool_)
    for _ in range(1 + REFITS):
        coefficients, _ = nnls(table[remaining] / scale_s[remaining, None], seconds[remaining] / scale_s[remaining])
        fitted_s = table @ coefficients
        remaining = seconds < STALL * fitted_s
        scale_s = np.maximum(fitted_s, 1e-9)
    context_s, pair_s, gap_s = (float(x) for x in coefficients[len(used) :] / scale)
    model = StepLatencyModel(
        tuple(float(k) for k in used), tuple(float(x) for x in coefficients[: len(used)]), context_s, pair_s, gap_s
    )
    return model, mean_error(model, samples)


def _knots(tokens: Floats, most: int) -> list[int]:
    """Two or more, at most `most`: the last is the largest number of tokens, and none is close to it, as what is beyond is
    extrapolated from both."""
    knots = [k for k in KNOTS if 1.5 * k <= tokens.max()] or [1]
    knots.append(int(np.ceil(max(tokens.max(), 2))))
    used = [knots[0]]
    for knot in knots[1:]:  # one without samples before it would be free to be anything
        if ((tokens > used[-1]) & (tokens <= knot)).any():
            used.append(knot)
    if len(used) < 2:
        raise invalid("samples", "all steps have the same number of tokens: how their time grows is not known")
    while len(used) > max(2, most):
        used = [*used[:-1:2], used[-1]]
    if len(tokens) < 5 or most < 2:
        raise invalid("samples", f"step times need five measured steps and more, not {len(tokens)}")
    return used


def mean_error(model: StepLatencyModel, samples: Sequence[tuple[StepLoad, float]]) -> float:
    """Mean relative error of the model's step times."""
    return float(np.mean([abs(model.step_s(load) - s) / s for load, s in samples]))
