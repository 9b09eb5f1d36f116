"""docs/reference/settings.md, from the settings' own docstrings. `scripts.reference_pages` writes it."""

import ast
import inspect
from collections.abc import Iterator
from dataclasses import MISSING, fields, is_dataclass
from itertools import pairwise
from typing import Any

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from penstock.services.extensions.lookup import ENGINES, SCORERS, entry_points_of, extension
from penstock.services.mesh_schema.access import MeshAccess, MeshTenant, MeshTls
from penstock.services.mesh_schema.judge import MeshJudge, MeshScorer
from penstock.services.mesh_schema.mesh import MeshFile
from penstock.services.mesh_schema.planner import MeshPlanner, MeshReplan, MeshScaling
from penstock.services.mesh_schema.router import MeshPromptSamples, MeshRouter
from penstock.services.mesh_schema.slo import MeshSlo, MeshSloClass, MeshSloPhase
from penstock.services.mesh_schema.stages import MeshStages
from penstock.services.mesh_schema.tiers import MeshSpeculation, MeshTier
from penstock.services.settings import ServiceSettings
from penstock.types.rules import LongAnswers, SkipFor

HEAD = """# Settings

Every process reads settings from two places when it starts: the **mesh file** describes the mesh (`penstock up` and docker
compose read the same one), **environment variables** describe one process. A bad value ends the process at once, with an
error that names the field. `make reference` generates this page from the docstrings of
`services/mesh_schema` and `services/settings.py`.
"""

SECTIONS: tuple[tuple[str, type[Any]], ...] = (
    ("The mesh file", MeshFile),
    ("`tiers[]`", MeshTier),
    ("`tiers[].long_answers`", LongAnswers),
    ("`tiers[].skip_for`", SkipFor),
    ("`tiers[].speculation`", MeshSpeculation),
    *((f"`tiers[].{name}`", extension(ENGINES, name, BaseModel, name)) for name in entry_points_of(ENGINES)),
    ("`judge`", MeshJudge),
    ("`judge.scorers[]`", MeshScorer),
    *(
        (f"`judge.scorers[]` of kind `{name}`", extension(SCORERS, name, BaseModel, name))
        for name in entry_points_of(SCORERS)
    ),
    ("`router`", MeshRouter),
    ("`router.sample_prompts`", MeshPromptSamples),
    ("`planner`", MeshPlanner),
    ("`planner.replan`", MeshReplan),
    ("`planner.scaling`", MeshScaling),
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
        rows = []
        for name, default, meaning in _fields(model):
            shown = f"PENSTOCK_{name.upper()}" if model is ServiceSettings else name
            rows.append(f"| `{shown}` | {_default(default)} | {' '.join(meaning.split())} |")
        if rows:
            rows.insert(0, "| name | default | meaning |\n|---|---|---|")
            parts.append("\n".join(rows) + "\n")
    return "\n".join(parts)


def _fields(model: type[Any]) -> Iterator[tuple[str, Any, str]]:
    """(name, default, meaning) of each setting. Rules of plans are dataclasses, which a part of the file may also inherit."""
    meanings = documented(model)
    if issubclass(model, BaseModel):
        for name, field in model.model_fields.items():
            yield name, field.default, field.description or meanings.get(name, "")
        return
    for each in fields(model):
        yield each.name, PydanticUndefined if each.default is MISSING else each.default, meanings[each.name]


def documented(kind: type[Any]) -> dict[str, str]:
    """The docstrings of a dataclass's fields, inherited ones too."""
    return {name: text for each in kind.__mro__ if is_dataclass(each) for name, text in _docstrings(each)}


def _docstrings(kind: type[Any]) -> Iterator[tuple[str, str]]:
    """The docstrings of fields, which follow them."""
    [definition] = ast.parse(inspect.getsource(kind)).body
    assert isinstance(definition, ast.ClassDef)
    for field, text in pairwise(definition.body):
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
            assert isinstance(field.target, ast.Name)
            yield field.target.id, str(text.value.value)


def _default(value: object) -> str:
    if value is PydanticUndefined:
        return "(required)"
    if value in ("", None, ()) or isinstance(value, BaseModel):
        return "-"
    if isinstance(value, tuple):
        return f"`[{', '.join(map(str, value))}]`" if all(isinstance(v, str) for v in value) else "-"
    return f"`{value}`"
