"""The catalogue: data sheets of GPUs, published configs of models, and what engines cost the CPU."""

from functools import cache
from importlib.resources import files
from typing import Any

import yaml


@cache
def catalogue(name: str) -> dict[str, Any]:
    """`gpus`, `models` or `engines`: entries by name."""
    text = (files("penstock.planner_service.catalogue") / f"{name}.yaml").read_text()
    result: dict[str, Any] = yaml.safe_load(text)
    return result
