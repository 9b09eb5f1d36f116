"""Speculative decoding of published A100 profiles in virtual time: how near the best the choice is, where it stops paying.

Targets: Llama 2 7B by Vidur's tables and OPT-13B by DistServe's formulas, each on one A100 with 80 GB. Drafters have no
published profiles: theirs are the planner's roofline. For each acceptance and batch size, all chains and windows are
enumerated; the worker's own choice learns the acceptance from what is accepted.
"""

from typing import Any

from benchmarks import report
from benchmarks.drafted_batches import BatchSpeculation, last_paying_batch, simulated
from benchmarks.slo_scenarios import replica
from penstock.planner_service.files.hardware import gpu_of_catalogue
from penstock.planner_service.simulator.speculation import SimulatedDrafter
from penstock.services.domain.hardware import ClusterSpec, ModelSpec, ReplicaShape, Runtime, roofline
from penstock.services.domain.latency import StepLatencyModel

DRAFTERS = {
    "llama-2-7b": (ModelSpec("Llama 160M", 12, 768, 12, 12, 64, 0.162e9, 0.162e9, 2, 36_864),),
    "opt-13b": (
        ModelSpec("OPT-125M", 12, 768, 12, 12, 64, 0.125e9, 0.125e9, 2, 36_864),
        ModelSpec("OPT-1.3B", 24, 2048, 32, 32, 64, 1.32e9, 1.32e9, 2, 196_608),
    ),
}
ACCEPTANCES = (0.5, 0.6, 0.7, 0.8, 0.9)
SECOND_SHARE = 0.5
"""The second drafter is wrong this much less often than the first."""
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128)
BEYOND = (192, 256, 384, 512, 768, 1024, 2048, 4096)
"""Only enumerated: where drafting stops paying, if memory did not end before."""
CONTEXT_TOKENS, STEPS, LEAST_STEPS, SEED = 500, 1200, 120, 15
SHORT_CONTEXT_TOKENS = 16
"""With contexts, each reply's KV is read once a pass, however many of its tokens are verified; without, only rows count."""
DRAFT_RUNTIME = Runtime(step_overhead_s=0.0005)
"""A drafter's steps are captured in a CUDA graph."""


def run(rounds: int) -> None:
    del rounds  # virtual time: one run is like another
    cluster, shape = ClusterSpec(gpu_of_catalogue("a100-80gb"), 1, 1, 25e9), ReplicaShape(1, 1)
    targets = list[dict[str, Any]]()
    for name, specs in DRAFTERS.items():
        latency, kv_tokens = replica(name).latency, replica(name).kv_tokens
        steps = [roofline(spec, shape, cluster, DRAFT_RUNTIME) for spec in specs]
        targets.append(
            {
                "target": name,
                "drafters": [spec.name for spec in specs],
                "batch_that_fits": kv_tokens // CONTEXT_TOKENS,
                "runs": _runs(latency, steps),
            }
        )
    for target in targets:
        ratios = [row["chosen_by_best"] for one in target["runs"] for row in one["batches"]]
        target["worst_chosen_by_best"], target["within_3_percent"] = min(ratios), min(ratios) >= 0.97
    figures = {
        "context_tokens": CONTEXT_TOKENS,
        "steps": STEPS,
        "seed": SEED,
        "targets": targets,
    }
    path = report.write("speculation_simulated", figures)
    for target in targets:
        drafters, worst = len(target["drafters"]), target["worst_chosen_by_best"]
        print(f"{target['target']}, {drafters} drafters: {worst:.3f} of the best at worst")
    print(path)


def _runs(target: StepLatencyModel, drafters: list[StepLatencyModel]) -> list[dict[str, Any]]:
    runs = []
    for acceptance in ACCEPTANCES:
        shares = [1 - (1 - acceptance) * SECOND_SHARE**i for i in range(len(drafters))]
        models = [SimulatedDrafter(latency, share) for latency, share in zip(drafters, shares, strict=True)]
        batches = [
            simulated(target, models, n, context_tokens=CONTEXT_TOKENS, steps=max(LEAST_STEPS, STEPS // n), seed=SEED)
            for n in BATCHES
        ]
        rows = [
            {
                "batch": b.replies,
                "target_alone_tokens_per_s": b.alone_tokens_per_s,
                "best_tokens_per_s": b.best_tokens_per_s,
                "best_chain": b.best.chain if b.best is not None else (),
                "best_window": b.best.window if b.best is not None else 0,
                "adaptive_tokens_per_s": b.chosen_tokens_per_s,
                "chosen_by_best": b.chosen_tokens_per_s / b.best_tokens_per_s,
                "best_by_target_alone": b.best_tokens_per_s / b.alone_tokens_per_s,
            }
            for b in batches
        ]
        last, last_short = (
            last_paying_batch([_enumerated(target, models, n, context) for n in (*BATCHES, *BEYOND)])
            for context in (CONTEXT_TOKENS, SHORT_CONTEXT_TOKENS)
        )
        runs.append(
            {
                "acceptance": shares,
                "pays_up_to_batch": last,
                "pays_up_to_batch_short_context": last_short,
                "largest_batch_tried": BEYOND[-1],
                "batches": rows,
            }
        )
        gains = "  ".join(f"{row['batch']}: {row['best_by_target_alone']:.2f}x" for row in rows)
        print(f"acceptance {acceptance:.1f}: {gains}; pays up to {last}, {last_short} with short contexts", flush=True)
    return runs


def _enumerated(target: StepLatencyModel, models: list[SimulatedDrafter], n: int, context: int) -> BatchSpeculation:
    return simulated(target, models, n, context_tokens=context, steps=1, seed=SEED)
