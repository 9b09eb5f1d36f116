"""The compose file in real containers: build, up, scale, kill, restart, down. With docker, or podman and podman-compose."""

import json
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

BUILD_ARGUMENTS = "PENSTOCK_IMAGE_BUILD_ARGS"
"""Environment variable: more arguments of the image build, for machines whose pip needs settings of its own."""
BUILD_S = 1800
COMMAND_S = 300


class NoEngineError(Exception):
    """Containers cannot run here; the message says what is missing."""


def run(
    *command: str, timeout_s: float = COMMAND_S, env: Mapping[str, str] | None = None, cwd: Path | None = None
) -> str:
    """Run a command and return its output.

    Raises:
        AssertionError: It failed; the message has the command and the end of its output.
        subprocess.TimeoutExpired: It ran longer than `timeout_s`.
    """
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=timeout_s, env=os.environ | (env or {}), cwd=cwd, check=False
    )
    assert done.returncode == 0, f"{shlex.join(command)}: exit {done.returncode}\n{(done.stdout + done.stderr)[-3000:]}"
    return done.stdout


def succeeds(*command: str) -> bool:
    return subprocess.run(command, capture_output=True, timeout=COMMAND_S, check=False).returncode == 0


@dataclass(frozen=True, slots=True)
class Engine:
    """A container engine (`docker` or `podman`) and its compose command."""

    name: str
    compose: tuple[str, ...]

    @classmethod
    def find(cls) -> "Engine":
        """Return the engine of this machine.

        Raises:
            NoEngineError: There is none, or it runs no containers.
        """
        if shutil.which("docker") and succeeds("docker", "info") and succeeds("docker", "compose", "version"):
            return cls("docker", ("docker", "compose"))
        if shutil.which("podman") and shutil.which("podman-compose") and succeeds("podman", "info"):
            return cls("podman", ("podman-compose",))
        raise NoEngineError("needs docker with its compose plugin, or podman with podman-compose")

    def require(self, image: str) -> None:
        """Make sure that a base image is here.

        Raises:
            NoEngineError: It is not, and cannot be pulled.
        """
        if not succeeds(self.name, "image", "inspect", image) and not succeeds(self.name, "pull", image):
            raise NoEngineError(f"the image {image} is not here and cannot be pulled")

    def build(self, tag: str, context: Path, arguments: Mapping[str, str]) -> None:
        """Build an image. PENSTOCK_IMAGE_BUILD_ARGS adds arguments."""
        pairs = [part for name, value in arguments.items() for part in ("--build-arg", f"{name}={value}")]
        extra = shlex.split(os.environ.get(BUILD_ARGUMENTS, ""))
        run(self.name, "build", *extra, *pairs, "-t", tag, str(context), timeout_s=BUILD_S)

    def inspect(self, image: str) -> dict[str, Any]:
        """Return what the engine says of an image; `Size` in bytes, `RootFS.Layers` from the base up."""
        (found,) = json.loads(run(self.name, "image", "inspect", image))
        assert isinstance(found, dict)
        return found


class ComposeProject:
    """The cpu profile of a compose file, under a project name and published ports of its own.

    root: the folder of docker-compose.yml. The router's ports are published as `grpc_port` and `http_port`.
    """

    def __init__(self, engine: Engine, root: Path, name: str, grpc_port: int, http_port: int) -> None:
        self.engine, self.root, self.name, self.grpc_port, self.http_port = engine, root, name, grpc_port, http_port
        self.content: dict[str, Any] = yaml.safe_load((root / "docker-compose.yml").read_text())

    def images(self) -> dict[str, dict[str, str]]:
        """The images of the cpu profile with their build arguments, in the file's order."""
        services = self.content["services"].values()
        return {s["image"]: s["build"]["args"] for s in services if s.get("profiles") == ["cpu"]}

    def compose(self, *arguments: str) -> str:
        env = {"GRPC_PORT": str(self.grpc_port), "HTTP_PORT": str(self.http_port)}
        command = (*self.engine.compose, "-p", self.name, "--profile", "cpu", *arguments)
        return run(*command, env=env, cwd=self.root)

    def containers(self, service: str | None = None) -> list[str]:
        """Names of the running containers, of one service or of all."""
        labels = [f"label=com.docker.compose.project={self.name}"]
        labels += [f"label=com.docker.compose.service={service}"] * (service is not None)
        filters = [part for label in labels for part in ("--filter", label)]
        return run(self.engine.name, "ps", "--format", "{{.Names}}", *filters).split()

    def instances(self, role: str, tier: str = "") -> list[str]:
        """Instance ids that the router counts as ready, asked for inside the router's container."""
        (router,) = self.containers("router")
        status = json.loads(run(self.engine.name, "exec", router, "penstock", "status", "--json"))
        return [
            i["instance_id"]
            for i in status["instances"]
            if i["role"] == role and i["state"] == "ready" and (not tier or i["tier"] == tier)
        ]

    def logs(self, lines: str = "20") -> str:
        """The last lines of every container's log, `all` for all."""
        tails = []
        for name in self.containers():
            done = subprocess.run(
                [self.engine.name, "logs", *(("--tail", lines) if lines != "all" else ()), name],
                capture_output=True,
                text=True,
                check=False,
            )
            tails.append(f"== {name}\n{done.stdout}{done.stderr}")
        return "\n".join(tails)

    def down(self) -> None:
        """Remove the containers, the network and the volumes of the project.

        podman-compose leaves replicas beyond the file's own count, and then cannot remove what they depend on: they go first.
        """
        label = f"label=com.docker.compose.project={self.name}"
        names = run(self.engine.name, "ps", "--all", "--format", "{{.Names}}", "--filter", label).split()
        replicas = [name for name in names if re.search(r"[-_]([2-9]|\d\d+)$", name)]
        if replicas:
            run(self.engine.name, "rm", "--force", *replicas)
        self.compose("down", "--volumes")
