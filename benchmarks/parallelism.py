"""Which parallelism is fastest depends on the model and the workload (CASCADIA, figure 2).

Throughput of the paper's strategies (DP, TP, PP), of a 7B model on four H100 and a 70B model on eight, with short and long
outputs. The paper says how long outputs are (512 and 1,024 tokens on average), not how long prompts are, nor which GPUs it
used. Lengths are WildBench's, with outputs scaled to these means. All requests come at once: what is measured is throughput
at saturation. `others` are the strategies on the same GPUs that the paper does not show.
"""

from typing import Any

import numpy as np

from benchmarks import report
from benchmarks.public_data import public
from penstock.planner_service.files.hardware import gpu_of_catalogue, model_of_catalogue
from penstock.planner_service.question.site import Site, replica_kinds
from penstock.planner_service.simulator import Workload, serve
from penstock.services.domain.hardware import ClusterSpec, ReplicaShape
from tests.support.inputs import read_quality

Config = tuple[int, int, int]  # DP, TP, PP
CASES: tuple[tuple[str, int, tuple[Config, ...]], ...] = (
    ("deepseek-r1-distill-qwen-7b", 4, ((4, 1, 1), (2, 2, 1), (2, 1, 2))),
    ("deepseek-r1-distill-llama-70b", 8, ((4, 2, 1), (4, 1, 2), (2, 4, 1))),
)
OUTPUTS = (512, 1024)
REQUESTS, SEED = 2000, 1


def run(_: int) -> None:
    """Nothing here is timed, and nothing drawn but which prompts come: one round is all."""
    judged = read_quality(public("quality/wildbench_reka_edge-flash-core.csv.gz"), ("small", "medium", "large"))
    rows = np.random.default_rng(SEED).choice(np.flatnonzero(judged.output_tokens[:, 2] > 0), REQUESTS)
    inputs, written = judged.input_tokens[rows], judged.output_tokens[rows, 2]
    results: list[dict[str, Any]] = []
    for model, gpus, shown in CASES:
        cluster = ClusterSpec(gpu_of_catalogue("h100"), 1, 8, 50e9)
        site = Site(cluster, (model,), (model_of_catalogue(model),))
        for mean in OUTPUTS:
            outputs = np.maximum(1, np.rint(written * (mean / written.mean()))).astype(np.int64)
            work = Workload(np.zeros(REQUESTS), inputs, outputs)
            rates = dict[Config, float]()
            for kind in replica_kinds(site, 0, gpus, int((inputs + outputs).max()))[0]:
                if kind.shape == ReplicaShape(kind.shape.tp, kind.shape.pp) and gpus % kind.shape.gpus == 0:
                    count = gpus // kind.shape.gpus
                    rates[count, kind.shape.tp, kind.shape.pp] = REQUESTS / float(
                        serve(work, [kind] * count).finish_s.max()
                    )
            of_paper = {config: rates[config] for config in shown if config in rates}
            results.append(
                {
                    "model": model,
                    "gpus": gpus,
                    "mean_output_tokens": mean,
                    "requests_per_s": {str(config): rate for config, rate in of_paper.items()},
                    "do_not_fit": [str(config) for config in shown if config not in rates],
                    "others": {str(config): rate for config, rate in rates.items() if config not in shown},
                    "best_over_worst_shown": max(of_paper.values()) / min(of_paper.values()),
                    "best_over_worst": max(rates.values()) / min(rates.values()),
                }
            )
            print(results[-1], flush=True)
    print(report.write("parallelism", {"requests": REQUESTS, "seed": SEED, "rows": results}))
    groups = [f"{row['model'].rsplit('-', 1)[1]}, {row['mean_output_tokens']} out" for row in results]
    ratios = {
        "the paper's strategies": [(row["best_over_worst_shown"],) * 3 for row in results],
        "all on these GPUs": [(row["best_over_worst"],) * 3 for row in results],
    }
    print(report.bars("parallelism", "Throughput of the best strategy over the worst", groups, ratios, "times"))
