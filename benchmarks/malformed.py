"""What hostile clients cost others. Real processes; the first tier is the smallest shipped model.

`malformed`: 10,000 malformed requests, half of them by HTTP and half by gRPC, to every service; forms that cannot be enforced
are among them. `compressed`: ten clients that send bodies of 16 MiB, in 16 KiB of gzip. `forms`: one client that asks for
one form after another of each hostile kind, each of them new. What others feel is measured by a process of its own.
"""

import asyncio
import contextlib
import gzip
import itertools
import json
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from statistics import median
from typing import Any

import grpc
from google.rpc import error_details_pb2
from grpc import aio
from grpc_status import rpc_status

from benchmarks import report
from benchmarks.fault_streams import percentile_ms, until_whole
from benchmarks.meshes import CONFIDENCE, mesh_of
from penstock import AsyncClient, PenstockError
from penstock.local.mesh import LocalMesh
from penstock.services.domain.instances import Role
from tests.conftest import FAMILY, ROOT
from tests.support.malformed_forms import HOSTILE
from tests.support.malformed_grpc import LIMIT_S, MESH, GrpcCase, grpc_cases
from tests.support.malformed_http import CHAT_PATH, HttpCase, http_cases
from tests.support.raw_http import exchange, request_bytes

REQUESTS, SEED = 10_000, 11
AT_ONCE = 12
ANSWER_S = 120.0  # what takes longer hangs; forms of one client are tried one after the other, for a second each
QUIET_S = 1.0  # without an answer by then, a client that may not have sent everything closes its side
CLIENTS, BODY_BYTES, COMPRESSED_S = 10, 16 << 20, 10.0
FORMS_S = 3.0  # of each kind, and without any
GOOD_CODES = (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND, grpc.StatusCode.UNIMPLEMENTED)

NO_FORM = "no form"


@asynccontextmanager
async def running() -> AsyncIterator[LocalMesh]:
    """The mesh of this benchmark, with all processes ready."""
    fast = {"overhead_ms": 1.0, "token_us": 1.0, "context_token_ns": 0.0, "reply_tokens": 8, "max_context_tokens": 512}
    content = {
        "name": "malformed",
        "tiers": [
            {"name": "small", "model": str(FAMILY / "small"), "threshold": 50},
            {"name": "large", "model": "sim-large", "engine": "simulated", "simulated": fast},
        ],
        "judge": CONFIDENCE,
        "router": {"grpc_port": 0, "http_port": 0},
    }
    async with mesh_of(content, any_ports=False) as mesh:
        await until_whole(mesh)
        yield mesh


@asynccontextmanager
async def probe(mesh: LocalMesh, kind: str) -> AsyncIterator[dict[str, Any]]:
    """A bystander while the block lasts; the dictionary holds its figures afterwards. kind: of `tests.support.probe`."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.support.probe", kind, mesh.addresses.grpc[0], mesh.addresses.http[0],
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, limit=1 << 28, cwd=ROOT,
    )  # fmt: skip
    assert process.stdout is not None
    figures: dict[str, Any] = {}
    try:
        await process.stdout.readline()  # it has had its first answer
        yield figures
    except BaseException:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        raise
    finally:
        output, _ = await process.communicate(b"")  # ends its stdin
    result = json.loads(output)
    latencies_s = result["latencies_s"]
    figures |= {f"p{percent}_ms": percentile_ms(latencies_s, percent) for percent in (50, 99, 100)}
    figures |= {"answers": len(latencies_s), "errors": result["errors"]}


async def malformed(mesh: LocalMesh, count: int, seed: int = SEED) -> dict[str, Any]:
    """Send malformed requests, several at once. wrong: cases that were not answered in order. ended: processes."""
    answers, wrong = Counter[str](), list[str]()
    before = processes(mesh)
    address = mesh.addresses.http[0]  # a mesh knows it no longer while the router's lease has expired
    pairs = zip(http_cases(seed, count // 2), grpc_cases(seed, count // 2), strict=True)
    async with grpc_channels(mesh) as channels, probe(mesh, "questions") as bystander:

        async def one(case: HttpCase | GrpcCase) -> None:
            answer = "wrong"
            try:
                if isinstance(case, HttpCase):
                    answer = await http_answer(address, case)
                else:
                    answer = await grpc_answer(channels, case)
            except (AssertionError, TimeoutError) as error:
                wrong.append(f"{type(error).__name__}: {error} {case}"[:2_000])
            answers[f"{type(case).__name__} {case.kind}: {answer}"] += 1

        await several(itertools.chain.from_iterable(pairs), one)
    await until_whole(mesh)
    ended = sorted(name for name, pid in processes(mesh).items() if before[name] != pid)
    return {"requests": count, "seed": seed, "answers": answers, "wrong": wrong, "ended": ended, "probe": bystander}


def processes(mesh: LocalMesh) -> dict[str, int | None]:
    return {name: watched.pid for name, watched in mesh.watcher.watched.items()}


async def several(cases: Iterable[Any], one: Callable[[Any], Awaitable[None]]) -> None:
    left = iter(cases)

    async def work() -> None:
        for case in left:
            await one(case)

    async with asyncio.TaskGroup() as tasks:
        for _ in range(AT_ONCE):
            tasks.create_task(work())


async def http_answer(address: str, case: HttpCase) -> str:
    """The status of the answer.

    Raises:
        AssertionError: It is neither 4xx in OpenAI's shape with the field's name, nor 200 where what is wrong has no meaning.
        TimeoutError: There is none.
    """
    quiet_s = None if case.complete else QUIET_S
    response = await exchange(address, case.data, method=case.method, end_after_s=quiet_s, timeout_s=ANSWER_S)
    if response is None:
        assert not case.complete  # the client's side was closed first
        return "closed"
    assert response.status == 200 or 400 <= response.status < 500, response
    assert response.status != 429, response
    if response.status == 200:
        assert case.field is None, response
    elif case.method != "HEAD":
        error = response.error()
        assert len(response.body) < 8_192
        if case.complete and response.status != 422:  # it is the body that is wrong; 422: what the model wrote
            assert error["param"], error
            assert error["param"] in error["message"] or response.status == 404
        if case.field is not None:
            assert str(error["param"]).startswith(case.field), error
            assert case.field in error["message"]
    return f"{response.status}"


@asynccontextmanager
async def grpc_channels(mesh: LocalMesh) -> AsyncIterator[Mapping[str, aio.Channel]]:
    """A channel to a process of each role."""
    addresses = {r.value: mesh.view.instances(r)[0].address for r in (Role.WORKER, Role.JUDGE, Role.PLANNER)}
    addresses |= {"router": mesh.addresses.grpc[0], "mesh": mesh.addresses.admin[0], "planner": mesh.addresses.planner}
    options = (("grpc.max_send_message_length", -1),)
    async with contextlib.AsyncExitStack() as stack:
        yield {
            role: await stack.enter_async_context(aio.insecure_channel(address, options=options))
            for role, address in addresses.items()
        }


async def grpc_answer(channels: Mapping[str, aio.Channel], case: GrpcCase) -> str:
    """The name of the answer's code.

    Raises:
        AssertionError: It is neither INVALID_ARGUMENT with the field's name, nor another code of a refusal, nor OK where
            what is wrong has no meaning.
        TimeoutError: There is none.
    """
    channel = channels["mesh" if case.method.startswith(MESH) else case.role]
    # Not as a stream, of which the client's library fails what it sends after the answer has come.
    method: Any = channel.unary_stream(case.method) if case.data is not None else channel.stream_stream(case.method)
    deadline_s = LIMIT_S if case.endless else ANSWER_S
    call = method(case.data if case.data is not None else nothing(), timeout=deadline_s, metadata=case.metadata)
    try:
        async with asyncio.timeout(2 * ANSWER_S):
            async for _ in call:
                pass
    except aio.AioRpcError as error:
        failure = error
    else:
        assert not case.fields
        return "OK"
    if case.endless and failure.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
        return "endless"
    written = (grpc.StatusCode.FAILED_PRECONDITION,) if case.kind == "form" else ()  # what the model wrote of it
    assert failure.code() in (*GOOD_CODES, *written), failure
    assert len((failure.details() or "").encode()) <= 1_024, failure
    if failure.code() is grpc.StatusCode.INVALID_ARGUMENT:
        fields = fields_of(failure)
        assert fields, failure
        assert all(any(f.startswith(expected) for f in fields) for expected in case.fields), failure
    return failure.code().name


async def nothing() -> AsyncIterator[bytes]:
    for _ in ():
        yield b""


def fields_of(error: aio.AioRpcError) -> list[str]:
    status = rpc_status.from_call(error)  # type: ignore[arg-type]
    assert status is not None
    bad = error_details_pb2.BadRequest()
    return [v.field for detail in status.details if detail.Unpack(bad) for v in bad.field_violations]


async def compressed(mesh: LocalMesh, seconds: float = COMPRESSED_S) -> dict[str, Any]:
    """Send bodies that are too large when decompressed, one after another from each client, while `/livez` is asked."""
    body = gzip.compress(bytes(BODY_BYTES))
    data = request_bytes(body, CHAT_PATH, "Content-Type: application/json", "Content-Encoding: gzip")
    address, answers = mesh.addresses.http[0], Counter[int]()
    async with probe(mesh, "livez") as alone:
        await asyncio.sleep(seconds)
    async with probe(mesh, "livez") as beside:
        until = time.monotonic() + seconds

        async def client() -> None:
            while time.monotonic() < until:
                response = await exchange(address, data, timeout_s=ANSWER_S)
                answers[response.status if response is not None else 0] += 1

        await asyncio.gather(*(client() for _ in range(CLIENTS)))
    return {"clients": CLIENTS, "body_bytes": BODY_BYTES, "answers": answers, "livez_alone": alone, "livez": beside}


async def forms(mesh: LocalMesh, names: Iterable[str], rounds: int, seconds: float = FORMS_S) -> list[dict[str, Any]]:
    """For each kind of hostile form: what one client's does to the gaps between another's tokens, by round.

    The first row is a client that asks for no form at all: what any further reply of the engine costs.
    """
    numbers, rows = itertools.count(SEED), []
    async with AsyncClient(mesh.addresses.grpc[0], timeout_s=ANSWER_S) as client:
        for name in (NO_FORM, *names):
            alone_ms, beside_ms, answers = list[float](), list[float](), Counter[str]()
            for _ in range(rounds):
                async with probe(mesh, "tokens") as figures:
                    await asyncio.sleep(seconds)
                alone_ms.append(figures["p99_ms"])
                async with probe(mesh, "tokens") as figures:
                    until = time.monotonic() + seconds
                    while time.monotonic() < until:
                        form = HOSTILE[name](next(numbers)) if name != NO_FORM else None
                        answers[await form_answer(client, form)] += 1
                beside_ms.append(figures["p99_ms"])
            ratios = [beside / alone for beside, alone in zip(beside_ms, alone_ms, strict=True)]
            row = {"form": name, "ratio": round(median(ratios), 2), "alone_ms": alone_ms, "beside_ms": beside_ms}
            rows.append({**row, "answers": answers})
            print(rows[-1], flush=True)
    return rows


async def form_answer(client: AsyncClient, form: Any) -> str:
    try:
        await client.generate("hello", model="small", max_tokens=100, structured_output=form)
    except PenstockError as error:
        return type(error).__name__
    return "OK"


def run(rounds: int) -> None:
    asyncio.run(_run(rounds, REQUESTS, tuple(HOSTILE)))


def run_quick(rounds: int) -> None:
    """A tenth of the requests, and the forms that cost most."""
    asyncio.run(_run(rounds, REQUESTS // 10, ("multiple of a prime", "longer and longer")))


async def _run(rounds: int, requests: int, names: tuple[str, ...]) -> None:
    async with running() as mesh:
        figures: dict[str, Any] = {"malformed": await malformed(mesh, requests)}
        print(json.dumps(figures, indent=1), flush=True)
        figures["compressed"] = await compressed(mesh)
        print(json.dumps(figures["compressed"], indent=1), flush=True)
        figures["forms"] = await forms(mesh, names, rounds)
        print(report.write("malformed", figures))
