"""Draws what a cascade is to serve from a trace and a judged sample. No I/O."""

import hashlib
from dataclasses import replace

import numpy as np

from penstock.planner_service.question.site import Demand
from penstock.planner_service.routing.quality import JudgedSample
from penstock.planner_service.simulator import Workload
from penstock.planner_service.simulator.workload import Floats
from penstock.services.domain.errors import invalid


def demand_of(
    trace: Workload, judged: JudgedSample, *, requests: int, seed: int, lengths: str, rate: float | None
) -> Demand:
    """A stretch of `requests` arrivals of the trace, at a place drawn by `seed`; prompts drawn from the judged sample.

    lengths: `quality` takes input and output tokens from the judged prompts, `trace` from the trace, the same for all tiers.
    rate: arrivals per second; the trace's own gaps, stretched. None leaves them.

    What is cached of prompts is the trace's, too: with its lengths the tokens as they are, else the same share of the judged
    prompt. It is of every tier that a request visits. That is optimistic for later tiers, where reuse within a chat comes
    from its earlier turns: those that did not get so far left no KV there.

    Raises:
        InvalidRequest: a trace without requests or with fewer than asked for; arrivals all at once where a rate is asked for.
    """
    part = stretch_of(trace, requests, seed, rate)
    arrival_s = part.arrival_s
    demand = draw_demand(judged, arrival_s, seed)
    if lengths == "quality":
        return Demand(judged, with_cached_share(demand.requests, part), arrival_s)
    drawn = replace(
        demand.requests,
        input_tokens=part.input_tokens,
        output_tokens=np.repeat(part.output_tokens[:, None], len(judged.tiers), axis=1),
        cached_tokens=part.cached_tokens if part.cached_tokens.any() else None,
    )
    return Demand(judged, drawn, arrival_s)


def with_cached_share(requests: JudgedSample, trace: Workload) -> JudgedSample:
    """The requests with the share of their prompts cached that is of those of the trace, row by row; rounded down."""
    if not trace.cached_tokens.any():
        return requests
    return replace(requests, cached_tokens=trace.cached_tokens * requests.input_tokens // trace.input_tokens)


def stretch_of(trace: Workload, requests: int, seed: int, rate: float | None) -> Workload:
    """`requests` consecutive requests of the trace, from a place drawn by `seed`, the first at 0 s; see demand_of for `rate`.

    Raises:
        InvalidRequest: As demand_of.
    """
    if not len(trace):
        raise invalid("trace", "no requests")
    if not 1 <= requests <= len(trace):
        raise invalid("requests", f"must be from 1 to the trace's {len(trace)}, not {requests}")
    start = int(np.random.default_rng(seed).integers(0, len(trace) - requests + 1))
    part = trace.subset(np.arange(start, start + requests))
    arrival_s = part.arrival_s - part.arrival_s[0]
    if rate is not None:
        if not np.isfinite(part.rate_per_s) or part.rate_per_s == 0:
            raise invalid("rate", "the trace's arrivals have no rate that could be changed")
        arrival_s = arrival_s * (part.rate_per_s / rate)
    return replace(part, arrival_s=arrival_s)


def continued(trace: Workload, requests: int) -> Workload:
    """The trace, read over and over until it has so many requests and a lap more; as it is where it has them."""
    if not 0 < len(trace) < requests:
        return trace
    laps = -(-requests // len(trace)) + 1
    gap_s = 1 / trace.rate_per_s if trace.rate_per_s > 0 else 0.0
    lap_s = float(trace.arrival_s[-1] - trace.arrival_s[0]) + gap_s
    rows = np.tile(np.arange(len(trace)), laps)
    arrival_s = trace.arrival_s[rows] + np.repeat(lap_s * np.arange(laps), len(trace))
    return Workload(
        arrival_s, trace.input_tokens[rows], trace.output_tokens[rows], trace.priority[rows], trace.cached_tokens[rows]
    )


def workload_digest(demand: Demand) -> str:
    """Of what was planned for: equal digests, equal judged prompts, requests and arrivals."""
    digest = hashlib.sha256()
    columns = [
        getattr(sample, name)
        for sample in (demand.judged, demand.requests)
        for name in ("input_tokens", "output_tokens", "scores", "known_quality", "cached_tokens")
    ]
    for values in (*columns, demand.arrival_s):
        if values is not None:
            digest.update(np.ascontiguousarray(values).tobytes())
    return digest.hexdigest()[:16]


def draw_demand(judged: JudgedSample, arrival_s: Floats, seed: int) -> Demand:
    """Prompts for the arrivals, drawn from the judged sample: each once before any comes again."""
    rng = np.random.default_rng(seed)
    rounds = -(-len(arrival_s) // len(judged))
    rows = np.concatenate([rng.permutation(len(judged)) for _ in range(rounds)])[: len(arrival_s)]
    return Demand(judged, judged.subset(rows), arrival_s)
