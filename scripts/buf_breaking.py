"""Check the protobuf definitions for breaking changes with buf: `python scripts/buf_breaking.py`.

Compares with the newest tag `wire-*`: from that commit on, compatibility of the wire is kept. Before there is one, it is not.
"""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def baseline() -> str | None:
    """The tag to compare with; None if there is none in the history of this commit."""
    command = ["git", "describe", "--tags", "--abbrev=0", "--match", "wire-*"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return result.stdout.strip() if result.returncode == 0 else None


def main() -> None:
    tag = baseline()
    if tag is None:
        print("buf breaking: no tag wire-* from which on compatibility is kept")
        return
    buf = Path(sys.executable).with_name("buf")
    against = f"{ROOT / '.git'}#tag={tag},subdir=protos"
    sys.exit(subprocess.run([str(buf), "breaking", "--against", against], cwd=ROOT / "protos", check=False).returncode)


if __name__ == "__main__":
    main()
