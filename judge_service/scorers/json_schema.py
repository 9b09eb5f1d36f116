"""Verifies that an answer is JSON that fits a schema. No I/O but reading the schema's file."""

import json
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

from penstock.judge_service.scoring.extension import ScorerExtension, ScorerSite
from penstock.judge_service.scoring.interface import RawScore, Scorer
from penstock.services.domain.errors import invalid
from penstock.services.json_schema import SchemaTooComplex, fits
from penstock.types.judging import JudgedAnswer
from penstock.types.structured import StructureKind, json_value, schema_problems


class JsonSchemaScorer(Scorer):
    """100 for JSON that fits the schema of the file, or else the one of the request; 0 otherwise."""

    def __init__(self, file: Path | None) -> None:
        """file: of the schema. None: each answer needs a schema in `structured_output`."""
        self._file = file
        self._schema: Any = None

    async def start(self) -> None:
        if self._file is None:
            return
        text = self._file.read_text()
        for problem in schema_problems(text, str(self._file)):
            raise ValueError(f"{problem.field}: {problem.problem}")
        self._schema = json.loads(text)

    async def score(self, answers: Seq[JudgedAnswer]) -> list[RawScore]:
        scores = []
        for i, item in enumerate(answers):
            try:
                scores.append(RawScore.of_share(_is_valid(item.answer, self._schema_of(item, i))))
            except SchemaTooComplex as error:
                raise invalid(f"items[{i}].structured_output", str(error)) from error
        return scores

    def _schema_of(self, item: JudgedAnswer, index: int) -> Any:
        if self._file is not None:
            return self._schema
        form = item.structured_output
        if form is None or form.kind is not StructureKind.JSON_SCHEMA:
            raise invalid(f"items[{index}].structured_output", "this scorer needs a JSON schema")
        return json.loads(form.text)


def _is_valid(answer: str, schema: Any) -> bool:
    try:
        return fits(json_value(answer), schema)
    except ValueError:
        return False


class JsonSchema(ScorerExtension):
    """`json-schema`: whether the answer fits a schema."""

    schema_file: str = ""
    """File with the schema that all answers must fit. Empty: the schema of the request's structured output."""

    def verifies(self) -> bool:
        return True

    def files(self) -> Iterator[tuple[str, str]]:
        yield "schema_file", self.schema_file

    def build(self, site: ScorerSite) -> JsonSchemaScorer:
        return JsonSchemaScorer(site.settings.resolve(self.schema_file) if self.schema_file else None)
