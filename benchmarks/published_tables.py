"""Published step-time tables as profiles of ours: Vidur's (per operation) and DistServe's (fitted formulas).

Vidur (Agrawal et al., 2024) measured what one layer's operations take on one tensor-parallel shard. A step is put together as

    layers * (linear(n) + attention + 2 all_reduce(n)) + embedding(n) + (pp - 1) send_recv(n) + CPU overhead

for every row of the attention table, n being its new tokens; between the rows of the other tables by linear interpolation.
The head that turns the last layer into logits is in none of the tables. Attention measured on another shape is scaled by the
heads of a shard.

DistServe (Zhong et al., 2024) publishes prefill_ms = a + b sum(len) + c sum(len^2) and, below and from a batch size on,
decode_ms = a + b sum(context) + c batch. Both are sampled over a grid.

Either way the samples are fitted with `latency_fit.fit_latency`, some kept from the fit for the error that is reported.
Faults name the file, and the line and column or the key.
"""

import json
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.held_out_fit import fit_held_out
from penstock.planner_service.files.profiles import Profile
from penstock.planner_service.simulator import EngineLimits, Replica
from penstock.question_files.csv_files import csv_rows, number_of, whole_number
from penstock.question_files.errors import FileError
from penstock.services.domain.hardware import ClusterSpec, ModelSpec, ReplicaShape, Runtime, fit
from penstock.services.domain.latency import StepLoad
from penstock.services.domain.latency_fit import mean_error
from penstock.types.ranges import COUNT, NOT_NEGATIVE

Sample = tuple[StepLoad, float]
LINEAR = ("gpu", "model", "n_layers", "tp", "num_tokens", "emb_ms", "layer_linear_ms")
ATTENTION_SHAPE = ("n_embd", "n_q_head", "n_kv_head", "tp")
ATTENTION = (*ATTENTION_SHAPE, "batch_size", "prefill_chunk_size", "kv_cache_size", "attn_prefill_ms", "attn_decode_ms")
COLLECTIVES = ("topology", "collective", "num_workers", "devices_per_node", "bytes", "time_ms")
PROMPTS = (
    16,
    32,
    64,
    128,
    192,
    256,
    384,
    512,
    768,
    1024,
    1536,
    2048,
)  # tokens: what DistServe's formulas are sampled at
DECODES = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 80, 96, 128, 192, 256)
CONTEXTS = (64, 128, 256, 512, 768, 1024, 1536, 2048)


@dataclass(frozen=True, slots=True)
class Wanted:
    """What to import. called: the model's name in the table. model, cluster: its shape and where it runs, for the KV.

    topology: of the collectives table, where it has several that fit; engine: of DistServe's file.
    """

    called: str
    model: ModelSpec
    shape: ReplicaShape
    cluster: ClusterSpec
    runtime: Runtime
    limits: EngineLimits
    topology: str | None = None
    engine: str = "distserve"


def import_vidur(paths: Sequence[Path], target: Wanted) -> Profile:
    """From the linear and attention tables and, for more than one GPU, the collectives, in any order.

    Raises:
        FileError: a table that is missing, malformed, or has nothing for this model, shape or GPU; a model that does not fit.
    """
    tables = {_kind(path): path for path in paths}
    needed = ("linear", "attention", *(("collectives",) if target.shape.gpus > 1 else ()))
    if missing := [kind for kind in needed if kind not in tables]:
        raise FileError(f"no {' and no '.join(missing)} table among {', '.join(map(str, paths))}")
    linear_s = _linear(tables["linear"], target)
    shape, layers, overhead = target.shape, target.model.layers, target.runtime.step_overhead_s
    beside = 2 if shape.gpus <= target.cluster.gpus_per_node else 1
    network = tables.get("collectives")
    reduce_s = _collective(network, "all_reduce", shape.tp, shape.tp, target) if network and shape.tp > 1 else _nothing
    handover_s = _collective(network, "send_recv", 2, beside, target) if network and shape.pp > 1 else _nothing
    samples = []
    for load, attention_s in _attention(tables["attention"], target):
        sent = load.tokens * target.model.hidden * 2.0
        layer_s, embedding_s = linear_s(load.tokens)
        whole = layers * (layer_s + attention_s + 2 * reduce_s(sent)) + embedding_s
        samples.append((load, overhead + whole + (shape.pp - 1) * handover_s(sent / shape.tp)))
    return _profile(target, "vidur's tables", samples)


def import_distserve(path: Path, target: Wanted) -> Profile:
    """From the JSON of fitted formulas.

    Raises:
        FileError: no such engine, model or degree; a coefficient that is no number; a formula that gives no time.
    """
    try:
        result: Any = json.loads(path.read_text())
    except OSError as error:
        raise FileError(f"{path}: {error.strerror}") from None
    except ValueError as error:  # names the line and column
        raise FileError(f"{path}: not JSON: {error}") from None
    keys: list[str] = []
    for key in (target.engine, target.called, str(target.shape.tp)):
        if not isinstance(result, dict) or key not in result:
            known = [k for k in result if not k.startswith("_")] if isinstance(result, dict) else []
            raise FileError(f"{path}: {'.'.join(keys) or 'file'}: no '{key}'; there are {', '.join(known) or 'none'}")
        keys.append(key)
        result = result[key]
    where = f"{path}: {'.'.join(keys)}"
    if isinstance(result, dict) and "_warning" in result:
        raise FileError(f"{where}: the file itself warns: {result['_warning']}")
    prefill = _coefficients(where, result, "prefill")
    small, large = (_coefficients(where, result, f"decode_{name}_batch") for name in ("small", "large"))
    threshold = result.get("threshold")
    if not isinstance(threshold, int) or threshold < 1:
        raise FileError(f"{where}.threshold: must be a whole number from 1, not {threshold!r}")
    samples: list[Sample] = []
    for length in PROMPTS:
        for prompts in (1, 2, 4):
            ms = _formula(prefill, prompts * length, prompts * length**2)
            samples.append(
                (StepLoad(prompts * length, prompts * length, prompts * length * (length + 1) / 2), ms / 1e3)
            )
            _checked(ms, f"{where}.prefill", f"{prompts} prompts of {length} tokens")
    for batch in DECODES:
        name, terms = ("small", small) if batch < threshold else ("large", large)
        for context in CONTEXTS:
            ms = _formula(terms, batch * context, batch)
            samples.append((StepLoad(batch, batch * context), ms / 1e3))
            _checked(ms, f"{where}.decode_{name}_batch", f"{batch} contexts of {context} tokens")
    return _profile(target, f"{target.engine}, by DistServe's formulas", samples)


def _profile(target: Wanted, engine: str, samples: Sequence[Sample]) -> Profile:
    room = fit(target.model, target.shape, target.cluster, target.runtime, 1)
    if not room.ok:
        raise FileError(room.reason)
    latency, fitted, held_out = fit_held_out(samples)
    replica = Replica(target.shape, latency, room.kv_tokens, target.limits)
    error = mean_error(latency, fitted)
    return Profile(target.called, engine, target.cluster.gpu.name, replica, tuple(fitted), error, held_out)


def _kind(path: Path) -> str:
    """Which of Vidur's tables a file is, by its columns."""
    _, row = next(iter(csv_rows(path, ())))
    for name, column in (("linear", "layer_linear_ms"), ("attention", "attn_decode_ms"), ("collectives", "collective")):
        if column in row:
            return name
    raise FileError(f"{path}: line 1: none of Vidur's tables: columns {', '.join(row)}")


def _linear(path: Path, target: Wanted) -> Callable[[float], tuple[float, float]]:
    """Tokens -> (seconds of one layer's linear operations, of the embedding)."""
    result: list[tuple[int, float, float]] = []
    known: dict[str, set[str]] = defaultdict(set)
    kind = target.cluster.gpu.name.split("-")[0]  # the tables say a100, the catalogue a100-80gb
    for at, row in csv_rows(path, LINEAR):
        known[row["gpu"]].add(row["model"])
        if (row["gpu"], row["model"], row["tp"]) != (kind, target.called, str(target.shape.tp)):
            continue
        layers = whole_number(at, row, "n_layers", COUNT)
        if layers != target.model.layers:
            raise FileError(f"{at}: n_layers is {layers}, {target.model.name} has {target.model.layers}")
        layer_ms, embedding_ms = (number_of(at, row, name, NOT_NEGATIVE) for name in ("layer_linear_ms", "emb_ms"))
        result.append((whole_number(at, row, "num_tokens", COUNT), layer_ms, embedding_ms))
    if not result:
        there = "; ".join(f"{gpu}: {', '.join(sorted(models))}" for gpu, models in known.items())
        raise FileError(f"{path}: no rows for {target.called} on {kind} with TP={target.shape.tp}; there are {there}")
    tokens, layers_ms, embeddings_ms = (np.array(column, float) for column in zip(*sorted(result), strict=True))

    def seconds(count: float) -> tuple[float, float]:
        return _between(count, tokens, layers_ms) / 1e3, _between(count, tokens, embeddings_ms) / 1e3

    return seconds


def _attention(path: Path, target: Wanted) -> list[Sample]:
    """(load, seconds of one layer's attention), scaled to this model's heads per shard."""
    model, tp = target.model, target.shape.tp
    result = []
    for at, row in csv_rows(path, ATTENTION):
        hidden, heads, kv_heads, measured_tp = (whole_number(at, row, name, COUNT) for name in ATTENTION_SHAPE)
        head_dim = hidden / heads
        chunk, cached = (whole_number(at, row, name, NOT_NEGATIVE) for name in ("prefill_chunk_size", "kv_cache_size"))
        batch = whole_number(at, row, "batch_size", COUNT)
        if chunk:
            ms = number_of(at, row, "attn_prefill_ms", NOT_NEGATIVE) * model.heads * model.head_dim / (heads * head_dim)
            load = StepLoad(batch * chunk, batch * (cached + chunk), batch * chunk * (cached + 0.5 * (chunk + 1)))
        else:
            ms = number_of(at, row, "attn_decode_ms", NOT_NEGATIVE)
            ms *= max(model.kv_heads, tp) * model.head_dim / (max(kv_heads, measured_tp) * head_dim)
            load = StepLoad(batch, batch * (cached + 1))
        result.append((load, ms * measured_tp / tp / 1e3))
    return result


def _collective(path: Path, name: str, workers: int, per_node: int, target: Wanted) -> Callable[[float], float]:
    """Bytes -> seconds of one collective among so many workers, so many of them in each node."""
    result: dict[str, list[tuple[int, float]]] = defaultdict(list)
    kind = target.cluster.gpu.name.split("-")[0]
    for at, row in csv_rows(path, COLLECTIVES):
        if target.topology is None and not row["topology"].startswith(kind + "_"):
            continue
        if (row["collective"], row["num_workers"], row["devices_per_node"]) == (name, str(workers), str(per_node)):
            point = whole_number(at, row, "bytes", COUNT), number_of(at, row, "time_ms", NOT_NEGATIVE)
            result[row["topology"]].append(point)
    if target.topology is not None:
        result = {topology: rows for topology, rows in result.items() if topology == target.topology}
    if len(result) != 1:
        text = f"has several topologies with {name}, name one: {', '.join(result)}" if result else f"has no {name}"
        request = target.topology or kind
        raise FileError(f"{path}: {request} {text} (num_workers {workers}, devices_per_node {per_node})")
    sizes, ms = (np.array(column, float) for column in zip(*sorted(*result.values()), strict=True))
    return lambda count: _between(count, sizes, ms) / 1e3


def _nothing(_: float) -> float:
    return 0.0


def _between(at: float, x: "np.ndarray[Any, Any]", y: "np.ndarray[Any, Any]") -> float:
    """Linear interpolation; beyond the last x, in proportion."""
    return float(np.interp(at, x, y) if at <= x[-1] else y[-1] * at / x[-1])


def _coefficients(where: str, result: Any, key: str) -> tuple[float, float, float]:
    values = result.get(key) if isinstance(result, dict) else None
    if not isinstance(values, list) or len(values) != 3:
        raise FileError(f"{where}.{key}: must be three numbers, not {values!r}")
    for i, value in enumerate(values):
        if isinstance(value, bool) or not isinstance(value, int | float) or not np.isfinite(value):
            raise FileError(f"{where}.{key}[{i}]: must be a number, not {value!r}")
    return float(values[0]), float(values[1]), float(values[2])


def _formula(terms: tuple[float, float, float], second: float, third: float) -> float:
    return terms[0] + terms[1] * second + terms[2] * third


def _checked(ms: float, where: str, what: str) -> None:
    if ms <= 0:
        raise FileError(f"{where}: gives {ms:.1f} ms for {what}")
