"""What docs/explain/what-tests-prove.md says: its claims stand in their pages, and its tests exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.counting import LIMITS
from tests.mistakes.test_mistakes import PATCHES, read

pytestmark = pytest.mark.quick

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/explain/what-tests-prove.md"
TEXT = PAGE.read_text(encoding="utf-8")


def plain(text: str) -> str:
    """The words of a page: links by their text, in one line."""
    return " ".join(re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text).split())


def claims() -> list[tuple[Path, str, list[str]]]:
    """(page, claim, tests) of each row of the tables of claims."""
    found = []
    for target, section in re.findall(r"^### \[[^\n]*\]\((\S*)\)\n(.*?)(?=^##|\Z)", TEXT, flags=re.M | re.S):
        for claim, tests in re.findall(r"^\| (.+?) \| [a-z, ]+ \| (`.+`) \|$", section, flags=re.M):
            found.append(((PAGE.parent / target).resolve(), claim, re.findall(r"`([^`]+)`", tests)))
    return found


def test_every_claim_stands_in_its_page_and_every_test_of_it_exists() -> None:
    assert len(claims()) == TEXT.count(".py::test_") - sum(len(tests) - 1 for _, _, tests in claims())
    assert [claim for page, claim, _ in claims() if plain(claim) not in plain(page.read_text())] == []
    for _, _, tests in claims():
        for test in tests:
            file, _, name = test.partition("::")
            assert f"def {name}(" in (ROOT / file).read_text(), f"{test} is not there"


def test_five_pages_have_claims_in_the_tables() -> None:
    pages = {"README.md", "failures.md", "several-ranks.md", "equality.md", "speculation.md"}
    assert {page.name for page, _, _ in claims()} == pages
    assert len(claims()) > 30


def test_the_page_counts_the_mistakes_and_the_limits_of_one_run() -> None:
    drawn = sum(read(patch).mended != "none" for patch in PATCHES)
    assert f"{len(PATCHES) - drawn} were planted by hand, {drawn} are drawn from the history" in plain(TEXT)
    assert [row for row in map("| {0[0]} | {0[1]} |".format, LIMITS.items()) if row not in TEXT] == []
