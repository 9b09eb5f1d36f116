"""API keys: created, recognised, revoked; the file has no secret."""

import hmac
import json
import time
from dataclasses import replace
from pathlib import Path

import pytest

from penstock.services.access.api_keys import KeyFile, KeyFileError, KeyRing, bearer, new_key
from penstock.services.domain.errors import NotFound, Unauthenticated
from tests.support.cli import penstock

NOW = 1_000.0


def test_a_key_is_recognised_and_belongs_to_its_tenant() -> None:
    keys = [new_key(tenant, NOW) for tenant in ("a", "b")]
    ring = KeyRing(key for key, _ in keys)
    assert [ring.recognise(text, NOW) for _, text in keys] == [key for key, _ in keys]


@pytest.mark.parametrize("change", ["secret", "id", "prefix", "longer", "shorter", "empty", "other", "huge", "unicode"])
def test_what_is_not_the_key_is_refused(change: str) -> None:
    key, text = new_key("a", NOW)
    _, other = new_key("a", NOW)
    prefix, key_id, secret = text.split("-", 2)
    wrong = {
        "secret": f"{prefix}-{key_id}-{'A' * len(secret)}",
        "id": f"{prefix}-{'0' * len(key_id)}-{secret}",
        "prefix": f"sk-{key_id}-{secret}",
        "longer": f"{text}x",
        "shorter": text[:-1],
        "empty": "",
        "other": other,
        "huge": text + "x" * 1_000_000,
        "unicode": f"{prefix}-{key_id}-é\udcff",
    }[change]
    with pytest.raises(Unauthenticated) as caught:
        KeyRing([key]).recognise(wrong, NOW)
    assert str(caught.value) == "the API key is not valid", "the message does not say what is wrong"


def test_expired_and_revoked_keys_are_refused() -> None:
    key, text = new_key("a", NOW, expires_at=NOW + 10)
    assert KeyRing([key]).recognise(text, NOW + 9.9) == key
    for ring, now in ((KeyRing([key]), NOW + 10), (KeyRing([replace(key, revoked_at=NOW)]), NOW)):
        with pytest.raises(Unauthenticated):
            ring.recognise(text, now)


def test_hashes_are_compared_in_constant_time_also_for_unknown_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each attempt makes exactly one comparison of two whole digests, by the function that takes the same time for all."""
    compared: list[tuple[int, int]] = []
    compare = hmac.compare_digest

    def counting(one: str, other: str) -> bool:
        compared.append((len(one), len(other)))
        return compare(one, other)

    monkeypatch.setattr(hmac, "compare_digest", counting)
    key, text = new_key("a", NOW)
    ring = KeyRing([key])
    ring.recognise(text, NOW)
    for wrong in ("", "x", "psk-unknown-secret", text[:-1], "psk-" + "x" * 10_000):
        with pytest.raises(Unauthenticated):
            ring.recognise(wrong, NOW)
    assert compared == [(64, 64)] * 6


@pytest.mark.parametrize("header", [None, "", "Bearer", "Bearer  ", "Basic abc", "psk-1-2"])
def test_a_call_without_a_bearer_key_is_refused(header: str | None) -> None:
    with pytest.raises(Unauthenticated, match="an API key is needed"):
        bearer({} if header is None else {"authorization": header})
    assert bearer({"authorization": "bearer  k "}) == "k"


def test_the_file_has_hashes_and_is_private_to_its_owner(tmp_path: Path) -> None:
    file = KeyFile(tmp_path / "keys.json")
    key, text = new_key("a", NOW, note="first")
    file.add(key)
    content = file.path.read_text()
    assert text.split("-", 2)[2] not in content
    assert file.path.stat().st_mode & 0o777 == 0o600
    assert file.read() == [key]
    second, _ = new_key("a", NOW)
    file.add(second)
    assert file.revoke(key.key_id, NOW + 1).revoked_at == NOW + 1
    assert file.revoke(key.key_id, NOW + 2).revoked_at == NOW + 1
    assert [each.revoked_at for each in file.read()] == [NOW + 1, None]
    with pytest.raises(NotFound):
        file.revoke("unknown", NOW)


@pytest.mark.parametrize("content", ["", "[]", '{"keys": [{}]}', '{"keys": 3}', "\x00"])
def test_what_is_no_key_file_is_an_error_with_its_name(tmp_path: Path, content: str) -> None:
    path = tmp_path / "keys.json"
    path.write_text(content)
    with pytest.raises(KeyFileError, match=r"keys\.json"):
        KeyFile(path).read()
    with pytest.raises(KeyFileError, match=r"missing\.json"):
        KeyFile(tmp_path / "missing.json").read()


def test_the_commands_create_list_and_revoke_keys(tmp_path: Path) -> None:
    mesh = tmp_path / "mesh.yaml"
    tiers = "tiers: [{name: only, engine: simulated}]"
    mesh.write_text(f"{tiers}\naccess: {{keys: keys.json, tenants: [{{name: acme}}]}}\n")
    created = json.loads(
        penstock("keys", "create", "acme", "--note", "tests", "--days", 7, "-m", mesh, "--json").stdout
    )
    plain = penstock("keys", "create", "acme", "-m", mesh).stdout.strip()
    ring = KeyRing(KeyFile(tmp_path / "keys.json").read())
    for text in (created["key"], plain):
        assert ring.recognise(text, time.time()).tenant == "acme"
    assert created["expires_at"] == pytest.approx(time.time() + 7 * 86_400, abs=600)

    listed = penstock("keys", "list", "-m", mesh, "--json").stdout
    rows = json.loads(listed)
    assert [(row["tenant"], row["state"], row["note"]) for row in rows] == [
        ("acme", "valid", "tests"),
        ("acme", "valid", ""),
    ]
    assert penstock("keys", "revoke", rows[0]["key_id"], "-m", mesh).returncode == 0
    table = penstock("keys", "list", "-m", mesh, columns=160).stdout
    assert "revoked" in table
    for secret in (created["key"].split("-", 2)[2], plain.split("-", 2)[2], "sha256"):
        assert secret not in listed + table

    refused = penstock("keys", "create", "nobody", "-m", mesh)
    assert (refused.returncode, "no tenant 'nobody'; there is acme" in refused.stderr) == (2, True)
    refused = penstock("keys", "revoke", "unknown", "-m", mesh)
    assert (refused.returncode, "no API key 'unknown'" in refused.stderr) == (1, True)
    mesh.write_text(tiers)
    refused = penstock("keys", "list", "-m", mesh)
    assert (refused.returncode, "access.keys: missing" in refused.stderr) == (2, True)
