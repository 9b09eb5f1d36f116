"""The users of a mesh's Redis: each role has what it needs, and not what another role does."""

import asyncio
import json
import os
import subprocess
import uuid
from collections.abc import Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import redis as redis_driver
from redis.exceptions import AuthenticationError, NoPermissionError

from penstock.local import redis_server as local_redis
from penstock.services.domain.instances import DEFAULT_MESH, InstanceRecord, ModelCard, Role
from penstock.services.processes import free_port
from penstock.services.redis_url import without_password
from penstock.services.state.connection import StateUnavailable, connect
from penstock.services.state.instances import InstanceStore
from penstock.services.state.keys import Keys, tier_group
from penstock.services.state.users import WHOLE, rules, user_name
from tests.conftest import ROOT, write_mesh_file
from tests.support.cli import penstock
from tests.support.mesh import running_mesh
from tests.support.services import RedisProcess

ROLES = ("router", "worker", "judge", "planner", "operator")
KEYS = Keys("mesh-*")  # a name that is a pattern of Redis, too


@dataclass
class Guarded:
    """A Redis with the users of a mesh."""

    port: int
    passwords: dict[str, str]

    def client(self, role: str, password: str | None = None) -> Any:
        return redis_driver.Redis(port=self.port, username=role, password=password or self.passwords[role])


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    folder, port, binary = tmp_path_factory.mktemp("redis"), free_port(), local_redis.find()
    passwords = local_redis.write_users(folder, KEYS.mesh, binary)
    assert (folder.stat().st_mode & 0o777, (folder / "users.acl").stat().st_mode & 0o777) == (0o700, 0o600)
    assert not any(password in (folder / "users.acl").read_text() for password in passwords.values())
    server = RedisProcess(binary, port, folder, ("--aclfile", str(folder / "users.acl")))
    server.url = f"redis://operator:{passwords['operator']}@127.0.0.1:{port}/0"
    server.start()
    yield Guarded(port, passwords)
    server.stop()


@pytest.mark.slow
def test_only_the_roles_with_their_passwords_come_in(guarded: Guarded) -> None:
    assert len(set(guarded.passwords.values())) == len(ROLES)
    for role in ROLES:
        assert guarded.client(role).ping()
        with pytest.raises(AuthenticationError):
            guarded.client(role, "wrong").ping()
    for client in (redis_driver.Redis(port=guarded.port), redis_driver.Redis(port=guarded.port, password="x")):
        with pytest.raises(AuthenticationError):
            client.ping()


def allowed(client: Any, *command: Any) -> bool:
    try:
        client.execute_command(*command)
    except NoPermissionError:
        return False
    except redis_driver.ResponseError as error:
        return "DEBUG command not allowed" not in str(
            error
        )  # Redis 7 refuses it to all; others: allowed, and impossible
    return True


REGISTRY: list[tuple[Any, ...]] = [
    ("SET", KEYS.instance("a"), "1"),
    ("SADD", KEYS.groups, "router"),
    ("SMEMBERS", KEYS.groups),
    ("HSET", KEYS.load("router"), "a", "x"),
    ("HMGET", KEYS.load("router"), "a"),
    ("TIME",),
    ("XADD", KEYS.spans, "*", "span", "x"),
    ("GET", KEYS.plan(1)),
    ("GET", KEYS.plan_revision),
]
OWN: dict[str, list[tuple[Any, ...]]] = {
    "router": [
        ("XREVRANGE", KEYS.spans, "+", "-", "COUNT", 1),
        ("XADD", KEYS.workload, "*", "window", "x"),
        ("XADD", KEYS.requests, "*", "r", "x"),
        ("XREVRANGE", KEYS.requests, "+", "-"),
        ("XADD", KEYS.prompts, "*", "p", "x"),
        ("XREVRANGE", KEYS.prompts, "+", "-"),
        ("XTRIM", KEYS.prompts, "MINID", "1"),
        ("HINCRBY", KEYS.limit("a", "requests"), "1", 1),
        ("HINCRBYFLOAT", KEYS.usage("2026-01-01"), "a|b|c|requests", 1),
        ("HGETALL", KEYS.usage("2026-01-01")),
        ("EVAL", "return redis.call('TIME')", 0),
    ],
    "planner": [("SET", KEYS.plan(1), "x"), ("SET", KEYS.plan_revision, "1"), ("XRANGE", KEYS.workload, "-", "+")],
}
NOBODYS: list[tuple[Any, ...]] = [
    ("FLUSHALL",),
    ("CONFIG", "GET", "*"),
    ("KEYS", "*"),
    ("SCAN", 0),
    ("ACL", "LIST"),
    ("DEBUG", "SLEEP", 0),
    ("SHUTDOWN",),
    ("GET", "another-mesh:plan:1"),
    ("SET", "mesh-1:instance:a", "1"),  # matched if the mesh's name were taken for a pattern
    ("HSET", "another-mesh:load:worker:a", "a", "x"),
    ("PUBLISH", "mesh-*:events", "x"),
    ("SUBSCRIBE", "mesh-*:events"),
    ("MONITOR",),
    ("REPLICAOF", "127.0.0.1", 1),
]


@pytest.mark.parametrize("role", ROLES)
def test_each_role_may_do_what_it_needs_and_nothing_of_others(guarded: Guarded, role: str) -> None:
    client = guarded.client(role)
    for command in REGISTRY + OWN.get(role, []):
        assert allowed(client, *command), command
    for command in NOBODYS:
        assert not allowed(client, *command), command
    for other in ROLES:
        for command in OWN.get(other, []) if other != role else []:
            # Redis 6 has no patterns of keys that may only be read: there a role may write what it only needs to read.
            if command[0] not in ("SET", "XADD"):
                assert not allowed(client, *command), command
    url = f"redis://{role}:{guarded.passwords[role]}@127.0.0.1:{guarded.port}/0"
    asyncio.run(_publish_and_pull(url, KEYS, Keys("another-mesh")))


async def _publish_and_pull(url: str, own: Keys, others: Keys) -> None:
    """What every process does, with the scripts that it runs in Redis; keys of other meshes stay closed to scripts."""
    client = connect(url)
    store = InstanceStore(client, own)
    card = ModelCard(f"of-{uuid.uuid4().hex}", "m", "d", "torch", 100, 10, 16, 8)
    record, group = InstanceRecord("w", Role.WORKER, "h:1", 1.0, 1, 60.0, model=card), tier_group(card.tier)
    await store.publish(record)
    pulled = await store.pull([group], group=group, instance_ids=[record.instance_id])
    assert record.instance_id in {entry.instance_id for entry in pulled.snapshots}
    assert [entry.instance_id for entry in pulled.singles] == [record.instance_id]
    assert set(await store.registrations([record.instance_id])) == {record.instance_id}
    await store.publish(record, gone=True)
    assert not await store.registrations([record.instance_id])
    with pytest.raises(StateUnavailable, match=r"NOPERM|permission|ACL"):
        await InstanceStore(client, others).publish(record)
    await client.aclose()


SERVING = ("first", "second")


@dataclass
class Shared:
    """A Redis with the users of several meshes, by what `penstock redis-users` prints."""

    files: dict[str, Path]
    passwords: dict[str, str]
    port: int

    def url(self, mesh: str, role: str) -> str:
        user = user_name(mesh, role)
        return f"redis://{user}:{self.passwords[user]}@127.0.0.1:{self.port}/0"


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shared]:
    folder, port, binary = tmp_path_factory.mktemp("shared"), free_port(), local_redis.find()
    stored, files = folder / "passwords.json", {}
    lines = ["user default off\n"]
    for mesh in ("penstock", "acme", *SERVING):
        files[mesh] = write_mesh_file(folder, name=mesh)
        words: list[object] = ["redis-users", "--mesh", files[mesh], "--passwords", stored]
        if local_redis.version(binary) < local_redis.FIRST_WITH_READ_ONLY_PATTERNS:
            words.append("--redis-6")
        printed = penstock(*words)
        assert printed.returncode == 0, printed.stderr
        assert penstock(*words).stdout == printed.stdout, "the passwords are kept"
        lines.append(printed.stdout)
    assert stored.stat().st_mode & 0o777 == 0o600
    passwords = json.loads(stored.read_text())
    assert not any(password in text for password in passwords.values() for text in lines)
    (folder / "users.acl").write_text("".join(lines))
    server = RedisProcess(binary, port, folder, ("--aclfile", str(folder / "users.acl")))
    made = Shared(files, passwords, port)
    server.url = made.url("acme", "operator")
    server.start()
    yield made
    server.stop()


@pytest.mark.parametrize("role", [*ROLES, WHOLE])
@pytest.mark.parametrize(("mesh", "other"), [("penstock", "acme"), ("acme", "penstock")])
def test_two_meshes_on_one_redis_reach_their_own_keys_only(shared: Shared, mesh: str, other: str, role: str) -> None:
    client, own, others = redis_driver.Redis.from_url(shared.url(mesh, role)), Keys(mesh), Keys(other)
    for keys, may in ((own, True), (others, False)):
        for command in (
            ("SET", keys.instance("a"), "1"),
            ("HGETALL", keys.load("router")),
            ("GET", keys.plan_revision),
            ("XADD", keys.spans, "*", "span", "x"),
        ):
            assert allowed(client, *command) is may, command
        for command in OWN.get(role, []):
            renamed = [part.replace(KEYS.mesh, keys.mesh) if isinstance(part, str) else part for part in command]
            if command[0] != "EVAL":  # a script without keys
                assert allowed(client, *renamed) is may, renamed
    for command in (("PUBLISH", f"{other}:x", "x"), ("SUBSCRIBE", f"{other}:x"), ("KEYS", "*"), ("ACL", "LIST")):
        assert not allowed(client, *command), command
    asyncio.run(_publish_and_pull(shared.url(mesh, role), own, others))


async def test_two_meshes_serve_on_one_redis(shared: Shared) -> None:
    """Each with the users of its own, at the same time: neither sees an instance of the other."""
    async with AsyncExitStack() as stack:
        for mesh in SERVING:
            running = await stack.enter_async_context(running_mesh(shared.files[mesh], shared.url(mesh, WHOLE)))
            client = await stack.enter_async_context(running.client())
            assert {each.instance_id for each in (await client.status()).instances} == set(running.parts)
            assert (await client.generate("a question", max_tokens=4)).text


def test_a_password_file_that_is_none_is_refused(tmp_path: Path) -> None:
    file, stored = write_mesh_file(tmp_path), tmp_path / "passwords.json"
    stored.write_text('["secret"]')
    refused = penstock("redis-users", "--mesh", file, "--passwords", stored)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "--passwords: " in refused.stderr
    assert stored.read_text() == '["secret"]'
    named = penstock("redis-users", "--mesh", write_mesh_file(tmp_path, name="a b"), "--passwords", stored)
    assert (named.returncode, "name: must have no space" in named.stderr) == (2, True)


def test_only_the_planner_writes_plans_where_redis_can_tell() -> None:
    """Redis 7 has patterns of keys that may only be read; the rule is the same text but for that."""
    written = rules("m", read_only_patterns=True)
    assert {role for role, rule in written.items() if "%R~m:plan:*" not in rule.split()} == {"planner"}
    assert "~m:plan:*" in written["planner"].split()
    for role, rule in rules("m", read_only_patterns=False).items():
        assert rule.split() == [part.replace("%R~", "~") for part in written[role].split()]


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("redis://user:secret@host:1/0", "redis://host:1/0"),
        ("redis://:secret@host/0", "redis://host/0"),
        ("rediss://host:1/0?password=secret&username=u&db=2", "rediss://host:1/0?db=2"),
        ("unix://user:secret@/run/redis.sock", "unix:///run/redis.sock"),
        ("redis://host:1/0", "redis://host:1/0"),
        (
            "rediss+sentinel://user:secret@host:1,other:2/state?sentinel_password=secret&ssl_ca_certs=ca.pem",
            "rediss+sentinel://host:1,other:2/state?ssl_ca_certs=ca.pem",
        ),
    ],
)
def test_urls_are_shown_without_password(url: str, expected: str) -> None:
    assert without_password(url) == expected


def test_the_users_of_the_compose_file_and_the_chart_are_what_the_script_writes() -> None:
    from penstock.services.mesh_file import load_mesh_file
    from scripts.access_files import FILES

    assert all(file.read_text() == content() for file, content in FILES.items())
    for path in ("mesh.yaml", "deploy/mesh-gpu.yaml"):
        assert load_mesh_file(ROOT / path).name == DEFAULT_MESH


@pytest.mark.parametrize("mesh", ["", "acme"])
def test_the_start_of_the_compose_files_redis_puts_name_and_passwords_in(tmp_path: Path, mesh: str) -> None:
    """With characters that a shell would interpret; the rules come out as they are."""
    script = (ROOT / "deploy/redis/start.sh").read_text()
    script = script.replace("/etc/redis/users.acl", str(ROOT / "deploy/redis/users.acl"))
    script = script.replace("/tmp/users.acl", str(tmp_path / "users.acl")).replace("chown redis", ": #")
    script = script.replace("exec docker-entrypoint.sh", "echo")
    passwords = {f"{role.upper()}_PASSWORD": f"$(touch {tmp_path}/ran)`id`'\"\\{role}" for role in ROLES}
    done = subprocess.run(
        ["sh", "-c", script, "start.sh", "--save", ""],
        env={"PATH": os.environ["PATH"], "MESH": mesh, **passwords},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == ["redis-server", "--aclfile", str(tmp_path / "users.acl"), "--save"]
    assert not (tmp_path / "ran").exists()
    lines = (tmp_path / "users.acl").read_text().splitlines()
    for role, line in zip(ROLES, lines[1:], strict=True):
        rule = rules(mesh or DEFAULT_MESH, read_only_patterns=True)[role]
        assert line == f"user {role} on >{passwords[f'{role.upper()}_PASSWORD']} {rule}"
