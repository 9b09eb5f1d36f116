"""Count the words of the Markdown of the repository, by folder: `python -m scripts.words`.

Pages that a program writes are not counted, and neither is the changelog, which grows with every change.
"""

import subprocess
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LIMIT = 50_000
"""Words of all hand-written pages together."""
GENERATED = (*(f"docs/reference/{page}.md" for page in ("settings", "cli", "sdk")), "models/family/")
"""Pages, or folders of pages, written by scripts/reference_pages.py and models/training/cards.py."""


def hand_written() -> list[Path]:
    """The pages that people write, but for the changelog."""
    listed = subprocess.run(["git", "ls-files", "*.md"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    names = [name for name in listed.split() if name != "CHANGELOG.md" and not name.startswith(GENERATED)]
    return [ROOT / name for name in names if (ROOT / name).exists()]


def words(page: Path) -> int:
    """Words as `wc -w` counts them."""
    return len(page.read_text().split())


if __name__ == "__main__":
    folders = Counter[str]()
    for page in hand_written():
        folders[page.parent.relative_to(ROOT).as_posix()] += words(page)
    for folder, count in sorted(folders.items()):
        print(f"{count:7,}  {folder}")
    print(f"{folders.total():7,}  of {LIMIT:,}")
