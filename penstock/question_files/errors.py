"""The error of a file that cannot be used."""

import yaml


class FileError(Exception):
    """A file cannot be used; the message names it, and what in it is at fault."""


def yaml_problem(error: yaml.YAMLError | UnicodeDecodeError) -> str:
    """What is wrong and where, in one line; PyYAML's own text names the file `<unicode string>`."""
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        mark = error.problem_mark
        return f"line {mark.line + 1}, column {mark.column + 1}: {error.problem or error.context}"
    return " ".join(str(error).split())
