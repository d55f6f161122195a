"""Links and names of pages: every file and heading that a page or a module points at is there."""

import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.quick

ROOT = Path(__file__).parents[1]
PACKAGES = ("mooncake_lite", "kernels_numba", "transport", "store", "scheduler")
PAGES = [page for top in ("*", "docs/**/*", "tutorials/**/*") for page in sorted(ROOT.glob(f"{top}.md"))]

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


NO_IDEA_OF_THE_PAPER = {f"mooncake_lite/{folder}" for folder in ("config", "labs", "launch", "tracing")}


def paths(cell: str) -> list[str]:
    """The paths that a cell of the map in docs/explain/paper.md links to, from the root."""
    targets = (ROOT / "docs/explain" / link.partition("#")[0] for link in _LINK.findall(cell))
    return [str(target.resolve().relative_to(ROOT)) for target in targets]


def test_the_map_leads_from_each_idea_of_the_paper_to_files_tests_pages_and_labs() -> None:
    page = (ROOT / "docs/explain/paper.md").read_text(encoding="utf-8")
    part = page.partition("## Section by section")[2].partition("\n## ")[0]
    rows = [line.strip("|").split("|") for line in part.splitlines() if line.startswith("| ")][1:]
    files, tests, pages, labs = ([path for row in rows for path in paths(row[n])] for n in (2, 3, 4, 5))

    assert [row for row in rows if len(row) != 6 or not all(cell.strip() for cell in row)] == []
    assert [path for path in (*files, *tests, *pages, *labs) if not (ROOT / path).exists()] == []
    assert [path for path in tests if "def test_" not in (ROOT / path).read_text(encoding="utf-8")] == []
    assert set(labs) == {str(lab.relative_to(ROOT)) for lab in ROOT.glob("tutorials/labs/*/lab.md")}
    folders = {
        str(init.parent.relative_to(ROOT)) for top in PACKAGES for init in ROOT.glob(f"{top}/*/__init__.py")
    }
    wanted = (folders | {*PACKAGES}) - NO_IDEA_OF_THE_PAPER
    assert {folder for folder in wanted if not any(path.startswith(f"{folder}/") for path in files)} == set()
