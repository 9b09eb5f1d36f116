"""The catalogue: data sheets of GPUs, and published configs of models."""

from functools import cache
from importlib.resources import files
from typing import Any

import yaml


@cache
def catalogue(name: str) -> dict[str, Any]:
    """`gpus` or `models`: entries by name."""
    text = (files("penstock.planner_service.catalogue") / f"{name}.yaml").read_text()
    result: dict[str, Any] = yaml.safe_load(text)
    return result
