"""Files that only their owner may read."""

import os
from pathlib import Path


def replace_file(path: Path, content: bytes | str, *, mode: int = 0o600) -> None:
    """Replace a file as a whole: who reads it meanwhile gets the one before. mode: from its first byte on.

    Raises:
        OSError: The folder cannot be written.
    """
    new = path.with_name(f"{path.name}.new")
    new.unlink(missing_ok=True)  # one that an interrupted write left has a mode of its own
    with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode), "wb") as file:
        file.write(content.encode() if isinstance(content, str) else content)
    new.replace(path)
