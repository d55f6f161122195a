"""Links and names of pages: every file and heading that a page or a module points at is there."""

import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.quick

ROOT = Path(__file__).parents[1]
PACKAGES = ("mooncake_lite", "kernels_numba", "transport", "store", "scheduler")
TOPS = ("*", "docs/*", "docs/[!t]*/**/*", "tutorials/**/*")
PAGES = [page for top in TOPS for page in sorted(ROOT.glob(f"{top}.md"))]

OUTSIDE_THE_PAPER = {
    "config",
    "gpu",
    "intrinsics",
    "labs",
    "launch",
    "matmul",
    "messaging",
    "planner",
    "report",
    "tracing",
}
"""Folders for which the paper has no idea that the map could name."""

_LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
_CODE = re.compile(r"^```.*?^```$|`[^`\n]*`", re.MULTILINE | re.DOTALL)
_HEADING = re.compile(r"^#{1,6} +(.*?) *$", re.MULTILINE)


def links(page: Path) -> list[str]:
    """Targets of the links of a page, those within code and those to other sites left out."""
    text = _CODE.sub("", page.read_text(encoding="utf-8"))
    return [link for link in _LINK.findall(text) if not re.match(r"[a-z]+:", link)]


def anchors(page: Path) -> set[str]:
    """What a page's headings can be linked as: lower case, blanks to hyphens, punctuation dropped."""
    headings = _HEADING.findall(
        re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    )
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def problem(page: Path, link: str) -> str | None:
    """What is wrong with a link, or None."""
    path, _, anchor = link.partition("#")
    target = (page.parent / path).resolve() if path else page
    if not target.exists():
        return f"{page.relative_to(ROOT)}: {link} is not there"
    if ROOT not in target.parents:
        return f"{page.relative_to(ROOT)}: {link} leads out of the repository"
    if anchor and anchor not in anchors(target):
        return f"{page.relative_to(ROOT)}: {link} has no such heading"
    return None


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_relative_link_resolves(page: Path) -> None:
    assert [problem(page, link) for link in links(page) if problem(page, link)] == []


def test_a_lab_and_its_tutorial_link_each_other() -> None:
    tutorials = {page.resolve() for page in (ROOT / "tutorials").glob("*.md")}
    sheets = {page.resolve() for page in (ROOT / "tutorials" / "labs").glob("*/lab.md")}
    pairs = {
        (page, target)
        for page in tutorials | sheets
        for link in links(page)
        if (target := (page.parent / link.partition("#")[0]).resolve())
        in (sheets if page in tutorials else tutorials)
    }

    assert len(pairs) >= 2 * 6
    assert {(target, page) for page, target in pairs} - pairs == set()


def test_a_broken_link_would_be_found() -> None:
    assert problem(ROOT / "README.md", "docs/nothing.md") == "README.md: docs/nothing.md is not there"
    assert "no such heading" in (problem(ROOT / "README.md", "docs/explain/lifecycle.md#nothing") or "")
    assert "leads out" in (problem(ROOT / "README.md", "../..") or "")


def test_pages_have_links_at_all() -> None:
    assert sum(len(links(page)) for page in PAGES) > 50


def test_every_page_that_a_module_names_is_there() -> None:
    missing = [
        f"{file.relative_to(ROOT)} names {name}"
        for package in PACKAGES
        for file in sorted((ROOT / package).glob("**/*.py"))
        for name in re.findall(r"\bdocs/[\w/.-]+?\.md\b", file.read_text(encoding="utf-8"))
        if not (ROOT / name).exists()
    ]

    assert missing == []


def test_no_page_is_shown_through_a_symlink_where_its_own_links_would_break() -> None:
    tops = (*PACKAGES, "docs", "tests", "tutorials")
    pages = [*ROOT.glob("*.md"), *(page for top in tops for page in (ROOT / top).rglob("*.md"))]

    assert len(pages) > 50
    assert [page for page in pages if page.resolve().parent != page.parent.resolve()] == []


def test_the_map_leads_from_each_idea_of_the_paper_to_files_tests_pages_and_labs() -> None:
    part = (ROOT / "docs/explain/paper.md").read_text(encoding="utf-8").partition("## Section by section")[2]
    lines = part.partition("\n## ")[0].splitlines()
    rows = [line.strip("|").split("|") for line in lines if line.startswith("| ")][1:]
    links = ([link for row in rows for link in _LINK.findall(row[column])] for column in (2, 3, 4, 5))
    files, tests, pages, labs = (
        [(ROOT / "docs/explain" / link.partition("#")[0]).resolve() for link in column] for column in links
    )
    folders = {f.parent for top in PACKAGES for to in ("", "*/") for f in ROOT.glob(f"{top}/{to}__init__.py")}
    missing = folders - {above for path in files for above in path.parents}

    assert [path for path in (*files, *tests, *pages, *labs) if not path.exists()] == []
    assert [path for path in tests if "def test_" not in path.read_text(encoding="utf-8")] == []
    assert set(labs) == {*ROOT.glob("tutorials/labs/*/lab.md")}
    assert {folder.name for folder in missing} == OUTSIDE_THE_PAPER
