"""What a small and a large tier are planned for, as files of `penstock plan` and as inputs of the planner's service."""

from pathlib import Path
from typing import Any

import yaml

from penstock.client.plans import JudgedPrompt, PlanningInputs
from planner_service.site import Demand

TIERS = [{"name": "small", "model": "llama-3.1-8b"}, {"name": "large", "model": "llama-3.1-70b"}]
INPUT_TOKENS = 40  # of each request of the traces


def two_tier_files(folder: Path, demand: Demand, output_tokens: int, **cascade: Any) -> dict[str, Path]:
    """The files `judged`, `trace` and `models`. output_tokens: of each request of the trace. cascade: further fields of the
    models file."""
    judged, trace, models = folder / "judged.csv", folder / "trace.csv", folder / "models.yaml"
    header = "input_tokens,small_output_tokens,small_judge_score,large_output_tokens,large_judge_score"
    rows = zip(demand.judged.input_tokens, demand.judged.output_tokens, demand.judged.scores, strict=True)
    lines = (f"{n},{tokens[0]},{scores[0]},{tokens[1]},{scores[1]}" for n, tokens, scores in rows)
    judged.write_text("\n".join([header, *lines]))
    requests = (f"{s},{INPUT_TOKENS},{output_tokens}" for s in demand.arrival_s)
    trace.write_text("\n".join(["arrival_s,input_tokens,output_tokens", *requests]))
    models.write_text(yaml.safe_dump({"tiers": TIERS, **cascade}))
    return {"judged": judged, "trace": trace, "models": models}


def two_tier_inputs(demand: Demand, output_tokens: int, **cascade: Any) -> PlanningInputs:
    """The same for PlanCascade, on four A100."""
    rows = zip(demand.judged.input_tokens, demand.judged.output_tokens, demand.judged.scores, strict=True)
    judged = [JudgedPrompt(int(n), tuple(map(int, tokens)), tuple(map(float, s))) for n, tokens, s in rows]
    trace = [(float(at_s), INPUT_TOKENS, output_tokens) for at_s in demand.arrival_s]
    cluster = {"gpu": "a100-80gb", "nodes": 1, "gpus_per_node": 4}
    return PlanningInputs(cluster, {"tiers": TIERS, **cascade}, trace, judged)
