"""Measured step times: a latency model fitted to them, and the file they are kept in.

A profile file is JSON: `format`, what was measured (`model`, `engine`, `machine`, `tp`, `pp`, and where they are not 1
`ep`, `attn_dp`), what it may hold (`kv_tokens`, `max_running`, `max_step_tokens`, `block_tokens`), the fitted `latency`, and
the `samples` it was fitted to, each [tokens, context_tokens, pairs, longest_gap, seconds]. Where batches were measured too:
`qoe`, the fitted QoE model, with the `mean_error` of its fit on held-out requests, and the `context_uncertainty` of D4;
`kv_bytes_per_token` says what a sequence's move costs.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from penstock.planner_service.files.measured import replica_of
from penstock.planner_service.simulator import Replica
from penstock.planner_service.simulator.workload import Floats
from penstock.question_files.errors import FileError
from penstock.question_files.profile_files import FORMAT, load_replica
from penstock.services.domain.errors import InvalidRequest, invalid
from penstock.services.domain.latency import StepLoad
from penstock.services.domain.stages.qoe import BatchLoad, request_cost_s
from penstock.types.plans import QoeModel

NORMAL_95 = 1.96  # standard errors on either side of a 95 % interval
IDENTIFIED = 0.1
"""D4 is identified where its uncertainty is at most this share of the cost; else its value is not to be relied on."""


@dataclass(frozen=True, slots=True)
class Profile:
    """A replica as measured. mean_error: of the fitted step times against the samples, relative.

    qoe: the QoE model fitted to its batches, and that fit's mean relative error on held-out requests; None where batches
    were not measured. context_uncertainty: of its D4, see the function; None where it was not computed.
    kv_bytes_per_token: over all layers; 0 where unknown.
    held_out_error: the same against samples that the fit has not seen; None where none were kept from it.
    """

    model: str
    engine: str
    machine: str
    replica: Replica
    samples: tuple[tuple[StepLoad, float], ...]
    mean_error: float
    held_out_error: float | None = None
    qoe: QoeModel | None = None
    qoe_error: float = 0.0
    kv_bytes_per_token: float = 0.0
    context_uncertainty: float | None = None


def fit_qoe(samples: Sequence[tuple[BatchLoad, float]]) -> QoeModel:
    """D0 to D4 with the least relative squared error over (load, request's cost in seconds), none negative (section 4.1).

    Raises:
        InvalidRequest: fewer samples than coefficients.
    """
    from scipy.optimize import nnls  # half a second of imports, which only fitting needs

    if len(samples) < 5:
        raise invalid("samples", f"5 coefficients need as many samples, not {len(samples)}")
    seconds = np.array([cost for _, cost in samples], float)
    table = np.array([(1.0, *load) for load, _ in samples], float)
    scale = np.maximum(table.max(axis=0), 1.0)
    coefficients, _ = nnls(table / scale / seconds[:, None], np.ones(len(samples)))
    return QoeModel(*(float(x) for x in coefficients / scale))


def context_uncertainty(model: QoeModel, samples: Sequence[tuple[BatchLoad, float]]) -> float:
    """How much of a request's cost could be its length so far or not, by these samples: half the width of the 95 % interval
    of D4, times the batch's tokens, as a share of the cost; mean over the samples.

    D4 is told apart from D0 to D3 only by what the sums of lengths have that the numbers of requests and their inputs do not
    explain: where outputs are in proportion to inputs that is nothing, and a D4 of 0 says nothing. Infinite where nothing at
    all is left.
    """
    seconds = np.array([cost for _, cost in samples], float)
    table = np.array([(1.0, *load) for load, _ in samples], float) / seconds[:, None]
    others, tokens = table[:, :4] / np.maximum(np.abs(table[:, :4]).max(axis=0), 1e-300), table[:, 4]
    own = tokens - others @ np.linalg.lstsq(others, tokens, rcond=None)[0]
    if len(samples) <= table.shape[1] or np.linalg.norm(own) <= 1e-9 * np.linalg.norm(tokens):
        return math.inf
    noise = float(np.sum(qoe_errors(model, samples) ** 2)) / (len(samples) - table.shape[1])
    return float(NORMAL_95 * np.sqrt(noise) / np.linalg.norm(own) * tokens.mean())


def qoe_errors(model: QoeModel, samples: Sequence[tuple[BatchLoad, float]]) -> Floats:
    """(N) relative errors of the predicted costs."""
    return np.array([request_cost_s(model, load) / cost - 1 for load, cost in samples])


def write_profile(path: Path, profile: Profile) -> None:
    limits, latency = profile.replica.limits, profile.replica.latency
    content: dict[str, Any] = {
        "format": FORMAT,
        "model": profile.model,
        "engine": profile.engine,
        "machine": profile.machine,
        "tp": profile.replica.shape.tp,
        "pp": profile.replica.shape.pp,
        **{name: size for name in ("ep", "attn_dp") if (size := getattr(profile.replica.shape, name)) > 1},
        "kv_tokens": profile.replica.kv_tokens,
        **asdict(limits),
        "latency": asdict(latency),
        "mean_error": profile.mean_error,
        "kv_bytes_per_token": profile.kv_bytes_per_token,
        "qoe": None if profile.qoe is None else _qoe_fields(profile.qoe, profile),
        "held_out_error": profile.held_out_error,
        "samples": [
            [load.tokens, load.context_tokens, load.pairs, load.longest_gap, seconds]
            for load, seconds in profile.samples
        ],
    }
    path.write_text(json.dumps(content, indent=1) + "\n")


def _qoe_fields(qoe: QoeModel, profile: Profile) -> dict[str, Any]:
    """context_uncertainty is left out where it is not known, and null where it is infinite: JSON has no infinity."""
    fields = {**asdict(qoe), "mean_error": profile.qoe_error}
    if profile.context_uncertainty is None:
        return fields
    finite = np.isfinite(profile.context_uncertainty)
    return fields | {"context_uncertainty": profile.context_uncertainty if finite else None}


def read_profile(path: Path) -> Profile:
    """FileError says what is wrong with the file."""
    try:
        replica = replica_of(load_replica(path), str(path))
        content = json.loads(path.read_text())
        samples = tuple((StepLoad(int(t), int(c), float(p), int(g)), float(s)) for t, c, p, g, s in content["samples"])
        about = (content["model"], content["engine"], content["machine"])
        profile = Profile(*about, replica, samples, float(content["mean_error"]), content.get("held_out_error"))
        profile = replace(profile, kv_bytes_per_token=float(content.get("kv_bytes_per_token", 0.0)))
        if (batches := content.get("qoe")) is None:
            return profile
        qoe = QoeModel(*(float(batches[name]) for name in QoeModel.__slots__))
        profile = replace(profile, qoe=qoe, qoe_error=float(batches["mean_error"]))
        if "context_uncertainty" not in batches:
            return profile
        uncertainty = batches["context_uncertainty"]
        return replace(profile, context_uncertainty=math.inf if uncertainty is None else float(uncertainty))
    except (KeyError, TypeError, ValueError, AttributeError, InvalidRequest) as error:
        raise FileError(f"{path}: not a profile: {error!r}") from None
