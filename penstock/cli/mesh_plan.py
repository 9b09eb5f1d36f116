"""How a plan of the mesh is shown."""

from rich.table import Table

from penstock.cli.output import console, print_json, seconds
from penstock.cli.plan_report import burst_table
from penstock.client.plans import Plan, Prediction
from penstock.services.acceptance.pipeline import rule_lines


def show(plan: Plan, *, json: bool) -> None:
    """Print a plan: its tiers, burst ladder, prediction and judging."""
    if json:
        print_json(plan)
        return
    table = Table(title=f"plan {plan.revision} ({plan.source}{': ' + plan.note if plan.note else ''})")
    drafts = any(t.drafters for t in plan.tiers)
    for name in ("tier", "model", "threshold", "instances", *(("drafters",) if drafts else ())):
        table.add_column(name)
    for t in plan.tiers:
        drafters = (", ".join(t.drafters) or "-",) if drafts else ()
        table.add_row(t.name, t.model, "-" if t.threshold is None else f"{t.threshold:g}", str(t.instances), *drafters)
    console.print(table)
    for line in rule_lines(plan, None):
        console.print(line, highlight=False)
    if plan.burst is not None:
        console.print(burst_table(plan.burst, [t.name for t in plan.tiers]))
    if plan.prediction is not None:
        console.print(f"predicted: {predicted_words(plan.prediction)}; workload {plan.prediction.workload_digest}")
    console.print(f"scorer {plan.scorer or '(the default)'}, judge unavailable: {plan.judge_unavailable}")


def predicted_words(prediction: Prediction) -> str:
    reached = f"quality {prediction.quality:.1f}, p95 {seconds(prediction.latency_p95_s)}"
    return f"{reached}, end to end {seconds(prediction.end_to_end_p95_s)} (target: {prediction.target})"
