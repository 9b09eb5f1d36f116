"""Mesh files that are changed and written elsewhere."""

from pathlib import Path
from typing import Any


def absolute_paths(content: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The content of a mesh file in `folder`, with the files and folders that it names found from anywhere.

    A model without a folder there is left as it is: an id at the hub.
    """

    def found(name: str) -> str:
        place = folder / name
        return str(place.resolve()) if place.exists() else name

    def entry(given: dict[str, Any]) -> dict[str, Any]:
        return given | {key: found(given[key]) for key in ("model", "calibration") if given.get(key)}

    result = content | {"tiers": [entry(tier) for tier in content["tiers"]]}
    if scorers := content.get("judge", {}).get("scorers"):
        result["judge"] = content["judge"] | {"scorers": [entry(scorer) for scorer in scorers]}
    if predictor := content.get("router", {}).get("score_predictor"):
        result["router"] = content["router"] | {"score_predictor": found(predictor)}
    return result
