"""The pages that scripts write: the README's demo output and docs/reference/cli.md."""

import importlib.util
import json
import re
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import pytest

from mooncake_lite.tracing.lanes import Spans
from mooncake_lite.tracing.merge import merge
from mooncake_lite.tracing.tracer import PartFile, Tracer

pytestmark = pytest.mark.quick

ROOT = Path(__file__).parents[1]
LIFECYCLE = ROOT / "docs/explain/lifecycle.md"
OUTPUT = (
    "The model: x\nStopping it: 2 s\n(e) again\nStopping it: 1 s\n\n table  \n\n row\ntokens identical: yes\n"
)


def script(name: str) -> ModuleType:
    """A script of docs/tools/, which is no package."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs/tools" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_readme_shows_what_was_measured() -> None:
    readme = script("fill_readme")

    assert readme.README.read_text(encoding="utf-8") == readme.page(), "run docs/tools/fill_readme.py"


def test_the_demo_of_the_readme_is_whole_and_its_tokens_are_identical() -> None:
    readme = script("fill_readme")
    demo = readme.result("demo")

    assert demo["output"].endswith("tokens identical: yes")
    assert all(f"{row['tpot_s'] * 1e3:.1f}" in demo["output"] for row in demo["rows"])


def test_the_end_of_a_demo_is_its_table_and_what_follows() -> None:
    assert script("fill_readme").shown(OUTPUT) == " table\n\n row\ntokens identical: yes"


@pytest.mark.parametrize("output", ["", "tokens identical: yes", "Stopping it: 1 s\ntable", OUTPUT + "more"])
def test_half_a_demo_is_not_shown(output: str) -> None:
    with pytest.raises(ValueError, match="no line begins with 'Stopping it'"):
        script("fill_readme").shown(output)


def test_a_readme_without_marks_is_refused() -> None:
    with pytest.raises(ValueError, match="has no <!-- figures -->"):
        script("fill_readme").filled("a\n", "figures", "b")


def test_a_figure_that_was_not_measured_is_refused() -> None:
    with pytest.raises(LookupError, match=r"store.json has no row 'get 1 EiB'"):
        script("fill_readme").values("store", "get 1 EiB", "")


def test_the_first_screen_of_the_readme_has_its_commands() -> None:
    lines = (ROOT / "README.md").read_text(encoding="utf-8").split("\n")

    assert "make demo" in "\n".join(lines[:15])
    assert "make test" in "\n".join(lines[:60])


def test_the_page_of_benchmarks_shows_what_was_measured() -> None:
    benchmarks = script("make_benchmarks")
    page = benchmarks.page()

    assert benchmarks.PAGE.read_text(encoding="utf-8") == page, "run docs/tools/make_benchmarks.py"
    simulator = benchmarks.SIMULATOR.read_text(encoding="utf-8")
    assert simulator == benchmarks.simulator_page(), "run docs/tools/make_benchmarks.py"
    assert all(f"`mooncake-lite bench {part}` on 2" in page for part in ("kernels", "transport", "store"))


def test_the_page_of_hints_shows_what_was_measured() -> None:
    hints = script("measure_hints")

    assert hints.PAGE.read_text(encoding="utf-8") == hints.page(), "run docs/tools/measure_hints.py"


def test_the_reference_of_the_command_line_says_what_the_commands_say() -> None:
    reference = script("make_reference")

    assert reference.PAGE.read_text(encoding="utf-8") == reference.page(), "run docs/tools/make_reference.py"


def test_the_page_of_equality_is_the_one_that_its_script_writes() -> None:
    equality = script("make_equality")

    assert equality.PAGE.read_text(encoding="utf-8") == equality.page(), "run docs/tools/make_equality.py"


def test_the_figure_of_a_request_is_the_one_that_its_script_draws_and_its_messages_are_on_the_page() -> None:
    figure = script("draw_lifecycle")
    names = re.findall(r"\b(?:[A-Z][a-z]+)+\b", figure.draw())

    assert figure.PICTURE.read_text(encoding="utf-8") == figure.draw(), "run docs/tools/draw_lifecycle.py"
    assert len(names) > 5
    assert {f"`{name}`" for name in names} <= {*re.findall("`.*?`", LIFECYCLE.read_text(encoding="utf-8"))}


def test_a_trace_is_drawn_from_the_arrival_of_its_last_request_to_its_end(tmp_path: Path) -> None:
    clock = iter(range(10**9, 10**12, 10**6))
    tracer = Tracer(4, "gateway-0", PartFile(tmp_path / "run.json", 4), clock=lambda: next(clock))
    lane = tracer.lane("steps")
    tracer.slice(lane, "decode", 5, 7, {})
    for request in ("cmpl-1", "cmpl-2"):
        spans = Spans(tracer, "requests")
        spans.open(request, request)
        spans.stage(request, "answer")
        tracer.slice(lane, "wait <&>", tracer.now_ns(), tracer.now_ns())
        spans.close(request, {"answer tokens": 3})
    tracer.close()
    merge(tmp_path / "run.json")
    picture = script("draw_trace").draw(json.loads((tmp_path / "run.json").read_text())["traceEvents"])
    root = ElementTree.fromstring(picture)
    texts = [text.text for text in root.iter("{http://www.w3.org/2000/svg}text")]
    assert [text for text in texts if text in ("gateway-0", "requests", "answer", "wait <&>", "decode")] == [
        *("gateway-0", "requests", "wait <&>", "answer"),
    ]


def test_the_page_about_the_paper_shows_what_was_played() -> None:
    paper = script("make_paper")

    assert paper.PAGE.read_text(encoding="utf-8") == paper.page(), "run make paper"
    assert {file.stem for file in paper.RUNS.glob("*.toml")} == {
        file.stem for file in paper.RESULTS.glob("*.json") if file.stem != "alone"
    }


def test_without_the_trace_nothing_is_played(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paper = script("make_paper")

    for folder in ("", str(tmp_path)):
        assert paper.main(folder) == 2
        assert "name its folder in MOONCAKE_LITE_TRACES" in capsys.readouterr().err
