"""The wheels in new environments: what runs with the base dependencies alone, what asks for which extra, and the demo."""

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import venv
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib.metadata import Distribution, distribution
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

import penstock
from scripts.requirements import requirements
from tests.conftest import ROOT, TIERS

pytestmark = pytest.mark.slow

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
BUILT_FROM = ("pyproject.toml", "README.md", "LICENSE", "mesh.yaml", "models", "penstock", "services", "worker_service",
              "router_service", "planner_service", "judge_service")  # fmt: skip
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]


def distributions(requirements: Iterable[str]) -> dict[str, Distribution]:
    """What fulfils requirements in this environment, with all that it needs."""
    found: dict[str, Distribution] = {}
    wanted = [Requirement(line) for line in requirements]
    while wanted:
        need = wanted.pop()
        name = re.sub(r"[-_.]+", "-", need.name).lower()
        if name not in found and name != "penstock-demo":
            found[name] = distribution(name)
            inner = [Requirement(line) for line in found[name].requires or ()]
            extras = ("", *need.extras)
            wanted += [r for r in inner if r.marker is None or any(r.marker.evaluate({"extra": e}) for e in extras)]
    return found


@dataclass(frozen=True)
class Installed:
    """An environment with wheels in it."""

    folder: Path
    site_packages: Path
    wheels: Path

    def run(self, *command: str, text: str = "", cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
        """Run a program of the environment, out of reach of the source tree."""
        environment = {"PATH": f"{self.folder / 'bin'}:/usr/bin:/bin", "HOME": str(self.folder), "COLUMNS": "80"}
        return subprocess.run(
            [str(self.folder / "bin" / command[0]), *command[1:]], cwd=cwd or self.folder, env=environment,
            input=text, capture_output=True, text=True, timeout=1_500, check=False,
        )  # fmt: skip


def environment(folder: Path, wheels: Path, *extras: str) -> Installed:
    """A new environment with penstock-mesh from `wheels`, and of the others' packages just those that it asks for."""
    venv.create(folder, with_pip=False)
    python = str(folder / "bin" / "python")
    asked = [python, "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])"]
    site_packages = Path(subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip())
    for one in distributions(requirements(PROJECT, extras)).values():
        for name in {file.parts[0] for file in one.files or ()} - {"..", "__pycache__"}:  # `..`: console scripts
            if not (site_packages / name).exists():
                (site_packages / name).symlink_to(Path(str(one.locate_file(name))).resolve())
    wanted = f"penstock-mesh[{','.join(extras)}]"
    install = [*PIP, "--python", python, "install", "--no-index", "--find-links", str(wheels), wanted]
    subprocess.run(install, check=True, timeout=300)
    return Installed(folder, site_packages, wheels)


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of both wheels."""
    source = tmp_path_factory.mktemp("source")
    for name in BUILT_FROM:
        if (ROOT / name).is_dir():
            unwanted = shutil.ignore_patterns("__pycache__", "build", "*.egg-info")
            shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=unwanted)
        else:
            shutil.copy(ROOT / name, source / name)
    build = [*PIP, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(source / "dist")]
    subprocess.run([*build, str(source), str(source / "penstock/demo_data")], check=True, timeout=300)
    return source / "dist"


@pytest.fixture(scope="module")
def installed(wheels: Path, tmp_path_factory: pytest.TempPathFactory) -> Installed:
    """An environment that holds the base dependencies alone."""
    return environment(tmp_path_factory.mktemp("environment"), wheels)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, list[str]]]:
    """The addresses of a running mesh, started from this environment."""
    folder = tmp_path_factory.mktemp("mesh")
    tiers = [
        {"name": "small", "model": "s", "threshold": 50, "engine": "simulated"},
        {"name": "large", "model": "l", "engine": "simulated"},
    ]
    judge = {"scorers": [{"name": "confidence", "kind": "confidence"}], "default_scorer": "confidence"}
    content = {"name": "wheel", "tiers": tiers, "judge": judge, "router": {"grpc_port": 0, "http_port": 0}}
    (folder / "mesh.yaml").write_text(yaml.safe_dump(content))
    penstock_here = [sys.executable, "-m", "penstock.cli.main"]
    up = [*penstock_here, "up", "-m", str(folder / "mesh.yaml"), "--folder", str(folder), "--detach", "--json"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    started = subprocess.run(up, capture_output=True, text=True, timeout=700, check=False, env=environment)
    assert started.returncode == 0, started.stderr
    addresses = json.loads(started.stdout)
    ask = [*penstock_here, "ask", "hello", "--target", addresses["grpc"][0]]  # for each test that shows traces
    subprocess.run(ask, check=True, capture_output=True, timeout=100, env=environment)
    yield addresses
    subprocess.run([*penstock_here, "down", "--folder", str(folder)], check=True, timeout=300, env=environment)


@pytest.fixture(scope="module")
def target(running: dict[str, list[str]]) -> str:
    return running["grpc"][0]


@pytest.fixture(scope="module")
def admin(running: dict[str, list[str]]) -> str:
    return running["admin"][0]


def test_the_environment_lacks_the_extras_and_nothing_else(installed: Installed) -> None:
    """The tests below prove something only where no extra is there, and every base dependency is."""
    extras = ("pydantic_settings", "redis", "numpy", "torch", "aiohttp", "numba", "opentelemetry")
    look = f"from importlib.util import find_spec; print([p for p in {extras} if find_spec(p)])"
    assert installed.run("python", "-c", look).stdout == "[]\n"
    python = str(installed.folder / "bin" / "python")
    checked = subprocess.run(
        [sys.executable, "-m", "pip", "--python", python, "check"], capture_output=True, text=True, check=False
    )
    assert checked.returncode == 0, checked.stdout


def test_the_distribution_is_penstock_mesh_and_the_import_penstock(installed: Installed) -> None:
    """Another project owns the name `penstock` at the package index: neither metadata nor extras may ask for that one."""
    built = {wheel.name.rpartition("-py3-")[0] for wheel in installed.wheels.iterdir()}
    assert built == {f"penstock_mesh-{penstock.__version__}", f"penstock_demo-{penstock.__version__}"}
    assert installed.run("penstock", "--version").stdout == f"penstock {penstock.__version__}\n"
    (metadata,) = installed.site_packages.glob("penstock_mesh-*.dist-info")
    wanted = [
        Requirement(line.partition(": ")[2])
        for line in (metadata / "METADATA").read_text().splitlines()
        if line.startswith("Requires-Dist: ")
    ]
    extras = {extra for need in wanted if need.name.lower() == "penstock-mesh" for extra in need.extras}
    assert {"service", "gateway", "judge", "planner", "worker", "mesh"} <= extras
    assert "penstock" not in {need.name.lower() for need in wanted}


def test_the_sdk_imports_and_asks(installed: Installed, target: str) -> None:
    code = f"from penstock import Client\nwith Client('{target}') as c: print(c.generate('hello').tier)"
    asked = installed.run("python", "-c", code)
    assert asked.stdout.strip() in ("small", "large"), asked.stderr


@pytest.mark.parametrize(
    ("command", "shown"),
    [
        ("ask hello --temperature 0", "trace "),
        ("status", "connected"),
        ("top -n 2 -i 0.1", "tokens/s"),
        ("trace -n 1", "trace "),
        ("plan show", "threshold"),
        ("plan history", "mesh-file"),
        ("plan set --threshold small=40 --note less", "operator"),
        ("plan rollback", "rollback"),
    ],
)
def test_what_talks_to_a_mesh_runs_without_extras(
    installed: Installed, target: str, admin: str, command: str, shown: str
) -> None:
    address = ("--target", target) if command.startswith("ask") else ("--admin", admin)
    done = installed.run("penstock", *command.split(), *address)
    assert done.returncode == 0, done.stdout + done.stderr
    assert shown in done.stdout


def test_a_chat_runs_without_extras(installed: Installed, target: str) -> None:
    done = installed.run("penstock", "chat", "--target", target, text="hello\n\n")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "trace " in done.stdout


NEEDS = {
    "up": "mesh",
    "demo": "demo",
    "check": "service",
    "values mesh.yaml": "service",
    "plan --cluster c --models m --trace t --quality q --min-quality 80": "planner",
    "plan apply plan.json": "planner",
    "plan render plan.json --to compose": "planner",
    "plan capacity --slo chat=2s,50ms --cluster c --models m --trace t": "planner",
    "simulate --plan plan.json --trace t": "planner",
    "stages --instances 2 --trace t": "planner",
    "import-trace --from vllm vllm.log": "planner",
    "predictor prompts.jsonl judged.csv": "planner",
    "profile folder": "mesh",
    "keys create tenant": "service",
    "keys list": "service",
    "keys revoke id": "service",
    "certs init": "certs",
    "certs rotate": "certs",
}
NEED_NONE = {
    "ask",
    "chat",
    "status",
    "top",
    "trace",
    "down",
    "measure",
    "plan new",
    "plan show",
    "plan set",
    "plan history",
    "plan rollback",
    "keys",
    "certs",
    "usage",
    "export-trace",
    "redis-users",
}


@pytest.mark.parametrize("command", NEEDS)
def test_what_needs_an_extra_says_which_in_one_line(installed: Installed, command: str) -> None:
    done = installed.run("penstock", *command.split())
    of_two_words = ("plan apply", "plan render", "plan capacity", "keys ", "certs ")
    words = command.split()[: 2 if command.startswith(of_two_words) else 1]
    extra = NEEDS[command]
    said = f'penstock: penstock {" ".join(words)} needs the {extra} extra: pip install "penstock-mesh[{extra}]"'
    assert done.stderr.startswith(said), done.stderr
    assert (done.returncode, done.stderr.count("\n"), done.stdout) == (2, 1, "")
    assert extra in PROJECT["optional-dependencies"]


def test_every_command_is_in_this_file_and_has_its_help(installed: Installed) -> None:
    """A new command has to say here what it needs; `--help` of each works without any extra."""
    listing = """if True:
        from typer.main import get_command
        from penstock.cli.main import app
        for name, command in get_command(app).commands.items():
            print(name, *(f"{name} {below}" for below in getattr(command, "commands", ())), sep="\\n")
    """
    names = set(installed.run("python", "-c", listing).stdout.splitlines())
    needing = {" ".join(w for w in command.split()[:2] if not w.startswith("-")) for command in NEEDS}
    needing = {name if name in names else name.split()[0] for name in needing}
    assert names == needing | NEED_NONE
    helps = f"""if True:
        from typer.testing import CliRunner
        from penstock.cli.main import app
        for name in {sorted(names)}:
            done = CliRunner().invoke(app, [*name.split(), "--help"])
            assert done.exit_code == 0 and "Usage" in done.stdout, (name, done.output)
    """  # in one process: a start takes a good part of a second
    helped = installed.run("python", "-c", helps)
    assert helped.returncode == 0, helped.stderr
    assert "Usage" in installed.run("penstock", "--help").stdout


def test_down_and_measure_get_as_far_as_they_can(installed: Installed) -> None:
    down = installed.run("penstock", "down")
    assert (down.returncode, down.stderr) == (1, "penstock: no mesh is running from .penstock\n")
    (installed.folder / "prompts.jsonl").write_text('{"prompt": "hello"}\n')
    measured = installed.run("penstock", "measure", "prompts.jsonl", "--target", "127.0.0.1:9")
    assert measured.returncode == 1
    assert "penstock up" in measured.stderr


@pytest.mark.timeout(1_800)
def test_the_demo_runs_in_an_empty_folder(wheels: Path, tmp_path: Path) -> None:
    """With the extra `demo` and nothing of the source tree."""
    installed = environment(tmp_path / "environment", wheels, "demo")
    (tmp_path / "empty").mkdir()
    asked = ("penstock", "demo", "--prompts", "30", "--rate", "20", "--json")
    done = installed.run(*asked, cwd=tmp_path / "empty")
    assert done.returncode == 0, done.stdout + done.stderr
    figures = json.loads((tmp_path / "empty" / "demo.json").read_text())
    assert [tier["name"] for tier in figures["tiers"]] == list(TIERS)
    assert figures["cascade"]["failed"] == 0
    assert figures["variants"]["no skips"]["accuracy"] > 0.5
