"""The chart's pods under `podman kube play`, and what that leaves to Kubernetes: Services' names, probes, preStop, replicas.

podman 4.3 knows neither StatefulSets nor Services, mounts no single file of a ConfigMap, does not decode Secrets in volumes,
shares an emptyDir between pods, and does not tell a pod its address: so files are mounted from the host, and a pod advertises
its name.
"""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from tests.kube.chart import RELEASE, Manifest, pods
from tests.support.containers import run, succeeds

READY_S = 600.0


class Pods:
    """The pods of rendered objects. secrets: those that the operator makes, by name and key."""

    def __init__(self, folder: Path, objects: list[Manifest], secrets: dict[str, dict[str, str]]) -> None:
        self.folder, self.network = folder, f"{RELEASE}-kube-test"
        own = {o["metadata"]["name"]: o["stringData"] for o in objects if o["kind"] == "Secret"}
        self.secrets: dict[str, dict[str, str]] = secrets | own
        self.names = list[str]()
        run("podman", "network", "create", self.network)

    def play(self, objects: list[Manifest], workload: str, number: int = 0, port: int = 0) -> str:
        """Start one pod of a workload and return its name. port: of this machine, for the first port of its container."""
        name = f"{workload}-{number}"
        pod = json.loads(json.dumps(pods(objects)[workload]))
        maps = {o["metadata"]["name"]: o["data"] for o in objects if o["kind"] == "ConfigMap"}
        spec = pod["spec"]
        (container,) = spec["containers"]
        claim = [{"name": "data", "persistentVolumeClaim": {"claimName": f"{name}-data"}}]
        spec["volumes"] += claim if any(mount["name"] == "data" for mount in container["volumeMounts"]) else []
        for volume in spec["volumes"]:
            mount = next(mount for mount in container["volumeMounts"] if mount["name"] == volume["name"])
            if "emptyDir" in volume:
                volume["name"] = mount["name"] = f"{name}-{volume['name']}"
            elif source := volume.pop("configMap", None):
                file = mount.pop("subPath")
                path = self._written(f"{name}-{volume['name']}", {file: maps[source["name"]][file]}) / file
                volume["hostPath"] = {"path": str(path), "type": "File"}
            elif source := volume.pop("secret", None):
                content = self.secrets[source["secretName"]]
                wanted = {item["path"]: content[item["key"]] for item in source.get("items", ())} or content
                volume["hostPath"] = {"path": str(self._written(f"{name}-{volume['name']}", wanted))}
        for variable in container["env"]:
            source = variable.pop("valueFrom", {})
            if reference := source.get("secretKeyRef"):
                variable["value"] = self.secrets[reference["name"]][reference["key"]]
            elif source:
                variable["value"] = name
        for each in ("startupProbe", "readinessProbe", "livenessProbe", "lifecycle"):  # `probe` and `stop` run them
            container.pop(each, None)
        ports = container.pop("ports", ())  # podman would publish every one on this machine
        container["ports"] = [ports[0] | {"hostPort": port, "hostIP": "127.0.0.1"}] if port else []
        manifest = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": name, "labels": pod["metadata"]["labels"]},
            "spec": spec,
        }
        path = self.folder / f"{name}.yaml"
        path.write_text(yaml.safe_dump(manifest))
        aliases = ",".join(f"alias={each['metadata']['name']}" for each in services_of(objects, pod))
        self.names.append(name)
        run("podman", "kube", "play", "--network", f"{self.network}:{aliases}" if aliases else self.network, str(path))
        return name

    def _written(self, folder: str, files: dict[str, str]) -> Path:
        path = self.folder / folder
        path.mkdir(exist_ok=True)
        for name, text in files.items():
            (path / name).write_text(text)
            (path / name).chmod(0o644)
        path.chmod(0o755)
        return path

    def container(self, name: str) -> str:
        """The container of a pod."""
        inspected = json.loads(run("podman", "pod", "inspect", name))
        (found,) = (c["Name"] for c in inspected["Containers"] if not c["Name"].endswith("-infra"))
        return str(found)

    def exec(self, name: str, *command: str) -> str:
        return run("podman", "exec", self.container(name), *command)

    def probe(self, objects: list[Manifest], workload: str, name: str, kind: str = "readinessProbe") -> bool:
        """Whether a probe of a pod succeeds now."""
        (container,) = pods(objects)[workload]["spec"]["containers"]
        probe: dict[str, Any] = container[kind]
        if "exec" in probe:
            return succeeds("podman", "exec", self.container(name), *probe["exec"]["command"])
        port = {each["name"]: each["containerPort"] for each in container["ports"]}[probe["httpGet"]["port"]]
        url = f"{probe['httpGet']['scheme'].lower()}://127.0.0.1:{port}{probe['httpGet']['path']}"
        code = "import ssl, sys, urllib.request as u; u.urlopen(sys.argv[1], context=ssl._create_unverified_context())"
        return succeeds("podman", "exec", self.container(name), "python", "-c", code, url)

    def wait_ready(self, objects: list[Manifest], workload: str, name: str) -> None:
        """Wait until the readiness probe of a pod succeeds.

        Raises:
            AssertionError: It does not; the message has the end of the log.
        """
        end = time.monotonic() + READY_S
        while not self.probe(objects, workload, name):
            assert time.monotonic() < end, run("podman", "logs", "--tail", "30", self.container(name))

    def stop(self, objects: list[Manifest], workload: str, name: str) -> None:
        """End a pod as Kubernetes does: preStop, SIGTERM, and SIGKILL after its grace period."""
        spec = pods(objects)[workload]["spec"]
        if hook := spec["containers"][0].get("lifecycle"):
            self.exec(name, *hook["preStop"]["exec"]["command"])
        run("podman", "pod", "stop", "-t", str(spec["terminationGracePeriodSeconds"]), name)
        self.remove(name)

    def remove(self, name: str) -> None:
        run("podman", "pod", "rm", "--force", name)
        self.names.remove(name)

    def logs(self) -> str:
        return "\n".join(f"== {name}\n{run('podman', 'pod', 'logs', '--tail', '15', name)}" for name in self.names)

    def down(self) -> None:
        for name in [*self.names]:
            self.remove(name)
        run("podman", "network", "rm", "--force", self.network)
        for volume in run("podman", "volume", "ls", "--quiet").split():
            if volume.startswith(f"{RELEASE}-"):
                run("podman", "volume", "rm", "--force", volume)


def services_of(objects: list[Manifest], pod: Manifest) -> Iterator[Manifest]:
    """The Services that select a pod."""
    labels = pod["metadata"]["labels"].items()
    yield from (o for o in objects if o["kind"] == "Service" and o["spec"]["selector"].items() <= labels)
