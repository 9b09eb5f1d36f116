"""Follows the key file: new and revoked keys count within a second, without a restart."""

import asyncio
import logging
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from types import TracebackType
from typing import NoReturn

from services.access.api_keys import KeyFile, KeyFileError, KeyRing
from services.background import end, supervise
from services.field_problems import SettingsError
from services.ticks import tick

_log = logging.getLogger(__name__)

LOOK_S = 0.5


class KeyFollower(AbstractAsyncContextManager["KeyFollower"]):
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
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> "KeyFollower":
        self._task = supervise("key-file", self._follow)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._task is not None:
            await end(self._task)

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
