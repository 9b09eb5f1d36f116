"""How a plan of the mesh is shown."""

from rich.table import Table

from penstock.cli.output import console, print_json, seconds
from penstock.client.plans import Plan, Prediction, TierPlan
from penstock.services.acceptance.pipeline import rule_lines
from penstock.services.domain.hardware import ReplicaShape, replica_words


def show(plan: Plan, *, json: bool) -> None:
    """Print a plan: its tiers, prediction and judging."""
    if json:
        print_json(plan)
        return
    table = Table(title=f"plan {plan.revision} ({plan.source}{': ' + plan.note if plan.note else ''})")
    drafts = any(t.drafters for t in plan.tiers)
    shapes = [_shapes(tier) for tier in plan.tiers]
    shaped = any(shapes)
    more = (*(("shapes",) if shaped else ()), *(("drafters",) if drafts else ()))
    for name in ("tier", "model", "threshold", "instances", *more):
        table.add_column(name)
    for t, shape in zip(plan.tiers, shapes, strict=True):
        last = (*((shape or "-",) if shaped else ()), *((", ".join(t.drafters) or "-",) if drafts else ()))
        table.add_row(t.name, t.model, "-" if t.threshold is None else f"{t.threshold:g}", str(t.instances), *last)
    console.print(table)
    for line in rule_lines(plan, None):
        console.print(line, highlight=False)
    if plan.prediction is not None:
        console.print(f"predicted: {predicted_words(plan.prediction)}; workload {plan.prediction.workload_digest}")
    console.print(f"scorer {plan.scorer or '(the default)'}, judge unavailable: {plan.judge_unavailable}")


def _shapes(tier: TierPlan) -> str:
    """Empty where each worker has one GPU, of any type, or none."""
    plain = all(ReplicaShape.of(group) == ReplicaShape(1, 1) for group in tier.replicas)
    return "" if plain else replica_words(tier.replicas)


def predicted_words(prediction: Prediction) -> str:
    reached = f"quality {prediction.quality:.1f}, p95 {seconds(prediction.latency_p95_s)}"
    return f"{reached}, end to end {seconds(prediction.end_to_end_p95_s)} (target: {prediction.target})"
