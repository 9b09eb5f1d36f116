"""Reads the header of GGUF files, the format of llama.cpp: what a model says of itself before its tensors."""

import mmap
import re
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SUFFIX = ".gguf"
_MAGIC, _VERSIONS = b"GGUF", (2, 3)
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_LATER_PART = re.compile(r"-0*(?!0*1-of-)\d+-of-\d+\.gguf$")


class NotGguf(ValueError):
    """A file that cannot be read as GGUF; the message says why."""


def is_gguf(path: Path) -> bool:
    """Whether a path names a GGUF file."""
    return path.suffix == SUFFIX


def gguf_file(path: Path) -> Path | None:
    """The GGUF file that a path means: itself, or the only model of a folder; None where it means none.

    Of a model in several parts it is the first.
    """
    if is_gguf(path):
        return path
    if (path / "config.json").exists():
        return None
    files = [file for file in sorted(path.glob(f"*{SUFFIX}")) if _LATER_PART.search(file.name) is None]
    return files[0] if len(files) == 1 else None


def read_metadata(file: Path) -> dict[str, Any]:
    """All keys and values.

    Raises:
        NotGguf: It is not such a file.
        OSError: It cannot be read.
    """
    return dict(_entries(file))


def _entries(file: Path) -> Iterator[tuple[str, Any]]:
    with file.open("rb") as opened:
        if opened.read(len(_MAGIC)) != _MAGIC:
            raise NotGguf(f"{file} is not a GGUF file")
        with mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as data:
            reader = _Reader(data, len(_MAGIC))
            try:
                version, _, count = reader.unpack("IQQ")
                if version not in _VERSIONS:
                    raise NotGguf(f"{file}: version {version} of the format, not {' or '.join(map(str, _VERSIONS))}")
                for _ in range(count):
                    key = reader.string()
                    yield key, reader.value(reader.unpack("I")[0])
            except (struct.error, KeyError, UnicodeDecodeError, IndexError):
                raise NotGguf(f"{file}: its header is damaged or cut off") from None


class _Reader:
    def __init__(self, data: mmap.mmap, at: int) -> None:
        self._data, self._at = data, at

    def unpack(self, kinds: str) -> tuple[Any, ...]:
        form = f"<{kinds}"
        values = struct.unpack_from(form, self._data, self._at)
        self._at += struct.calcsize(form)
        return values

    def string(self) -> str:
        (length,) = self.unpack("Q")
        if length > len(self._data) - self._at:
            raise IndexError(length)
        text = self._data[self._at : self._at + length]
        self._at += length
        return text.decode()

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            return self.unpack(_NUMBERS[kind])[0]
        inner, count = self.unpack("IQ")
        if count > len(self._data):
            raise IndexError(count)
        if inner in _NUMBERS:
            return list(self.unpack(f"{count}{_NUMBERS[inner]}"))
        return [self.value(inner) for _ in range(count)]
