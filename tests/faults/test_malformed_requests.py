"""Whatever is sent to a mesh, it is answered in order, and nobody else is harmed. Real processes.

There are ten thousand malformed HTTP requests and ten thousand malformed gRPC calls. A thousand of each are tried, or all
of them with `--all-faults`.
"""

import asyncio
import contextlib
import json
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import grpc
import pytest
import yaml
from google.rpc import error_details_pb2
from grpc import aio
from grpc_status import rpc_status

from benchmarks.fault_streams import until_whole
from penstock import AsyncClient
from penstock.local import LocalMesh, MeshOptions
from services.domain.instances import Role
from tests.conftest import ROOT
from tests.support.malformed_grpc import LIMIT_S, MESH, GrpcCase, grpc_cases
from tests.support.malformed_http import HttpCase, http_cases
from tests.support.raw_http import exchange

pytestmark = pytest.mark.slow

SAMPLE, ALL = 1_000, 10_000
AT_ONCE = 12
ANSWER_S = 30.0  # what takes longer hangs
QUIET_S = 1.0  # without an answer by then, a client that may not have sent everything closes its side
PROBE_P99_S = 0.25

_T = TypeVar("_T")


@pytest.fixture(scope="module")
async def mesh(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[LocalMesh]:
    folder = tmp_path_factory.mktemp("malformed")
    fast = {"overhead_ms": 1.0, "token_us": 1.0, "context_token_ns": 0.0, "reply_tokens": 8, "max_context_tokens": 512}
    content = {
        "name": "test-malformed",
        "tiers": [
            {
                "name": "small",
                "model": "sim-small",
                "threshold": 50,
                "engine": "simulated",
                "simulated": fast,
                "workers": 2,
            },
            {"name": "large", "model": "sim-large", "engine": "simulated", "simulated": fast},
        ],
        "judge": {"scorers": [{"name": "confidence", "kind": "confidence"}], "default_scorer": "confidence"},
        "router": {"grpc_port": 0, "http_port": 0},
    }
    file = folder / "mesh.yaml"
    file.write_text(yaml.safe_dump(content))
    async with LocalMesh(MeshOptions(file, folder)) as running:
        await until_whole(running)
        yield running


@asynccontextmanager
async def nobody_harmed(mesh: LocalMesh, *, timed: bool) -> AsyncIterator[None]:
    """While the context lasts a bystander is always served, and every process stays the one that it was.

    timed: the bystander's 99th percentile is held to PROBE_P99_S. It is printed in any case.
    """
    before = await instances(mesh)
    probe = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.support.probe", mesh.grpc_addresses[0], mesh.http_addresses[0],
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, cwd=ROOT,
    )  # fmt: skip
    try:
        yield
    except BaseException:
        with contextlib.suppress(ProcessLookupError):
            probe.kill()
        raise
    finally:
        output, _ = await probe.communicate(b"")  # ends its stdin
    result = json.loads(output)
    latencies_s = sorted(result["latencies_s"])
    p50_s, p99_s = (latencies_s[int(share * len(latencies_s))] for share in (0.5, 0.99))
    print(f"probe: {len(latencies_s)} replies, p50 {p50_s:.3f} s, p99 {p99_s:.3f} s, at most {latencies_s[-1]:.3f} s")
    assert not result["errors"]
    assert await instances(mesh) == before
    if timed:
        assert p99_s < PROBE_P99_S


async def instances(mesh: LocalMesh) -> tuple[dict[str, int | None], set[str]]:
    """The pid of each process, and the ids of the instances that the router sees."""
    async with AsyncClient(mesh.grpc_addresses[0], admin=mesh.admin_addresses[0]) as client:
        status = await client.status()
    return {name: w.pid for name, w in mesh.watcher.watched.items()}, {i.instance_id for i in status.instances}


async def try_all(cases: Iterable[_T], one: Callable[[_T], Any]) -> None:
    """Try cases, several at once; the first failure ends them all and says which case it was."""
    left = iter(cases)

    async def work() -> None:
        for case in left:
            try:
                await one(case)
            except BaseException as error:
                error.add_note(f"{case}"[:2_000])
                raise

    async with asyncio.TaskGroup() as tasks:
        for _ in range(AT_ONCE):
            tasks.create_task(work())


@pytest.fixture
def all_faults(pytestconfig: pytest.Config) -> bool:
    return bool(pytestconfig.getoption("--all-faults"))


@pytest.mark.timeout(1_800)
async def test_malformed_http_requests_harm_nobody(mesh: LocalMesh, all_faults: bool) -> None:
    """Each is answered with 4xx in OpenAI's shape and the field's name, or served where what is wrong has no meaning."""
    counts: Counter[str] = Counter()

    async def one(case: HttpCase) -> None:
        quiet_s = None if case.complete else QUIET_S
        response = await exchange(
            mesh.http_addresses[0], case.data, method=case.method, end_after_s=quiet_s, timeout_s=ANSWER_S
        )
        counts[f"{case.kind}: {response.status if response is not None else 'closed'}"] += 1
        if response is None:
            assert not case.complete  # the client's side was closed first
            return
        assert response.status == 200 or 400 <= response.status < 500, response
        assert response.status != 429, response
        if response.status == 200:
            assert case.field is None, response
        elif case.method != "HEAD":
            error = response.error()
            assert len(response.body) < 8_192
            if case.complete:  # it is the body that is wrong
                assert error["param"], error
                assert error["param"] in error["message"] or response.status == 404
            if case.field is not None:
                assert str(error["param"]).startswith(case.field), error
                assert case.field in error["message"]

    async with nobody_harmed(mesh, timed=all_faults):
        await try_all(http_cases(seed=11, count=ALL if all_faults else SAMPLE), one)
    print("\n".join(f"{count:6} {what}" for what, count in sorted(counts.items())))
    refused = sum(count for what, count in counts.items() if what.rpartition(" ")[2].startswith("4"))
    assert refused > 0.7 * counts.total()


GOOD_CODES = (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND, grpc.StatusCode.UNIMPLEMENTED)


@pytest.mark.timeout(1_800)
async def test_malformed_grpc_calls_harm_nobody(mesh: LocalMesh, all_faults: bool) -> None:
    """Each is INVALID_ARGUMENT with the field's name, NOT_FOUND or UNIMPLEMENTED, or served; by every service."""
    counts: Counter[str] = Counter()
    records = mesh.view
    addresses = {role.value: records.instances(role)[0].address for role in (Role.WORKER, Role.JUDGE, Role.PLANNER)}
    addresses |= {"router": mesh.grpc_addresses[0], "mesh": mesh.admin_addresses[0], "planner": mesh.planner_address}
    async with contextlib.AsyncExitStack() as stack:
        channels = {
            role: await stack.enter_async_context(
                aio.insecure_channel(address, options=(("grpc.max_send_message_length", -1),))
            )
            for role, address in addresses.items()
        }

        async def one(case: GrpcCase) -> None:
            deadline_s = LIMIT_S if case.endless else ANSWER_S
            channel = channels["mesh" if case.method.startswith(MESH) else case.role]
            # Not as a stream, of which the client's library fails what it sends after the answer has come.
            method: Any = (
                channel.unary_stream(case.method) if case.data is not None else channel.stream_stream(case.method)
            )
            call = method(case.data if case.data is not None else nothing(), timeout=deadline_s, metadata=case.metadata)
            failure = await failure_of(call)
            counts[f"{case.kind}: {failure.code().name if failure is not None else 'OK'}"] += 1
            if failure is None:
                assert not case.fields
                return
            if case.endless and failure.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                return
            assert failure.code() in GOOD_CODES, failure
            assert len((failure.details() or "").encode()) <= 1_024, failure
            if failure.code() is grpc.StatusCode.INVALID_ARGUMENT:
                fields = fields_of(failure)
                assert fields, failure
                assert all(any(f.startswith(wanted) for f in fields) for wanted in case.fields), failure

        async with nobody_harmed(mesh, timed=all_faults):
            await try_all(grpc_cases(seed=12, count=ALL if all_faults else SAMPLE), one)
    print("\n".join(f"{count:6} {what}" for what, count in sorted(counts.items())))
    refused = sum(count for what, count in counts.items() if what.endswith(("INVALID_ARGUMENT", "NOT_FOUND")))
    assert refused > 0.5 * counts.total()


async def nothing() -> AsyncIterator[bytes]:
    for _ in ():
        yield b""


async def failure_of(call: Any) -> aio.AioRpcError | None:
    """How a call ends, after reading whatever it answers; None if well."""
    try:
        async with asyncio.timeout(2 * ANSWER_S):
            async for _ in call:
                pass
    except aio.AioRpcError as error:
        return error
    return None


def fields_of(error: aio.AioRpcError) -> list[str]:
    status = rpc_status.from_call(error)  # type: ignore[arg-type]
    assert status is not None
    bad = error_details_pb2.BadRequest()
    return [v.field for detail in status.details if detail.Unpack(bad) for v in bad.field_violations]
