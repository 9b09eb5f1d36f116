"""The sampling defaults in a model's generation_config.json."""

import json
import logging
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from penstock.types.sampling import SAMPLING_DEFAULTS, SamplingDefaults, SamplingParams
from penstock.worker_service.engine.interface import EngineUnusable

FILE = "generation_config.json"
NEUTRAL = {"repetition_penalty": 1.0, "min_p": 0.0, "typical_p": 1.0, "no_repeat_ngram_size": 0}
"""Parameters that no engine has, and the value at which they change nothing."""

_log = logging.getLogger(__name__)


def sampling_defaults(folder: Path) -> SamplingDefaults:
    """The file's temperature, top_p and top_k; nothing without the file. `do_sample` is ignored, as in vLLM and SGLang.

    Raises:
        EngineUnusable: The file is not JSON, or a value is out of range.
    """
    path = folder / FILE
    if not path.exists():
        return SamplingDefaults()
    try:
        content: Any = json.loads(path.read_text())
    except ValueError as error:
        raise EngineUnusable(f"{path}: {error}") from None
    if not isinstance(content, dict):
        raise EngineUnusable(f"{path}: must be a JSON object")
    values: dict[str, Any] = {name: content.get(name) for name in SAMPLING_DEFAULTS}
    defaults = checked_defaults(values, str(path))
    ignored = [name for name, neutral in NEUTRAL.items() if content.get(name, neutral) not in (neutral, None)]
    if ignored:
        _log.warning("%s: %s: not supported, ignored", path, ", ".join(ignored))
    return defaults


def checked_defaults(stated: Mapping[str, Any], where: str) -> SamplingDefaults:
    """Sampling defaults of these values; those that are None are not set.

    Raises:
        EngineUnusable: A value is out of range. The message begins with `where`.
    """
    values = {name: value for name, value in stated.items() if value is not None}
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise EngineUnusable(f"{where}: {name}: must be a number, not {value!r}")
    if values.get("top_k", 0) != int(values.get("top_k", 0)):
        raise EngineUnusable(f"{where}: top_k: must be a whole number, not {values['top_k']}")
    if "top_k" in values:
        values["top_k"] = max(0, int(values["top_k"]))  # -1 is written for no limit
    for problem in SamplingParams(**values).problems(""):
        raise EngineUnusable(f"{where}: {problem.field.removeprefix('.')}: {problem.problem}")
    return SamplingDefaults(**values)
