"""The certificates of a process: read from files, and read again when they change, so that none needs a restart.

A folder has `ca.pem`, the authorities that the mesh trusts, and one file per role, such as `router.pem`: its private key and
its certificate. Each file is replaced as a whole, so key and certificate always belong together.
"""

import logging
import re
import ssl
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from penstock.services.field_problems import SettingsError

_log = logging.getLogger(__name__)

LOOK_S = 0.5
"""Files are looked at this often, at most."""
SERVER_NAME = "{role}.penstock"
"""The DNS name in the certificate of each role. Services and administrators connect by address, and require this name."""

_PEM = re.compile(rb"-----BEGIN ([A-Z ]+)-----.*?-----END \1-----\n?", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Certificates:
    """PEM texts. version: counts the changes.

    authorities: empty where callers are not asked for a certificate. chain: the certificate, and those between it and an
        authority.
    """

    authorities: bytes
    key: bytes
    chain: bytes
    version: int


class CertificateFiles:
    """The files of one identity.

    Raises:
        SettingsError: A file cannot be read, or has no key or no certificate; the message names it.
    """

    def __init__(self, identity: Path, authorities: Path | None = None, key: Path | None = None) -> None:
        """identity: certificate and, unless `key` names another file, its private key."""
        self.identity, self.key_file, self._authorities = identity, key or identity, authorities
        self._state = self._read_state()
        self._current = self._read(1)
        self._looked_s = time.monotonic()

    @classmethod
    def of_role(cls, folder: Path, role: str) -> "CertificateFiles":
        """The certificates of a role in the folder of a mesh."""
        return cls(folder / f"{role}.pem", folder / "ca.pem")

    def current(self) -> Certificates:
        """The certificates, read again if a file has changed. What cannot be read changes nothing."""
        now_s = time.monotonic()
        if now_s - self._looked_s < LOOK_S:
            return self._current
        self._looked_s = now_s
        state = self._read_state()
        if state != self._state:
            try:
                self._current = self._read(self._current.version + 1)
                self._state = state
                _log.info("new certificates from %s", self.identity)
            except SettingsError as error:
                _log.error("the certificates stay as they were: %s", error)
        return self._current

    def _read(self, version: int) -> Certificates:
        authorities = _text(self._authorities) if self._authorities is not None else b""
        identity, keys = _text(self.identity), _text(self.key_file)
        chain = b"".join(match[0] for match in _PEM.finditer(identity) if match[1] == b"CERTIFICATE")
        key = b"".join(match[0] for match in _PEM.finditer(keys) if match[1].endswith(b"PRIVATE KEY"))
        if not key:
            raise SettingsError(f"tls: {self.key_file}: no private key")
        if not chain:
            raise SettingsError(f"tls: {self.identity}: no certificate")
        return Certificates(authorities, key, chain, version)

    def _read_state(self) -> tuple[tuple[int, int], ...]:
        paths = [path for path in (self.identity, self.key_file, self._authorities) if path is not None]
        try:
            return tuple((status.st_mtime_ns, status.st_ino) for status in (path.stat() for path in paths))
        except OSError:
            return ()


def server_credentials(files: CertificateFiles, *, mutual: bool) -> grpc.ServerCredentials:
    """Credentials of a gRPC server, which look for new certificates at every handshake.

    mutual: callers must have a certificate of a trusted authority.
    """
    given = files.current()

    def configuration(certificates: Certificates) -> grpc.ServerCertificateConfiguration:
        authorities = certificates.authorities if mutual else None
        return grpc.ssl_server_certificate_configuration([(certificates.key, certificates.chain)], authorities)

    def fetch() -> Any:  # None: no change
        nonlocal given
        certificates = files.current()
        if certificates is given:
            return None
        given = certificates
        return configuration(certificates)

    return grpc.dynamic_ssl_server_credentials(configuration(given), fetch, require_client_authentication=mutual)


class HttpCertificates:
    """The TLS context of an HTTP server. `refresh` takes up new certificates, for new connections."""

    def __init__(self, files: CertificateFiles) -> None:
        self._files = files
        self.context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        self.context.minimum_version = ssl.TLSVersion.TLSv1_2
        self._version = 0
        self.refresh()

    def refresh(self) -> None:
        """Load the certificates if they have changed.

        Raises:
            SettingsError: Key and certificate do not belong together.
        """
        certificates = self._files.current()
        if certificates.version == self._version:
            return
        try:
            self.context.load_cert_chain(self._files.identity, self._files.key_file)
        except (ssl.SSLError, OSError) as error:
            raise SettingsError(f"tls: {self._files.identity}: {error}") from None
        self._version = certificates.version


def _text(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise SettingsError(f"tls: {path}: {error.strerror}; `penstock certs init` writes it") from None
