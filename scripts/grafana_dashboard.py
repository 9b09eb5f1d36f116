"""Write deploy/grafana/dashboards/penstock.json: `python scripts/grafana_dashboard.py`.

A dashboard is mostly repetition; here is the part that is not.
"""

import json
from pathlib import Path
from typing import Any

PATH = Path(__file__).resolve().parent.parent / "deploy" / "grafana" / "dashboards" / "penstock.json"

# (title, unit, [(query, legend)], width of 24)
PANELS: tuple[tuple[str, str, list[tuple[str, str]], int], ...] = (
    (
        "Requests per second by answering tier",
        "reqps",
        [("sum by (penstock_tier) (rate(penstock_router_requests_total[1m]))", "{{penstock_tier}}")],
        12,
    ),
    (
        "Escalations per second",
        "reqps",
        [
            (
                "sum by (penstock_tier, penstock_reason) (rate(penstock_router_escalations_total[1m]))",
                "from {{penstock_tier}}: {{penstock_reason}}",
            )
        ],
        12,
    ),
    (
        "Time to first token, as clients see it",
        "s",
        [
            (
                f"histogram_quantile({q}, sum by (le) (rate(gen_ai_server_time_to_first_token_seconds_bucket"
                '{service_name="penstock-router"}[1m])))',
                f"p{int(q * 100)}",
            )
            for q in (0.5, 0.95)
        ],
        12,
    ),
    (
        "Request duration",
        "s",
        [
            (
                f"histogram_quantile({q}, sum by (le) (rate(gen_ai_server_request_duration_seconds_bucket"
                '{service_name="penstock-router"}[1m])))',
                f"p{int(q * 100)}",
            )
            for q in (0.5, 0.95)
        ],
        12,
    ),
    (
        "Output tokens per second by tier",
        "short",
        [("sum by (penstock_tier) (rate(gen_ai_server_output_tokens_total[1m]))", "{{penstock_tier}}")],
        12,
    ),
    (
        "Time per output token by tier, p95",
        "s",
        [
            (
                "histogram_quantile(0.95, sum by (le, penstock_tier) "
                "(rate(gen_ai_server_time_per_output_token_seconds_bucket[1m])))",
                "{{penstock_tier}}",
            )
        ],
        12,
    ),
    (
        "Requests in the workers",
        "short",
        [
            ("sum by (penstock_tier) (penstock_worker_running)", "{{penstock_tier}} running"),
            ("sum by (penstock_tier) (penstock_worker_queued)", "{{penstock_tier}} queued"),
        ],
        8,
    ),
    (
        "Free KV blocks",
        "short",
        [("sum by (penstock_tier) (penstock_worker_kv_blocks_free)", "{{penstock_tier}}")],
        8,
    ),
    (
        "Preemptions and failovers per minute",
        "short",
        [
            ("60 * sum(rate(penstock_worker_preemptions_total[1m]))", "preemptions"),
            ("60 * sum(rate(penstock_router_failovers_total[1m]))", "failovers"),
        ],
        8,
    ),
    (
        "Judge scores by tier, median",
        "short",
        [
            (
                "histogram_quantile(0.5, sum by (le, penstock_tier) (rate(penstock_judge_score_bucket[5m])))",
                "{{penstock_tier}}",
            )
        ],
        12,
    ),
    (
        "Requests with latency objectives per second",
        "reqps",
        [
            (
                "sum by (penstock_slo_class, penstock_slo_attained) (rate(penstock_router_slo_requests_total[1m]))",
                "{{penstock_slo_class}}, attained: {{penstock_slo_attained}}",
            )
        ],
        12,
    ),
    (
        "Decisions of the workers on latency objectives per second",
        "reqps",
        [
            (
                "sum by (penstock_tier, penstock_slo_class) (rate(penstock_worker_slo_decisions_total[1m]))",
                "{{penstock_tier}}: {{penstock_slo_class}}",
            )
        ],
        12,
    ),
    (
        "Draft tokens per second",
        "short",
        [
            (
                "sum by (penstock_tier, penstock_outcome) (rate(penstock_router_draft_tokens_total[1m]))",
                "{{penstock_tier}}: {{penstock_outcome}}",
            )
        ],
        12,
    ),
    (
        "Tokens drafted by models per second",
        "short",
        [
            (
                "sum by (penstock_tier, penstock_draft_outcome) "
                '(rate(penstock_worker_draft_tokens_total{penstock_draft_source="model"}[1m]))',
                "{{penstock_tier}}: {{penstock_draft_outcome}}",
            )
        ],
        12,
    ),
    (
        "Chain that drafts, and its window",
        "short",
        [
            (
                "max by (penstock_tier, penstock_draft_chain) (penstock_worker_draft_window)",
                "{{penstock_tier}}: {{penstock_draft_chain}}",
            )
        ],
        12,
    ),
    (
        "Accepted share of drafted tokens",
        "percentunit",
        [("avg by (penstock_tier) (penstock_worker_draft_acceptance)", "{{penstock_tier}}")],
        12,
    ),
    (
        "RPC errors per second",
        "reqps",
        [
            (
                "sum by (rpc_method, rpc_response_status_code) (rate(rpc_server_duration_seconds_count"
                '{rpc_response_status_code!="OK"}[1m]))',
                "{{rpc_method}} {{rpc_response_status_code}}",
            )
        ],
        12,
    ),
)


def dashboard() -> dict[str, Any]:
    """The whole dashboard."""
    panels: list[dict[str, Any]] = []
    x = y = 0
    for number, (title, unit, queries, width) in enumerate(PANELS, start=1):
        if x + width > 24:
            x, y = 0, y + 8
        panels.append(
            {
                "id": number,
                "type": "timeseries",
                "title": title,
                "datasource": {"type": "prometheus", "uid": "prometheus"},
                "gridPos": {"x": x, "y": y, "w": width, "h": 8},
                "fieldConfig": {"defaults": {"unit": unit, "min": 0}, "overrides": []},
                "targets": [
                    {"refId": chr(65 + i), "expr": query, "legendFormat": legend}
                    for i, (query, legend) in enumerate(queries)
                ],
            }
        )
        x += width
    return {
        "uid": "penstock",
        "title": "Penstock",
        "tags": ["penstock"],
        "schemaVersion": 41,
        "refresh": "5s",
        "time": {"from": "now-15m", "to": "now"},
        "panels": panels,
    }


if __name__ == "__main__":
    PATH.write_text(json.dumps(dashboard(), indent=1) + "\n")
