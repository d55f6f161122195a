"""Every page that says `$ command` or shows Python is run, and prints what it says it prints."""

from pathlib import Path

import pytest

from tests.tutorials.pages import figures, steps
from tests.tutorials.runner import run_page

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    page
    for page in [ROOT / "README.md", *ROOT.glob("tutorials/*.md"), *ROOT.glob("docs/**/*.md")]
    if steps(page.read_text(encoding="utf-8"))
)


@pytest.fixture(scope="module", autouse=True)
def _pulled() -> None:
    """Pull the default model, as `make demo` does: the first page to need it would show the download."""
    from mooncake_lite.model.resolve import resolve_model

    resolve_model("default")


@pytest.mark.timeout(900)
@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_does_what_it_says(page: Path, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    rewrite = request.config.getoption("--rewrite-tutorials", default=False)

    assert run_page(page, tmp_path / "run", rewrite_outputs=rewrite) >= 1


@pytest.mark.quick
def test_every_tutorial_and_the_readme_have_something_to_run() -> None:
    tutorials = sorted(ROOT.glob("tutorials/*.md"))

    assert tutorials
    assert set(PAGES) >= {*tutorials, ROOT / "README.md"}


@pytest.mark.quick
def test_every_figure_beside_the_tutorials_is_shown_by_one() -> None:
    shown = {
        name for page in ROOT.glob("tutorials/*.md") for name in figures(page.read_text(encoding="utf-8"))
    }

    assert {f"figures/{file.name}" for file in ROOT.glob("tutorials/figures/*")} == shown
