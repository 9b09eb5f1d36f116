"""Verifies that an answer is JSON that fits a schema. No I/O but reading the schema's file."""

import json
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

from judge_service.scorers.interface import JudgedAnswer, RawScore, ScorerKind
from services.domain.errors import invalid
from services.domain.structured import MAX_SCHEMA_DEPTH, StructureKind, json_depth, schema_problems
from services.json_schema import SchemaTooComplex, fits


class JsonSchemaScorer:
    """100 for JSON that fits the schema of the file, or else the one of the request; 0 otherwise."""

    kind = ScorerKind.JSON_SCHEMA
    needs_logprobs = False
    needs_reference = False
    scores_unfinished = False

    def __init__(self, file: Path | None) -> None:
        """file: of the schema. None: each answer needs a schema in `structured_output`."""
        self._file = file
        self._schema: Any = None

    async def start(self) -> None:
        """Read the schema.

        Raises:
            OSError: The file cannot be read.
            ValueError: It is no schema.
        """
        if self._file is None:
            return
        text = self._file.read_text()
        for problem in schema_problems(text, str(self._file)):
            raise ValueError(f"{problem.field}: {problem.problem}")
        self._schema = json.loads(text)

    async def close(self) -> None:
        pass

    async def score(self, answers: Seq[JudgedAnswer]) -> list[RawScore]:
        scores = []
        for i, item in enumerate(answers):
            try:
                is_valid = _is_valid(item.answer, self._schema_of(item, i))
            except SchemaTooComplex as error:
                raise invalid(f"items[{i}].structured_output", str(error)) from error
            scores.append(RawScore(float(is_valid), 100.0 * is_valid))
        return scores

    def _schema_of(self, item: JudgedAnswer, index: int) -> Any:
        if self._file is not None:
            return self._schema
        form = item.structured_output
        if form is None or form.kind is not StructureKind.JSON_SCHEMA:
            raise invalid(f"items[{index}].structured_output", "this scorer needs a JSON schema")
        return json.loads(form.text)


def _is_valid(answer: str, schema: Any) -> bool:
    if json_depth(answer) > MAX_SCHEMA_DEPTH:
        return False
    try:
        return fits(json.loads(answer), schema)
    except ValueError:
        return False
