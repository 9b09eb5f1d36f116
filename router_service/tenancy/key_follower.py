"""Follows the key file: new and revoked keys count within a second, without a restart."""

import logging
from pathlib import Path
from typing import NoReturn

from penstock.services.access.api_keys import KeyFile, KeyFileError, KeyRing
from penstock.services.background import BackgroundWork, Works
from penstock.services.field_problems import SettingsError
from penstock.services.ticks import tick

_log = logging.getLogger(__name__)

LOOK_S = 0.5


class KeyFollower(BackgroundWork):
    """Reads the file again whenever it changes, as long as the context lasts. An unreadable file changes nothing.

    Raises:
        SettingsError: There is no such file, or it is not a key file.
    """

    def __init__(self, path: Path) -> None:
        self._file = KeyFile(path)
        self._version = self._read_version()
        try:
            self.ring = KeyRing(self._file.read())
            """The keys that are known now."""
        except KeyFileError as error:
            raise SettingsError(f"access.keys: {error}; `penstock keys create` writes it") from None

    def work(self) -> Works:
        return {"key-file": self._follow}

    async def _follow(self) -> NoReturn:
        while True:
            await tick(LOOK_S)
            version = self._read_version()
            if version == self._version:
                continue
            self._version = version
            try:
                self.ring = KeyRing(self._file.read())
            except KeyFileError as error:
                _log.error("the API keys stay as they were: %s", error)

    def _read_version(self) -> tuple[int, int, int] | None:
        """Differs for each content of the file, which is always replaced as a whole; None without a file."""
        try:
            status = self._file.path.stat()
        except OSError:
            return None
        return status.st_mtime_ns, status.st_ino, status.st_size
