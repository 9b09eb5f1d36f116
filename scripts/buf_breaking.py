"""Check the protobuf definitions for breaking changes with buf: `python scripts/buf_breaking.py`.

Compares with the main branch or, on that branch, with the previous commit.
"""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def git(*arguments: str) -> str | None:
    """The output of git; None if it fails."""
    result = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    return result.stdout.strip() if result.returncode == 0 else None


def baseline() -> str | None:
    """The commit to compare with."""
    head = git("rev-parse", "HEAD")
    for name in ("origin/main", "main", "HEAD~1"):
        commit = git("merge-base", "HEAD", name)
        if commit is not None and commit != head and git("cat-file", "-e", f"{commit}:protos/buf.yaml") is not None:
            return commit
    return None


def main() -> None:
    commit = baseline()
    if commit is None:
        print("buf breaking: no earlier definitions to compare with")
        return
    buf = Path(sys.executable).with_name("buf")
    against = f"{ROOT / '.git'}#ref={commit},subdir=protos"
    sys.exit(subprocess.run([str(buf), "breaking", "--against", against], cwd=ROOT / "protos", check=False).returncode)


if __name__ == "__main__":
    main()
