"""What a small and a large tier are planned for, as files of `penstock plan` and as a question."""

from pathlib import Path
from typing import Any

import yaml

from penstock.planner_service.question.site import Demand
from tests.support.tables import write_judged, write_trace

TIERS = [{"name": "small", "model": "llama-3.1-8b"}, {"name": "large", "model": "llama-3.1-70b"}]
INPUT_TOKENS = 40  # of each request of the traces


def two_tier_files(folder: Path, demand: Demand, output_tokens: int, **cascade: Any) -> dict[str, Path]:
    """The files `judged`, `trace` and `models`. output_tokens: of each request of the trace. cascade: further fields of the
    models file."""
    judged, trace, models = folder / "judged.csv", folder / "trace.csv", folder / "models.yaml"
    write_judged(judged, demand.judged)
    write_trace(trace, ((s, INPUT_TOKENS, output_tokens) for s in demand.arrival_s))
    models.write_text(yaml.safe_dump({"tiers": TIERS, **cascade}))
    return {"judged": judged, "trace": trace, "models": models}
