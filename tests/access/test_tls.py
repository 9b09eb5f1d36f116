"""TLS: a mesh whose parts know each other by certificates, and who is refused."""

import asyncio
import datetime
import ssl
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import pytest
from cryptography import x509
from grpc import aio

from penstock import AsyncClient, AsyncPlannerClient, PenstockError, RetryPolicy, Tls
from penstock.services.access import authority
from penstock.services.access.certificates import LOOK_S, CertificateFiles
from penstock.services.access.guard import IDENTITY_PREFIX
from penstock.services.access.roles import PERMISSIONS, CallerRole, may_call
from penstock.services.field_problems import SettingsError
from tests.conftest import MeshFileMaker
from tests.support.cli import penstock
from tests.support.empty_calls import status_of_empty_call
from tests.support.held_engine import held_engines
from tests.support.mesh import TestMesh, running_mesh
from tests.support.services import RedisProcess
from tests.support.waiting import until_answered

HOSTS = ("localhost", "127.0.0.1")
SERVICES = ("router", "worker", "judge", "planner")


class TlsMesh(TestMesh):
    """A mesh with certificates; its client is an administrator, too."""

    __test__ = False

    folder: Path

    def client(self, **options: Any) -> AsyncClient:
        routers = [part for name, part in sorted(self.parts.items()) if name.startswith("router")]
        tls = Tls(self.folder / "ca.pem", self.folder / "admin.pem")
        usual: dict[str, Any] = {"retry": RetryPolicy(attempts=1), "timeout_s": 60, "tls": tls}
        return AsyncClient([r.address for r in routers], admin=[r.admin_address for r in routers], **(usual | options))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "certs"
    authority.create(path, HOSTS, days=1)
    return path


@pytest.fixture
async def mesh(redis: RedisProcess, mesh_file: MeshFileMaker, folder: Path) -> AsyncIterator[TlsMesh]:
    file = mesh_file(tls={"folder": str(folder)})
    made = TlsMesh(file, redis.url)
    made.folder = folder
    async with running_mesh(file, redis.url, mesh=made):
        yield made


def identity(folder: Path, role: str | None, authorities: Path | None = None) -> grpc.ChannelCredentials:
    """Of a role's certificate in a folder; without one if role is None. authorities: instead of the folder's own."""
    ca = ((authorities or folder) / "ca.pem").read_bytes()
    own = (folder / f"{role}.pem").read_bytes() if role is not None else None
    return grpc.ssl_channel_credentials(ca, own, own)


async def code_of(address: str, name: str, credentials: grpc.ChannelCredentials | None, method: str) -> grpc.StatusCode:
    """The status of a call without a message; OK if it is served."""
    options = [("grpc.ssl_target_name_override", f"{name}.penstock"), ("grpc.use_local_subchannel_pool", 1)]
    channel = (
        aio.secure_channel(address, credentials, options)
        if credentials is not None
        else aio.insecure_channel(address, options)
    )
    async with channel:
        return await status_of_empty_call(channel, method)


async def test_a_mesh_with_certificates_serves_as_one_without(mesh: TlsMesh) -> None:
    """Through the cascade with its judge, by gRPC and HTTPS; administration with the administrator's certificate."""
    async with mesh.client() as client:
        reply = await client.generate("hello", temperature=0, max_tokens=8)
        assert reply.tiers[0].tier == "small"
        assert reply.tiers[0].score is not None, "the judge was reached"
        assert (await client.status()).plan_revision == 1
    context = ssl.create_default_context(cafile=mesh.folder / "ca.pem")
    body = {"model": "cascade", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 8, "temperature": 0}
    url = f"https://{mesh.router.http_address}/v1/chat/completions"
    async with aiohttp.ClientSession() as session, session.post(url, json=body, ssl=context) as response:
        assert response.status == 200
        assert (await response.json())["choices"][0]["message"]["content"] == reply.text
    tls = Tls(mesh.folder / "ca.pem", mesh.folder / "admin.pem")
    async with AsyncPlannerClient(mesh.parts["planner-0"].admin_address, tls=tls) as planner:
        assert (await planner.get_plan()).revision == 1


@pytest.mark.parametrize("role", [*SERVICES, "admin"])
async def test_each_certificate_may_call_what_the_table_says(mesh: TlsMesh, role: str) -> None:
    """Every RPC at every listener between services and of administrators."""
    credentials = identity(mesh.folder, role)
    for part, service in (
        ("worker-small-0", "/penstock.worker.v1.WorkerService/"),
        ("judge-0", "/penstock.judge.v1.JudgeService/"),
        ("planner-0", "/penstock.planner.v1.PlannerService/"),
        ("router-0", "/penstock.router.v1.MeshService/"),
    ):
        chassis, name = mesh.parts[part], part.partition("-")[0]
        addresses = {chassis.address, chassis.admin_address} if name in ("worker", "judge") else {chassis.admin_address}
        for address in addresses:
            for method in (each for each in PERMISSIONS if each.startswith(service)):
                code = await code_of(address, name, credentials, method)
                allowed = may_call(method, {CallerRole(role)})
                assert (code is grpc.StatusCode.PERMISSION_DENIED) is not allowed, (part, method, code)


async def test_no_certificate_a_foreign_one_and_an_expired_one_are_refused_at_the_handshake(
    mesh: TlsMesh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    foreign, expired = tmp_path / "foreign", tmp_path / "expired"
    authority.create(foreign, HOSTS, days=1)
    expired.mkdir()
    for name in ("ca.pem", "ca.key", "router.pem"):
        (expired / name).write_bytes((mesh.folder / name).read_bytes())
    monkeypatch.setattr(authority, "SKEW", datetime.timedelta(days=10))
    ca = x509.load_pem_x509_certificates((expired / "ca.pem").read_bytes())[0]
    from cryptography.hazmat.primitives import serialization

    key: Any = serialization.load_pem_private_key((expired / "ca.key").read_bytes(), None)
    authority._issue(expired, "router", ca, key, (), -1)
    method, worker = "/penstock.worker.v1.WorkerService/GetLoad", mesh.parts["worker-small-0"]
    assert await code_of(worker.address, "worker", identity(mesh.folder, "router"), method) not in (
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.PERMISSION_DENIED,
    )
    for address in (worker.address, worker.admin_address, mesh.router.admin_address):
        name = "router" if address == mesh.router.admin_address else "worker"
        for credentials in (
            None,
            identity(mesh.folder, None),
            identity(foreign, "router", mesh.folder),
            identity(expired, "router"),
        ):
            assert await code_of(address, name, credentials, method) is grpc.StatusCode.UNAVAILABLE


async def test_a_service_is_not_believed_to_be_another(mesh: TlsMesh) -> None:
    """A worker's certificate does not make a judge: the caller requires the name of the role that it wants to call."""
    worker = mesh.parts["worker-small-0"]
    code = await code_of(
        worker.address, "judge", identity(mesh.folder, "router"), "/penstock.judge.v1.JudgeService/Score"
    )
    assert code is grpc.StatusCode.UNAVAILABLE


async def test_clients_check_the_routers_certificate(mesh: TlsMesh, tmp_path: Path) -> None:
    foreign = tmp_path / "foreign"
    authority.create(foreign, HOSTS, days=1)
    for tls in (Tls(foreign / "ca.pem"), Tls(), Tls(mesh.folder / "ca.pem", server_name="other.example"), None):
        async with mesh.client(tls=tls) as client:
            with pytest.raises(PenstockError):
                await client.generate("hello", max_tokens=1, timeout_s=10)
    context = ssl.create_default_context(cafile=foreign / "ca.pem")
    async with aiohttp.ClientSession() as session:
        for options in ({"ssl": context}, {}):
            with pytest.raises(aiohttp.ClientConnectorCertificateError):
                await session.get(f"https://{mesh.router.http_address}/livez", **options)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"tls\.ca: .*missing"):
        mesh.client(tls=Tls(tmp_path / "missing"))


async def _until_shown(mesh: TlsMesh, serial: int) -> None:
    """Return once new HTTPS and gRPC connections see the certificate with this serial number."""
    for address in (mesh.router.http_address, mesh.router.address):
        host, _, port = address.partition(":")
        while _serial(await asyncio.to_thread(ssl.get_server_certificate, (host, int(port)))) != serial:
            await asyncio.sleep(0.05)


def _serial(pem: str) -> int:
    return x509.load_pem_x509_certificate(pem.encode()).serial_number


@pytest.mark.parametrize("with_authority", [False, True])
async def test_new_certificates_are_taken_up_without_a_restart_and_running_replies_continue(
    mesh: TlsMesh, with_authority: bool
) -> None:
    async with mesh.client() as client:
        with held_engines("sim-large"):
            reading = asyncio.create_task(client.generate("hello", model="large", temperature=0))
            while not (await client.status()).active:
                await asyncio.sleep(0)
            authority.rotate(mesh.folder, days=1, authority=with_authority)
            await _until_shown(mesh, _serial((mesh.folder / "router.pem").read_text()))
            assert not reading.done()
        text = (await reading).text
    async with mesh.client() as client:  # a client that has only the new files

        async def answer() -> str:
            with suppress(
                PenstockError
            ):  # in the half second in which some have the new certificates and some have not
                return (await client.generate("hello", model="large", temperature=0)).text
            return ""

        assert await until_answered(answer) == text
        assert (await client.status()).plan_revision == 1


def test_files_are_read_again_when_they_change_and_bad_ones_change_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [time.monotonic()]
    monkeypatch.setattr("penstock.services.access.certificates.time.monotonic", lambda: now[0])
    files = CertificateFiles.of_role(folder, "worker")
    first = files.current()
    authority.rotate(folder, days=1)
    assert files.current() is first, "not looked at again so soon"
    now[0] += LOOK_S
    second = files.current()
    assert (second.version, second.chain != first.chain, second.key != first.key) == (2, True, True)
    assert second.authorities == first.authorities
    (folder / "worker.pem").write_text("nothing")
    now[0] += LOOK_S
    assert files.current() is second
    (folder / "worker.pem").unlink()
    now[0] += LOOK_S
    assert files.current() is second


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "No such file"),
        (b"", "no private key"),
        (b"-----BEGIN PRIVATE KEY-----\nx\n-----END PRIVATE KEY-----\n", "no cert"),
    ],
)
def test_certificates_that_cannot_be_used_are_a_settings_error(
    folder: Path, content: bytes | None, message: str
) -> None:
    path = folder / "judge.pem"
    if content is None:
        path.unlink()
    else:
        path.write_bytes(content)
    with pytest.raises(SettingsError, match=rf"judge\.pem.*{message}"):
        CertificateFiles.of_role(folder, "judge")


def test_the_commands_create_and_rotate_an_authority(tmp_path: Path) -> None:
    folder = tmp_path / "certs"
    assert penstock("certs", "rotate", "--folder", folder).returncode == 1
    assert penstock("certs", "init", "--folder", folder, "--host", "mesh.example", "--host", "10.1.2.3").returncode == 0
    assert penstock("certs", "init", "--folder", folder).returncode == 1, "an authority is never overwritten"
    modes = {path.name: path.stat().st_mode & 0o777 for path in folder.iterdir()}
    roles = {f"{role}.pem" for role in (*SERVICES, "admin")}
    assert modes == {"ca.pem": 0o644, "ca.key": 0o600, **dict.fromkeys(roles, 0o600)}
    old = certificate(folder, "router")
    names = old.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert {"localhost", "mesh.example", "router.penstock"} <= set(names.get_values_for_type(x509.DNSName))
    assert {"127.0.0.1", "10.1.2.3"} <= set(map(str, names.get_values_for_type(x509.IPAddress)))
    assert names.get_values_for_type(x509.UniformResourceIdentifier) == [f"{IDENTITY_PREFIX}router"]
    for role in ("worker", "admin"):
        other = certificate(folder, role).extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        assert other.get_values_for_type(x509.DNSName) == [f"{role}.penstock"]

    assert penstock("certs", "rotate", "--folder", folder, "--days", 3).returncode == 0
    new = certificate(folder, "router")
    assert new.serial_number != old.serial_number
    assert set(new.extensions.get_extension_for_class(x509.SubjectAlternativeName).value) == set(names)
    assert new.not_valid_after_utc - datetime.datetime.now(datetime.UTC) < datetime.timedelta(days=3)
    assert penstock("certs", "rotate", "--folder", folder, "--authority").returncode == 0
    trusted = x509.load_pem_x509_certificates((folder / "ca.pem").read_bytes())
    assert len(trusted) == 2
    certificate(folder, "router").verify_directly_issued_by(trusted[0])
    old.verify_directly_issued_by(trusted[1])


def certificate(folder: Path, role: str) -> x509.Certificate:
    return x509.load_pem_x509_certificates((folder / f"{role}.pem").read_bytes())[0]
