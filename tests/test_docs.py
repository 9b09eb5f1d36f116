"""The documentation: links and anchors lead somewhere, and it keeps within its budgets."""

import re
from functools import cache
from pathlib import Path

import pytest

from scripts.words import LIMIT, hand_written, words
from tests.conftest import ROOT

PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), ROOT / "benchmarks" / "README.md"])
DECISIONS = sorted((ROOT / "docs" / "adr").glob("[0-9]*.md"))
LINK = re.compile(r"\]\(([^)#\s]*)(?:#([^)\s]*))?\)")


@cache
def anchors(page: Path) -> frozenset[str]:
    """The anchors of a page: its headings as GitHub and the site name them, and those that it sets."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", text, flags=re.MULTILINE)
    names = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower().replace(" ", "-") for heading in headings]
    return frozenset([re.sub(r"[^\w-]", "", name) for name in names] + re.findall(r'<a id="([^"]+)"', text))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_link_leads_somewhere(page: Path) -> None:
    for target, anchor in LINK.findall(page.read_text()):
        if "://" in target:
            continue
        file = (page.parent / target).resolve() if target else page
        assert file.exists(), target
        if anchor and file.suffix == ".md":
            assert anchor in anchors(file), f"{target}#{anchor}"


def test_the_readme_is_short() -> None:
    text = (ROOT / "README.md").read_text()
    assert len(text.split()) <= 600
    assert text.count("](") <= 12


def test_all_pages_together_keep_within_their_budget() -> None:
    assert sum(words(page) for page in hand_written()) <= LIMIT


def test_decisions_are_few() -> None:
    assert 0 < len(DECISIONS) <= 30


@pytest.mark.parametrize("page", DECISIONS, ids=lambda page: page.stem)
def test_a_decision_has_its_number_a_title_and_a_status_and_is_listed(page: Path) -> None:
    text = page.read_text()
    assert re.match(rf"# {int(page.name[:4])}\. \S.+\n\n\*\*Status:\*\* (accepted|proposed|superseded)\b", text)
    assert f"({page.name})" in (page.parent / "README.md").read_text()


def test_every_decision_that_was_ever_numbered_can_be_found() -> None:
    history = (ROOT / "docs" / "adr" / "history.md").read_text()
    found = {int(page.name[:4]) for page in DECISIONS} | {int(n) for n in re.findall(r'<a id="(\d+)"', history)}
    assert found == set(range(1, max(found) + 1))
