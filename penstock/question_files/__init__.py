"""Reads the files of a planning question, for commands, the SDK and planning again."""

from penstock.question_files.csv_files import csv_count, csv_number, csv_rows
from penstock.question_files.errors import FileError
from penstock.question_files.profile_files import load_replica
from penstock.question_files.questions import (
    QuestionFile,
    QuestionSource,
    load_cluster,
    load_models,
    load_quality,
    load_question,
)
from penstock.question_files.tables import load_judged, load_trace

__all__ = [
    "FileError",
    "QuestionFile",
    "QuestionSource",
    "csv_count",
    "csv_number",
    "csv_rows",
    "load_cluster",
    "load_judged",
    "load_models",
    "load_quality",
    "load_question",
    "load_replica",
    "load_trace",
]
