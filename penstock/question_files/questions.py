"""Questions as YAML: the JSON form of the message PlanningQuestion, with files by path.

By path, from the folder of the file that has it: `cluster`, `models`, `trace` and `quality`. For shorter forms see
message_form.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from penstock.proto.planner.v1 import planner_pb2 as pb
from penstock.question_files.errors import FileError, yaml_problem
from penstock.question_files.message_form import value_from
from penstock.question_files.tables import load_judged, load_trace
from penstock.types.planning import Cascade, Cluster, JudgedPrompts, PlanningQuestion, Trace

FILES = ("cluster", "models", "trace", "quality")


@dataclass(frozen=True, slots=True)
class QuestionFile:
    """A question, and where each of FILES is from: a path, or what the question itself says."""

    question: PlanningQuestion
    sources: Mapping[str, Any]


class QuestionSource:
    """A question that is not read yet: where its parts are."""

    def __init__(self, path: str | Path | None = None, /, **changes: Any) -> None:
        """changes: fields that are other than in the file; None for none. Their paths are as they are.

        Raises:
            FileError: The file cannot be read, or a part is missing.
        """
        self._content: dict[str, Any] = {}
        self._where = "question"
        if path is not None:
            self._where, self._content, folder = str(path), yaml_fields(Path(path)), Path(path).parent
            texts = {name: self._content[name] for name in FILES if isinstance(self._content.get(name), str)}
            self._content |= {name: str(folder / text) for name, text in texts.items()}
        self._content |= {name: value for name, value in changes.items() if value is not None}
        if missing := [name for name in FILES if not self._content.get(name)]:
            raise FileError(f"{self._where}: {', '.join(missing)} missing: a plan needs {', '.join(FILES)}")
        parts = {name: self._content.pop(name) for name in FILES}
        self.sources = {
            name: str(Path(part).resolve()) if isinstance(part, (str, Path)) else part for name, part in parts.items()
        }

    def options(self) -> PlanningQuestion:
        """The question without its parts. FileError names the field at fault."""
        return value_from(self._content, pb.PlanningQuestion, PlanningQuestion, self._where)

    def models(self) -> Cascade:
        """The tiers and their models. FileError names the field at fault."""
        return load_models(self.sources["models"], self._where)

    def read(self) -> QuestionFile:
        """The whole question. FileError names the file and the field at fault."""
        options, models = self.options(), self.models()
        question = dataclasses.replace(
            options,
            cluster=load_cluster(self.sources["cluster"], self._where),
            models=models,
            trace=load_arrivals(self.sources["trace"], self._where),
            quality=load_quality(self.sources["quality"], [tier.name for tier in models.tiers], self._where),
        )
        return QuestionFile(question, self.sources)


def load_question(path: str | Path | None = None, /, **changes: Any) -> PlanningQuestion:
    """The question of a YAML file. changes: fields that are other than in the file; paths of these are as they are.

    Raises:
        FileError: A file cannot be used; names the file and the field.

    Example:
        >>> load_question("question.yaml", min_quality=85).min_quality
        85.0
    """
    return QuestionSource(path, **changes).read().question


def load_cluster(source: str | Path | Mapping[str, Any], where: str = "cluster") -> Cluster:
    """A cluster of a file, or as a question has it. FileError names the file and the field."""
    if isinstance(source, (str, Path)):
        return value_from(yaml_fields(Path(source)), pb.Cluster, Cluster, str(source))
    return value_from(source, pb.Cluster, Cluster, f"{where}: cluster")


def load_models(source: str | Path | Mapping[str, Any], where: str = "models") -> Cascade:
    """A cascade of a models file, or as a question has it. FileError names the file and the field."""
    if isinstance(source, (str, Path)):
        return value_from(yaml_fields(Path(source)), pb.Cascade, Cascade, str(source), Path(source).parent)
    return value_from(source, pb.Cascade, Cascade, f"{where}: models", Path(where).parent)


def load_arrivals(source: str | Path | Mapping[str, Any], where: str = "trace") -> Trace:
    """A trace of a file, or as a question has it. FileError names the file and the field."""
    if isinstance(source, (str, Path)):
        return load_trace(Path(source))
    return value_from(source, pb.Trace, Trace, f"{where}: trace")


def load_quality(source: str | Path | Mapping[str, Any], tiers: Sequence[str], where: str = "quality") -> JudgedPrompts:
    """Judged prompts of a file, or as a question has them. FileError names the file and the field."""
    if isinstance(source, (str, Path)):
        return load_judged(Path(source), tiers)
    return value_from(source, pb.JudgedPrompts, JudgedPrompts, f"{where}: quality")


def yaml_fields(path: Path) -> dict[str, Any]:
    """The fields of a YAML file, unchecked. FileError if it holds something else."""
    try:
        content = yaml.safe_load(path.read_text()) or {}
    except OSError as error:
        raise FileError(f"{path}: {error.strerror or error}") from None
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise FileError(f"{path}: no YAML: {yaml_problem(error)}") from None
    if not isinstance(content, dict):
        raise FileError(f"{path}: must be fields with their values, not {type(content).__name__}")
    return content
