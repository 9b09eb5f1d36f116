"""`penstock usage`: what tenants have used."""

from typing import Annotated

from penstock.cli import options, targets
from penstock.cli.output import console, print_json, table_of

MAX_DAYS = 400  # the maximum of GetUsage


def usage(
    days: Annotated[int, options.number("Days in UTC, today included.", 1, MAX_DAYS, "--days", "-d")] = 1,
    admin: targets.Admin = None,
    json: targets.Json = False,
) -> None:
    """Show what tenants have used, by key and tier: replies, tokens, time, GPU seconds, cost by the mesh file's prices."""
    with targets.administration(admin) as client:
        entries = client.usage(days)
    if json:
        print_json(entries)
        return
    counted = ("replies", "prompt tokens", "output tokens", "seconds", "GPU seconds", "cost")
    table = table_of("tenant", "key", "tier", *counted, words=3)
    for entry in sorted(entries, key=lambda entry: (entry.tenant, entry.key_id, entry.tier)):
        tokens = (f"{entry.prompt_tokens}", f"{entry.output_tokens}")
        figures = (f"{entry.requests}", *tokens, f"{entry.tier_s:.1f}", f"{entry.compute_s:.3f}", f"{entry.cost:.4f}")
        table.add_row(entry.tenant, entry.key_id, entry.tier, *figures)
    console.print(table)
