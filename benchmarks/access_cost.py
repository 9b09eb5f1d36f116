"""CPU time of the router per reply: without keys and TLS, with keys and a tenant's limits, and with TLS in addition.

The same load on each, in turns: one simulated worker, driven over the OpenAI API by a process of its own.
"""

import os
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.router_cost import RunningVersion, Version, load, running
from penstock.services.access import authority
from penstock.services.access.api_keys import KeyFile, new_key

WHOLE: dict[str, Any] = {"replies": 1500, "connections": 32, "tokens": 32}
WARM: dict[str, Any] = {"replies": 64, "connections": 32, "tokens": 8}
TENANT = {"name": "bench", "requests_per_minute": 10_000_000, "tokens_per_minute": 1_000_000_000}
LIMIT = 1.10
"""The most that keys and TLS may cost, as a ratio of CPU time per reply."""


@dataclass(frozen=True, slots=True)
class Variant:
    """parts: of the mesh file. options: of the load client."""

    parts: dict[str, Any]
    options: tuple[str, ...] = ()


def variants(folder: Path) -> dict[str, Variant]:
    """The variants, with their key file and certificates in `folder`."""
    key, text = new_key("bench", time.time())
    KeyFile(folder / "keys.json").add(key)
    authority.create(folder / "certs", ["127.0.0.1", "localhost"], days=1)
    keys = {"access": {"keys": str(folder / "keys.json"), "tenants": [TENANT]}}
    tls = {"tls": {"folder": str(folder / "certs")}}
    with_key = ("--key", text)
    return {
        "plain": Variant({}),
        "keys": Variant(keys, with_key),
        "keys_and_tls": Variant(keys | tls, (*with_key, "--ca", str(folder / "certs" / "ca.pem"))),
    }


def measured(mesh: RunningVersion, variant: Variant, *, stream: bool) -> dict[str, float]:
    """CPU of the router per reply, and replies per second."""
    load(mesh.url, **WARM, stream=stream, more=variant.options)
    before = mesh.router_cpu_s()
    figures = load(mesh.url, **WHOLE, stream=stream, more=variant.options)
    return {
        "cpu_ms_per_reply": 1000 * (mesh.router_cpu_s() - before) / WHOLE["replies"],
        "replies_per_s": WHOLE["replies"] / figures["seconds"],
    }


def run(rounds: int) -> None:
    results: dict[str, dict[str, list[dict[str, float]]]] = {}
    with tempfile.TemporaryDirectory(prefix="penstock-access-") as name:
        chosen = variants(Path(name))
        for number in range(rounds):
            for label, variant in chosen.items():
                with running(Version(label, Path.cwd()), parts=variant.parts) as mesh:
                    for shape in ("whole", "streamed"):
                        figures = measured(mesh, variant, stream=shape == "streamed")
                        results.setdefault(label, {}).setdefault(shape, []).append(figures)
                        cpu, rate = figures["cpu_ms_per_reply"], figures["replies_per_s"]
                        print(f"round {number + 1}  {label:<13}{shape:<9}{cpu:.2f} ms/reply  {rate:.0f}/s", flush=True)
    ratios = {
        label: {
            shape: [
                later["cpu_ms_per_reply"] / plain["cpu_ms_per_reply"]
                for later, plain in zip(values, results["plain"][shape], strict=True)
            ]
            for shape, values in shapes.items()
        }
        for label, shapes in results.items()
        if label != "plain"
    }
    for label, shapes in ratios.items():
        for shape, values in shapes.items():
            spread = f"{min(values):.2f} to {max(values):.2f}"
            print(f"{label}, {shape}: {statistics.median(values):.2f} of plain ({spread}; limit {LIMIT})", flush=True)
    record = {"load": WHOLE, "variants": results, "ratios": ratios, "limit": LIMIT, "loadavg": os.getloadavg()}
    report.write("access_cost", record)
