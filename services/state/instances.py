"""Stores what instances say of themselves in Redis, and reads it: whole groups, or single instances.

An instance's registration is a key of its own, which expires with its lease. What changes all the time is one entry in the
hash of its group: the time of the write and the lease, in milliseconds of the store's clock, the head and, on a second line,
the load, both as JSON (`codec`). Readers pull. Readers of a whole group get a snapshot that is at most `SNAPSHOT_MS` old,
or older in a large group: the store puts it together once for all who ask meanwhile, and drops entries whose lease has
passed by its own clock.
"""

import functools
import hashlib
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any, NamedTuple

from redis.asyncio import Redis
from redis.exceptions import NoScriptError

from penstock.services.domain.instances import InstanceRecord, Load
from penstock.services.field_problems import from_json
from penstock.services.state import codec
from penstock.services.state.connection import as_bytes, state_errors
from penstock.services.state.keys import Keys, group_of

SNAPSHOT_MS = 50
"""A snapshot of a group serves all readers for this long, or longer if the group is large."""
ENTRIES_PER_MS = 20
"""Of a large group: the store, which takes 8 us for an entry, then spends at most a sixth of its time on one kind of them."""
MAX_ENTRY_BYTES = 65_536
"""A longer entry is passed on without its content: readers count it as unusable."""
MAX_DIGITS = 15
"""Of a time in milliseconds, or a number of bytes."""
READ_AT_ONCE = 256
"""Registrations that one command reads: so that no command keeps the store busy for long."""

Command = tuple[str | int | bytes, ...]
"""A command of Redis and its arguments."""

_PUBLISH = """
local time = redis.call('TIME')
local stamp = string.format('%.0f', time[1] * 1000 + math.floor(time[2] / 1000))
redis.call('HSET', KEYS[1], ARGV[1], stamp .. ' ' .. ARGV[2] .. ' ' .. ARGV[3])
if ARGV[4] ~= '' then
  redis.call('SET', KEYS[2], ARGV[4], 'PX', ARGV[2])
  redis.call('SADD', KEYS[3], ARGV[5])
end
"""

_SNAPSHOT = """
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local snapshot = redis.call('GET', KEYS[2])
if not snapshot then
  local all, parts = redis.call('HGETALL', KEYS[1]), {}
  for i = 1, #all, 2 do
    local id, entry = all[i], all[i + 1]
    local stamp, lease, from = string.match(entry, '^(%d+) (%d+) ()')
    if not stamp or #stamp > tonumber(ARGV[3]) or #lease > tonumber(ARGV[3]) or #entry > tonumber(ARGV[2]) then
      parts[#parts + 1] = #id .. ' 0 0\\n' .. id
    elseif math.abs(now - tonumber(stamp)) > tonumber(lease) then
      redis.call('HDEL', KEYS[1], id)
    else
      local to = #entry
      if ARGV[4] == 'heads' then to = (string.find(entry, '\\n', from, true) or to + 1) - 1 end
      parts[#parts + 1] = #id .. ' ' .. stamp .. ' ' .. (to - from + 1) .. '\\n' .. id
      parts[#parts + 1] = string.sub(entry, from, to)
    end
  end
  snapshot = table.concat(parts)
  redis.call('SET', KEYS[2], snapshot, 'PX', math.max(ARGV[1], math.floor(#all / 2 / ARGV[5])))
end
return {now, snapshot}
"""


class Entry(NamedTuple):
    """An instance's entry as it was read. age_s: since it was written. body: head and load; empty if it is unusable."""

    instance_id: str
    age_s: float
    body: bytes

    def decoded(self) -> tuple[codec.Head, Load | None]:
        """Raises:
        ValueError: It is no entry; the message names the field.
        """
        if not self.body:
            raise ValueError(f"it has no time and lease, or more than {MAX_ENTRY_BYTES} bytes")
        head, _, load = self.body.partition(b"\n")
        return from_json(codec.Head, head), codec.load_from_json(load) if load else None


class Pull(NamedTuple):
    """What one round trip has read.

    plan_revision: None without a plan. groups: all that have had instances. snapshots: the entries of the groups that were
    asked for, in any order. singles: those of the instances that were asked for; one without an entry is missing.
    """

    plan_revision: int | None
    groups: frozenset[str]
    snapshots: list[Entry]
    singles: list[Entry]


class InstanceStore:
    """All methods raise StateUnavailable without Redis."""

    def __init__(self, redis: Redis, keys: Keys) -> None:
        self._redis, self._keys = redis, keys

    async def publish(self, record: InstanceRecord, *, renew: bool = True, gone: bool = False) -> None:
        """Write the entry of an instance. renew: its registration too, with a whole lease. gone: it leaves the mesh."""
        command = self.publish_command(record, renew=renew, gone=gone)
        with state_errors():
            await self._with_scripts(lambda: self._redis.execute_command(*command))  # type: ignore[no-untyped-call]
            if gone:
                await self._redis.delete(self._keys.instance(record.instance_id))

    def publish_command(self, record: InstanceRecord, *, renew: bool, gone: bool = False) -> Command:
        """What `publish` sends to a store that has the scripts."""
        group = group_of(record)
        load = b"\n" + codec.load_to_json(record.load) if record.load is not None else b""
        registration = codec.registration_to_json(record) if renew and not gone else b""
        lease_ms = max(1, round(record.lease_s * 1000))
        keys = [self._keys.load(group), self._keys.instance(record.instance_id), self._keys.groups]
        body = codec.head_to_json(record, gone=gone) + load
        return "EVALSHA", _digest(_PUBLISH), 3, *keys, record.instance_id, lease_ms, body, registration, group

    async def pull(
        self, groups: Sequence[str], *, heads: bool = False, group: str = "", instance_ids: Sequence[str] = ()
    ) -> Pull:
        """Read all entries of `groups`, those of some instances of `group`, and which plan is current.

        heads: the entries of `groups` without their load.
        """
        commands = self.pull_commands(groups, heads=heads, group=group, instance_ids=instance_ids)
        with state_errors():
            revision, names, *rest = await self._with_scripts(lambda: self._send(commands))
        singles: list[Entry] = []
        if instance_ids:
            (seconds, microseconds), values = rest[-2:]
            now_ms = int(seconds) * 1000 + int(microseconds) // 1000
            for instance_id, value in zip(instance_ids, values, strict=True):
                if value is not None and (entry := _single(instance_id, as_bytes(value), now_ms)) is not None:
                    singles.append(entry)
        return Pull(
            plan_revision=_revision(revision),
            groups=frozenset(as_bytes(name).decode(errors="replace") for name in names),
            snapshots=[
                entry
                for name, (now_ms, text) in zip(groups, rest, strict=False)
                for entry in _entries(name, as_bytes(text), now_ms)
            ],
            singles=singles,
        )

    def pull_commands(
        self, groups: Sequence[str], *, heads: bool = False, group: str = "", instance_ids: Sequence[str] = ()
    ) -> list[Command]:
        """What `pull` sends to a store that has the scripts."""
        kind = "heads" if heads else "all"
        commands: list[Command] = [("GET", self._keys.plan_revision), ("SMEMBERS", self._keys.groups)]
        for name in groups:
            keys = self._keys.load(name), self._keys.snapshot(name, heads=heads)
            limits = SNAPSHOT_MS, MAX_ENTRY_BYTES, MAX_DIGITS
            commands.append(("EVALSHA", _digest(_SNAPSHOT), 2, *keys, *limits, kind, ENTRIES_PER_MS))
        if instance_ids:
            commands += [("TIME",), ("HMGET", self._keys.load(group), *instance_ids)]
        return commands

    async def registrations(self, instance_ids: Iterable[str]) -> dict[str, bytes]:
        """The registrations of instances, as JSON; those whose lease has expired are missing."""
        ids, registrations = list(instance_ids), dict[str, bytes]()
        for first in range(0, len(ids), READ_AT_ONCE):
            names = ids[first : first + READ_AT_ONCE]
            with state_errors():
                values = await self._redis.mget([self._keys.instance(name) for name in names])
            registrations |= {
                name: as_bytes(data) for name, data in zip(names, values, strict=True) if data is not None
            }
        return registrations

    async def _send(self, commands: Sequence[Command]) -> list[Any]:
        async with self._redis.pipeline(transaction=False) as pipe:
            for command in commands:
                pipe.execute_command(*command)
            replies: list[Any] = await pipe.execute()
            return replies

    async def _with_scripts(self, call: Callable[[], Awaitable[Any]]) -> Any:
        """The result of the call, again with the scripts if the store, which may be new, does not have them."""
        try:
            return await call()
        except NoScriptError:
            for script in (_PUBLISH, _SNAPSHOT):
                await self._redis.script_load(script)
            return await call()


@functools.cache
def _digest(script: str) -> str:
    """What the store knows a script by."""
    return hashlib.sha1(script.encode(), usedforsecurity=False).hexdigest()


def _revision(value: bytes | None) -> int | None:
    """The number of the current plan; None if there is none, or no number."""
    return int(value) if value is not None and _is_number(as_bytes(value)) else None


def _entries(group: str, snapshot: bytes, now_ms: int) -> Iterable[Entry]:
    """The entries of a snapshot: for each `LENGTH STAMP LENGTH`, a line feed, the instance id and the body.

    What is no snapshot ends with an unusable entry of the group's name.
    """
    at = 0
    while at < len(snapshot):
        numbers, _, _ = snapshot[at : at + 3 * (MAX_DIGITS + 1)].partition(b"\n")
        match numbers.split(b" "):
            case [id_bytes, stamp_ms, body_bytes] if all(map(_is_number, (id_bytes, stamp_ms, body_bytes))):
                id_at = at + len(numbers) + 1
                body_at = id_at + int(id_bytes)
                at = body_at + int(body_bytes)
                instance_id = snapshot[id_at:body_at].decode(errors="replace")
                yield Entry(instance_id, max(0, now_ms - int(stamp_ms)) / 1000, snapshot[body_at:at])
            case _:
                yield Entry(group, 0.0, b"")
                return


def _single(instance_id: str, value: bytes, now_ms: int) -> Entry | None:
    """The entry of one instance; None if its lease has passed."""
    stamp, _, rest = value.partition(b" ")
    lease, _, body = rest.partition(b" ")
    if not (_is_number(stamp) and _is_number(lease)) or len(value) > MAX_ENTRY_BYTES:
        return Entry(instance_id, 0.0, b"")
    age_ms = now_ms - int(stamp)
    return Entry(instance_id, max(0, age_ms) / 1000, body) if abs(age_ms) <= int(lease) else None


def _is_number(text: bytes) -> bool:
    return text.isdigit() and len(text) <= MAX_DIGITS
