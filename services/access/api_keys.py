"""API keys: `psk-<id>-<secret>`. The key file has the id and a hash of the secret, never the secret.

The secret has 256 random bits, so a plain SHA-256 is enough: there is nothing to guess. The id says which hash to compare
with; it is no secret. The comparison takes the same time whether the id is known, and wherever the hashes differ.
"""

import fcntl
import hashlib
import hmac
import json
import secrets
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from penstock.services.domain.errors import NotFound, Unauthenticated
from penstock.services.private_files import replace_file

PREFIX = "psk"
ID_BYTES, SECRET_BYTES = 6, 32
MAX_KEY_CHARS = 128
"""Longer texts are no keys, and are not hashed."""


class KeyFileError(Exception):
    """The key file cannot be read or written, or it is not a key file."""


@dataclass(frozen=True, slots=True)
class ApiKey:
    """A key as the file has it. Times are Unix seconds; None: never.

    sha256: of the secret, in hex.
    """

    key_id: str
    tenant: str
    sha256: str
    created_at: float
    expires_at: float | None = None
    revoked_at: float | None = None
    note: str = ""

    def is_valid(self, now: float) -> bool:
        return self.revoked_at is None and (self.expires_at is None or now < self.expires_at)


def new_key(tenant: str, now: float, *, expires_at: float | None = None, note: str = "") -> tuple[ApiKey, str]:
    """(the key as it is stored, the key as its holder gets it)."""
    key_id, secret = secrets.token_hex(ID_BYTES), secrets.token_urlsafe(SECRET_BYTES)
    key = ApiKey(key_id, tenant, _digest(secret), now, expires_at, None, note)
    return key, f"{PREFIX}-{key_id}-{secret}"


class KeyRing:
    """Recognises keys."""

    def __init__(self, keys: Iterable[ApiKey]) -> None:
        self._keys = {key.key_id: key for key in keys}

    def recognise(self, text: str, now: float) -> ApiKey:
        """The key that `text` is.

        Raises:
            Unauthenticated: It is not a key of this ring, or it has expired or was revoked. The message does not say which.
        """
        prefix, _, rest = text[: MAX_KEY_CHARS + 1].partition("-")
        key_id, _, secret = rest.partition("-")
        key = self._keys.get(key_id)
        same = hmac.compare_digest(_digest(secret), key.sha256 if key is not None else _NO_DIGEST)
        if key is None or not same or prefix != PREFIX or len(text) > MAX_KEY_CHARS or not key.is_valid(now):
            raise Unauthenticated("the API key is not valid")
        return key


def bearer(headers: Mapping[str, str]) -> str:
    """The API key in the headers of a call (`authorization: Bearer KEY`).

    Raises:
        Unauthenticated: There is none.
    """
    scheme, _, key = headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer" or not key.strip():
        raise Unauthenticated("an API key is needed: authorization: Bearer KEY")
    return key.strip()


class KeyFile:
    """The keys in a JSON file, which is replaced as a whole at every change."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> list[ApiKey]:
        """All keys, in the order of their creation.

        Raises:
            KeyFileError: There is no such file, or it is not a key file.
        """
        try:
            return [ApiKey(**entry) for entry in json.loads(self.path.read_text())["keys"]]
        except OSError as error:
            raise KeyFileError(f"{self.path}: {error.strerror}") from None
        except (ValueError, KeyError, TypeError) as error:
            raise KeyFileError(f"{self.path}: not a key file: {error}") from None

    def add(self, key: ApiKey) -> None:
        """Add a key; create the file if it is missing."""
        self._change(lambda keys: [*keys, key])

    def revoke(self, key_id: str, now: float) -> ApiKey:
        """Revoke a key; one that was revoked before stays as it is.

        Raises:
            NotFound: There is no such key.
        """
        matches = [key for key in self.read() if key.key_id == key_id]
        if not matches:
            raise NotFound("API key", key_id)
        revoked = matches[0] if matches[0].revoked_at is not None else replace(matches[0], revoked_at=now)
        self._change(lambda keys: [revoked if key.key_id == key_id else key for key in keys])
        return revoked

    def _change(self, change: Callable[[list[ApiKey]], list[ApiKey]]) -> None:
        try:
            with self.path.with_name(f"{self.path.name}.lock").open("w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)  # one change at a time
                keys = change(self.read() if self.path.exists() else [])
                replace_file(self.path, json.dumps({"keys": [asdict(key) for key in keys]}, indent=1) + "\n")
        except OSError as error:
            raise KeyFileError(f"{self.path}: {error.strerror}") from None


def _digest(secret: str) -> str:
    return hashlib.sha256(secret.encode("utf-8", "surrogatepass")).hexdigest()


_NO_DIGEST = _digest("")
