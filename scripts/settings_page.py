"""Write docs/settings.md from the settings' own docstrings: `python scripts/settings_page.py [--check]`."""

import sys
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from services.mesh_schema import (
    MeshAccess,
    MeshEarlyCheck,
    MeshFile,
    MeshJudge,
    MeshLongAnswers,
    MeshPlanner,
    MeshPromptSamples,
    MeshReplan,
    MeshRouter,
    MeshScorer,
    MeshSlo,
    MeshSloClass,
    MeshSloPhase,
    MeshSpeculation,
    MeshStages,
    MeshTenant,
    MeshTier,
    MeshTls,
    RemoteMeshEngine,
    SglangMeshEngine,
    SimulatedMeshEngine,
)
from services.settings import ServiceSettings

PAGE = Path(__file__).resolve().parent.parent / "docs" / "settings.md"

HEAD = """# Settings

Every process reads settings from two places when it starts: the **mesh file** describes the mesh (`penstock up` and docker
compose read the same one), **environment variables** describe one process. A bad value ends the process at once, with an
error that names the field. `make settings-page` generates this page from the docstrings of
`services/mesh_schema` and `services/settings.py`.
"""

SECTIONS: tuple[tuple[str, type[Any]], ...] = (
    ("The mesh file", MeshFile),
    ("`tiers[]`", MeshTier),
    ("`tiers[].early_checks[]`", MeshEarlyCheck),
    ("`tiers[].long_answers`", MeshLongAnswers),
    ("`tiers[].speculation`", MeshSpeculation),
    ("`tiers[].simulated`", SimulatedMeshEngine),
    ("`tiers[].sglang`", SglangMeshEngine),
    ("`tiers[].openai`", RemoteMeshEngine),
    ("`judge`", MeshJudge),
    ("`judge.scorers[]`", MeshScorer),
    ("`router`", MeshRouter),
    ("`router.sample_prompts`", MeshPromptSamples),
    ("`planner`", MeshPlanner),
    ("`planner.replan`", MeshReplan),
    ("`stages`", MeshStages),
    ("`slo`", MeshSlo),
    ("`slo.classes.*`", MeshSloClass),
    ("`slo.classes.*.phases[]`", MeshSloPhase),
    ("`access`", MeshAccess),
    ("`access.tenants[]`", MeshTenant),
    ("`tls`", MeshTls),
    ("Environment", ServiceSettings),
)


def page() -> str:
    """The content of the page."""
    parts = [HEAD]
    for title, model in SECTIONS:
        parts.append(f"## {title}\n\n{(model.__doc__ or '').strip()}\n")
        parts.append("| name | default | meaning |\n|---|---|---|")
        rows = []
        for name, field in model.model_fields.items():
            shown = f"PENSTOCK_{name.upper()}" if model is ServiceSettings else name
            meaning = " ".join((field.description or "").split())
            rows.append(f"| `{shown}` | {_default(field.default)} | {meaning} |")
        parts.append("\n".join(rows) + "\n")
    return "\n".join(parts)


def _default(value: object) -> str:
    if value is PydanticUndefined:
        return "(required)"
    if value in ("", None, ()) or isinstance(value, BaseModel):
        return "-"
    if isinstance(value, tuple):
        return f"`[{', '.join(map(str, value))}]`" if all(isinstance(v, str) for v in value) else "-"
    return f"`{value}`"


if __name__ == "__main__":
    content = page()
    if "--check" in sys.argv:
        if PAGE.read_text() != content:
            sys.exit("docs/settings.md is out of date: run `make settings-page`")
    else:
        PAGE.write_text(content)
