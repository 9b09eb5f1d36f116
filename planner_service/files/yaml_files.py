"""YAML files: the catalogue and what users write. Errors are put in one line."""

from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError


def catalogue(name: str) -> dict[str, Any]:
    """`gpus` or `models`: entries by name."""
    text = (files("planner_service.catalogue") / f"{name}.yaml").read_text()
    result: dict[str, Any] = yaml.safe_load(text)
    return result


def read_yaml(path: Path) -> Any:
    """ValueError says why the file cannot be read."""
    try:
        return yaml.safe_load(path.read_text()) or {}
    except OSError as error:
        raise ValueError(error.strerror or str(error)) from None
    except yaml.YAMLError as error:
        raise ValueError(f"no YAML: {error}") from None


def error_line(error: Exception) -> str:
    """The message of an error; that of a ValidationError names every field at fault."""
    if isinstance(error, ValidationError):
        return "; ".join(f"{'.'.join(map(str, e['loc'])) or 'file'}: {e['msg']}" for e in error.errors())
    return str(error)
