"""Step times fitted to a part of the samples, with the error on the others."""

from collections.abc import Sequence

from penstock.services.domain.latency import StepLatencyModel, StepLoad
from penstock.services.domain.latency_fit import fit_latency, mean_error

HELD_OUT_EVERY = 5  # one sample of so many is kept from the fit


def fit_held_out(
    samples: Sequence[tuple[StepLoad, float]],
) -> tuple[StepLatencyModel, list[tuple[StepLoad, float]], float]:
    """(the model fitted to all but every HELD_OUT_EVERY-th sample, those it was fitted to, its mean error on the others)."""
    fitted = [sample for i, sample in enumerate(samples) if i % HELD_OUT_EVERY]
    model, _ = fit_latency(fitted)
    return model, fitted, mean_error(model, samples[::HELD_OUT_EVERY])
