"""Hooks of mkdocs.yml: pages of the site that are not in docs/, and links that leave docs/.

Pages link each other as files of the repository, so that they can be read there too. The site has some files from outside of
docs/ as pages and pictures; a link to any other file, such as a module, becomes its text.
"""

import os
import re
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File

from scripts.protocol_page import protocol_page

ROOT = Path(__file__).resolve().parent.parent
PAGES = {
    "benchmarks/README.md": "benchmarks.md",
    "models/family/README.md": "models.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
}
"""Path in the repository -> path in the site."""
PROTOCOL = "reference/protocol.md"
LINK = re.compile(r"(?P<image>!?)\[(?P<text>(?:[^\[\]]|\[[^\]]*\])*)\]\((?P<path>[^)#\s]*)(?P<anchor>#[^)\s]*)?\)")
PICTURES = "benchmarks/results"


def on_files(files: Any, config: Any) -> Any:
    """Add the pages and pictures from outside of docs/."""
    for path, page in PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / path).read_text()))
    files.append(File.generated(config, PROTOCOL, content=protocol_page()))
    for picture in sorted((ROOT / PICTURES).glob("*.svg")):
        files.append(File.generated(config, f"results/{picture.name}", abs_src_path=str(picture)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:  # noqa: ARG001 - mkdocs passes all by name
    """Turn links between files of the repository into links between pages of the site."""
    site = page.file.src_uri
    source = next((path for path, name in PAGES.items() if name == site), f"docs/{site}")

    def rewritten(match: re.Match[str]) -> str:
        path = match["path"]
        if not path or "://" in path:
            return match[0]
        target = os.path.normpath(Path(source).parent / path)
        if not (ROOT / target).exists():
            raise PluginError(f"{source}: no file {target}")
        place = site_path(target)
        if place is None:
            return match["text"]
        return f"{match['image']}[{match['text']}]({os.path.relpath(place, Path(site).parent)}{match['anchor'] or ''})"

    return LINK.sub(rewritten, markdown)


def site_path(target: str) -> str | None:
    """The page or picture of the site that a file of the repository is, if it is one."""
    if target in PAGES:
        return PAGES[target]
    if target == "protos":
        return PROTOCOL
    if target.startswith("docs/"):
        return target.removeprefix("docs/")
    if target.startswith(PICTURES) and target.endswith(".svg"):
        return f"results/{Path(target).name}"
    return None
