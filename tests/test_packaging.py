"""What is shipped around the code: compose, dashboards, docs, the package's needs."""

import json
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

import penstock
from penstock.planner_service.manifests.render import PENSTOCK_IMAGES
from penstock.services.extensions.engines import engine_of
from penstock.services.mesh_file import load_mesh_file
from penstock.worker_service.engine.sglang.extension import Sglang
from scripts.requirements import requirements

ROOT = Path(__file__).parents[1]


def compose() -> dict[str, Any]:
    data: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
    return data


def test_the_compose_file_and_the_mesh_files_say_the_same() -> None:
    services = compose()["services"]
    for profile, file, suffix in (("cpu", "mesh.yaml", ""), ("gpu", "deploy/mesh-gpu.yaml", "-gpu")):
        mesh = load_mesh_file(ROOT / file)
        for tier in mesh.tiers:
            service = services[f"worker-{tier.name}{suffix}"]
            assert service["environment"]["PENSTOCK_TIER"] == tier.name
            assert service["profiles"] == [profile]
            if profile == "cpu":
                assert service["deploy"]["replicas"] == tier.workers
            else:
                assert tier.options["endpoint"] == f"http://sglang-{tier.name}:30000"
                assert f"sglang-{tier.name}" in service["depends_on"]
        ours = {name for name, s in services.items() if s.get("profiles") == [profile] and "sglang" not in name}
        tiers = {f"worker-{tier.name}{suffix}" for tier in mesh.tiers}
        assert ours == tiers | {f"{role}{suffix}" for role in ("planner", "router", "judge")}
        assert any(file in volume for volume in services[f"router{suffix}"]["volumes"])


def test_images_have_one_name_and_this_version_everywhere() -> None:
    """In the compose file, what a plan renders, the chart, the Dockerfile and the page."""
    services = compose()["services"].values()
    images = {service["image"] for service in services if "build" in service}
    assert images == {f"penstock-mesh-{name}:{penstock.__version__}" for name in ("router", "planner", "worker")}
    assert {*PENSTOCK_IMAGES.values()} == images
    chart = ROOT / "deploy" / "helm" / "penstock"
    assert yaml.safe_load((chart / "Chart.yaml").read_text())["appVersion"] == penstock.__version__
    values = yaml.safe_load((chart / "values.yaml").read_text())
    assert values["image"]["tag"] == "", "the chart's appVersion"
    for file in ("Dockerfile", "docs/how-to/containers.md"):
        named = {*re.findall(r"penstock-mesh-\w+:[\w.]+", (ROOT / file).read_text())}
        assert named, file
        assert named <= images, file


def test_kernels_are_compiled_for_what_an_image_holds_also_if_it_has_no_numba() -> None:
    """Each image runs the script, the router's too, which holds neither numba nor numpy."""
    subprocess.run([sys.executable, "-S", "scripts/compile_kernels.py"], cwd=ROOT, check=True)


def test_the_compose_servers_serve_the_mesh_files_models_and_may_trace() -> None:
    services = compose()["services"]
    for tier in load_mesh_file(ROOT / "deploy/mesh-gpu.yaml").tiers:
        command = services[f"sglang-{tier.name}"]["command"]
        assert f"--model-path ${{{tier.name.upper()}_MODEL:-{tier.model}}}" in command
        assert "--enable-metrics" in command
        assert command.endswith("${SGLANG_FLAGS:-}")


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("mesh-*-8gpu.yaml")), ids=lambda path: path.stem)
def test_the_example_meshes_give_every_worker_gpus_of_its_own(path: Path) -> None:
    mesh = load_mesh_file(path)
    used = list[int]()
    for tier in mesh.tiers:
        assert tier.device == "cuda"
        server = engine_of(mesh, tier)
        assert isinstance(server, Sglang)
        assert len(server.gpus) == tier.workers * server.tp * server.pp * server.dp
        used += server.gpus
    assert sorted(used) == list(range(8))
    assert {scorer.options["tier"] for scorer in mesh.judge.scorers} == {mesh.tiers[-1].name}


def test_the_image_is_labelled_with_the_distribution() -> None:
    """The image says of itself what pyproject.toml says of the package."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    labels = dict(re.findall(r'org\.opencontainers\.image\.(\w+)="([^"]*)"', (ROOT / "Dockerfile").read_text()))
    assert labels == {
        "title": project["name"],
        "description": project["description"],
        "licenses": project["license"],
    }


def test_the_router_and_planner_images_hold_no_torch() -> None:
    """The extras that compose builds them with need no torch, and every image has the extras of the services it runs."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extra_of = {
        "penstock.router_service": "gateway",
        "penstock.planner_service": "planner",
        "penstock.judge_service": "judge",
        "penstock.worker_service": "worker",
    }
    for service in compose()["services"].values():
        if not service["image"].startswith("penstock-mesh"):
            continue
        (module,) = service["command"]
        extras = service["build"]["args"]["EXTRAS"].split(",")
        assert extra_of[module] in extras
        names = {re.split(r"[><=\[]", need)[0] for need in requirements(project, extras)}
        assert {"grpcio", "redis"} <= names
        assert ("torch" in names) == (module in ("penstock.worker_service", "penstock.judge_service"))
        assert not any(name.startswith(project["name"]) for name in names)


def test_every_service_is_health_checked_and_restarted() -> None:
    data = compose()
    dockerfile = (ROOT / "Dockerfile").read_text()
    assert "HEALTHCHECK" in dockerfile
    for name, service in data["services"].items():
        if service["image"].startswith("penstock-mesh"):  # by the image's own check
            assert service["depends_on"]["redis"]["condition"] == "service_healthy"
        elif name not in ("otel-collector", "jaeger", "grafana"):
            assert "healthcheck" in service, name
        assert service["restart"] == "unless-stopped"
        for volume in service.get("volumes", []):
            source = str(volume).split(":")[0]
            if source.startswith("./"):
                assert (ROOT / source).exists(), source


def test_prometheus_scrapes_every_service() -> None:
    config = yaml.safe_load((ROOT / "deploy/prometheus/prometheus.yml").read_text())
    names = {name for job in config["scrape_configs"] for sd in job["dns_sd_configs"] for name in sd["names"]}
    services = compose()["services"]
    assert names == {n for n, s in services.items() if s["image"].startswith("penstock-mesh") or n.startswith("sglang")}


def test_the_schema_holds() -> None:
    tool = shutil.which("docker-compose")
    if tool is None:
        pytest.skip("docker-compose is not installed here: the schema is not checked")
    command = [tool, "--profile", "cpu", "--profile", "gpu", "--profile", "observe", "config", "--quiet"]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr


def test_the_dashboard_is_what_its_script_writes() -> None:
    from scripts.grafana_dashboard import PATH, dashboard

    assert json.loads(PATH.read_text()) == dashboard()


def test_every_metric_of_the_dashboard_is_made_by_some_service() -> None:
    from scripts.grafana_dashboard import PANELS

    code = "\n".join(
        path.read_text()
        for package in ("services", "worker_service", "router_service", "judge_service")
        for path in (ROOT / package).rglob("*.py")
    )
    made = {name.replace(".", "_") for name in re.findall(r'"((?:gen_ai|penstock|rpc)\.[a-z_.]+)"', code)}
    for _, _, queries, _ in PANELS:
        for query, _ in queries:
            for name in re.findall(
                r"\b((?:gen_ai|penstock|rpc)_[a-z_]+?)(?:_total|_seconds_\w+|_bucket|_count)?[{\[)]", query
            ):
                assert name in made, name


def test_the_sdk_alone_needs_nothing_heavy() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = {re.split(r"[><=\[]", need)[0] for need in project["dependencies"]}
    assert names == {"grpcio", "grpcio-status", "protobuf", "pyyaml", "rich", "typer"}
    assert {"gateway", "planner", "worker", "judge", "mesh", "dev"} <= set(project["optional-dependencies"])


def test_nothing_of_the_makers_machine_is_in_the_tree() -> None:
    files = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False).stdout.split()
    for name in files:
        path = ROOT / name
        if path.suffix in (".py", ".md", ".yaml", ".yml", ".toml", ".sh", ".json", ".txt") and path.exists():
            assert "/" + "root/" not in path.read_text(errors="replace"), name
