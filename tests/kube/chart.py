"""The Helm chart, rendered as `helm template` does."""

from pathlib import Path
from typing import Any

import yaml
from helm_python import Chart

from tests.conftest import ROOT

CHART = ROOT / "deploy" / "helm" / "penstock"
RELEASE = "mesh"
Manifest = dict[str, Any]


def merged(*files: dict[str, Any]) -> dict[str, Any]:
    """Value files as Helm merges them: the later one wins, mappings are merged."""
    result: dict[str, Any] = {}
    for file in files:
        for name, value in file.items():
            both = isinstance(value, dict) and isinstance(result.get(name), dict)
            result[name] = merged(result[name], value) if both else value
    return result


def rendered(values: dict[str, Any]) -> list[Manifest]:
    """The objects of the chart.

    Raises:
        HelmError: The values are refused; the message names the field.
    """
    with Chart.load(CHART) as chart:
        texts = chart.render(values, name=RELEASE, namespace="llm")
    documents = [yaml.safe_load_all(text) for name, text in texts.items() if name.endswith(".yaml")]
    return [manifest for document in documents for manifest in document if manifest]


def value_file(name: str) -> dict[str, Any]:
    content = yaml.safe_load((Path(__file__).parent / "values" / f"{name}.yaml").read_text())
    assert isinstance(content, dict)
    return content


def pods(manifests: list[Manifest]) -> dict[str, Manifest]:
    """The templates of pods, by the name of their workload."""
    kinds = ("Deployment", "StatefulSet")
    return {each["metadata"]["name"]: each["spec"]["template"] for each in manifests if each["kind"] in kinds}
