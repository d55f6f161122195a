"""Pictures of traces that a test made by hand: block maps, kernel accesses, message timelines."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner

from mooncake_lite.cli import cli
from mooncake_lite.errors import LabError
from mooncake_lite.labs.judging import Judge, Run, Session, rows_to
from mooncake_lite.labs.notes import Notes, write_notes
from mooncake_lite.labs.show import beside, read_trace_of, with_lines
from tests.mooncake_lite.labs.trees import ROOT, labs

pytestmark = pytest.mark.quick

SVG = "{http://www.w3.org/2000/svg}"

PAGES = {
    "kind": "pages",
    "steps": [["start", "a", 5], ["fork", "a", "<b>"], ["write", "<b>"]],
    "held": [{"a": [7, 8]}, {"a": [7, 8], "<b>": [7, 8]}, {"a": [7, 8], "<b>": [7, 9]}],
}
ACCESSES = {
    "kind": "accesses",
    "array": "scores",
    "unit": "cell",
    "columns": [0, 1],
    "phases": [["w.", ".!"], ["rr", "rr"]],
}
MESSAGES = {
    "kind": "messages",
    "ends": ["gateway", "0 conductor", "1 <prefill>"],
    "messages": [
        {"source": 0, "target": 1, "text": "Submit", "request": "a"},
        {"source": 1, "target": 2, "text": "Prefill", "request": "a"},
        {"source": 2, "target": 0, "text": "Tokens", "request": "a"},
        {"source": 0, "target": 1, "text": "Submit & more", "request": "b"},
    ],
}
TEXTS = {
    "pages": """\
users of each page (row) after each step (column); . is no user
page    7  122
page    8  121
page    9  ..1
step    1  start a 5
step    2  fork a <b>
step    3  write <b>""",
    "accesses": """\
scores: which thread reads (r), writes (w), reads and writes (b), races for (!) which cell
columns: cell 0-1; lines: threads of block (0, 0, 0)
after 0 barriers
  thread       0  w.
  thread       1  .!
after 1 barrier
  thread     0-1  rr""",
    "messages": """\
a column is a process, with its rank if it has one; a line is a message or KV, the first one on top

a
gateway         0 conductor     1 <prefill>
|-------------->|               |  Submit
|               |-------------->|  Prefill
|<------------------------------|  Tokens

b
gateway         0 conductor     1 <prefill>
|-------------->|               |  Submit & more""",
    "table": """\
two pieces
piece  keys
1      9f <a>
22     -""",
}
TABLE = {"kind": "table", "title": "two pieces", "columns": ["piece", "keys"]}
TABLE |= {"rows": [["1", "9f <a>"], ["22", "-"]]}
TRACES: dict[str, dict[str, Any]] = {
    "pages": PAGES,
    "accesses": ACCESSES,
    "messages": MESSAGES,
    "table": TABLE,
}


@pytest.mark.parametrize("kind", TRACES)
def test_a_trace_of_each_kind_is_drawn_as_text(kind: str) -> None:
    assert read_trace_of(TRACES[kind]).as_text() == TEXTS[kind]


def test_a_long_table_ends_with_the_row_that_failed_and_says_what_it_leaves_out() -> None:
    table = TABLE | {"rows": [[str(row), ""] for row in range(90)]}
    drawn = rows_to(30, table)
    assert drawn["rows"] == table["rows"][7:31]
    assert drawn["title"] == "two pieces; rows 8 to 31 of 90, the last one failed"
    assert rows_to(1, table)["rows"] == table["rows"][:2]


def test_a_block_map_has_a_square_for_each_page_and_step() -> None:
    squares = titles(read_trace_of(PAGES).as_svg())
    assert len(squares) == 9
    assert squares[1] == "fork a <b>: 2 users"


def test_an_access_map_names_the_threads_that_race() -> None:
    assert "thread 1 races for cell 1" in titles(read_trace_of(ACCESSES).as_svg())


def test_a_timeline_has_a_line_for_each_process_and_an_arrow_for_each_message() -> None:
    root = ElementTree.fromstring(read_trace_of(MESSAGES).as_svg())
    lines = [{name: int(value) for name, value in line.items() if name[1:] in ("1", "2")} for line in
             root.iter(f"{SVG}line")]  # fmt: skip
    upright = [line["x1"] for line in lines if line["x1"] == line["x2"]]
    across = [(line["x1"], line["x2"]) for line in lines if line["x1"] != line["x2"]]
    ends = [(each["source"], each["target"]) for each in MESSAGES["messages"]]  # type: ignore[index]
    assert len(upright) == 3
    assert across == [(upright[source], upright[target]) for source, target in ends]
    assert titles(read_trace_of(MESSAGES).as_svg())[-1] == "b: Submit & more"


def titles(svg: str) -> list[str | None]:
    return [title.text for title in ElementTree.fromstring(svg).iter(f"{SVG}title")]


@pytest.mark.parametrize("kind", TRACES)
def test_show_draws_what_the_last_failing_test_has_noted(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mooncake_lite.labs.commands.find_root", lambda start: tmp_path)
    (tmp_path / "tutorials").symlink_to(ROOT / "tutorials")
    write_notes(tmp_path, Notes(traces={"2a": TRACES[kind]}))
    shown = CliRunner().invoke(cli, ["labs", "show", "2a"], standalone_mode=False)
    assert shown.output == TEXTS[kind] + "\n"
    CliRunner().invoke(cli, ["labs", "show", "2a", "--svg", str(tmp_path / "x.svg")], standalone_mode=False)
    assert (tmp_path / "x.svg").read_text() == read_trace_of(TRACES[kind]).as_svg()


def test_show_names_the_test_and_says_when_there_is_nothing_to_draw(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mooncake_lite.labs.commands.find_root", lambda start: tmp_path)
    (tmp_path / "tutorials").symlink_to(ROOT / "tutorials")
    said = ["called     f()", "raised     KeyError: 7"]
    write_notes(tmp_path, Notes(traces={"2b": TABLE | {"test": "test_a_key_is_there", "said": said}}))
    below = "\n".join(said)
    assert labs("show", "2b").output == f"2b, test `a key is there`\n{TEXTS['table']}\n\n{below}\n"
    with pytest.raises(LabError, match="nothing to draw for 2c: no test with a picture failed"):
        labs("show", "2c")


@pytest.mark.parametrize(
    ("trace", "says"),
    [
        ({"kind": "song"}, "Invalid value 'song'"),
        ({"kind": "pages", "steps": 3}, r"Expected `array`, got `int`"),
        (PAGES | {"held": []}, "3 steps, and what is held after 0"),
        (ACCESSES | {"phases": [["w"]]}, "a row has 1 characters, and there are 2 columns"),
        (ACCESSES | {"phases": [["xy"]]}, "a row has characters other than .rwb!"),
        (TABLE | {"rows": [["1"]]}, "a row has 1 texts, and there are 2 columns"),
        (MESSAGES | {"ends": ["gateway"]}, "message 1 goes from 0 to 1, and there are 1 processes"),
    ],
)
def test_a_trace_that_cannot_be_drawn_is_an_error_of_one_line(trace: dict[str, Any], says: str) -> None:
    with pytest.raises(LabError, match=says) as raised:
        read_trace_of(trace)
    assert "\n" not in str(raised.value)


def test_a_picture_and_what_was_printed_belong_to_the_answer_that_they_came_with() -> None:
    def answer(call: str, inputs: object, kind: type) -> int:
        child.printed += f"saw {inputs}".encode()
        return 5

    run = Run("", 2, {"public": 1}, "none", "")
    session = Session(run, ROOT)
    child: Any = SimpleNamespace(ask=answer, files={}, stopped="", printed=b"", close=lambda: None)
    session.child = lambda task: child  # type: ignore[method-assign]
    judge = Judge(session, "2b", "test_blocks", "public")
    judge.ask("blocks", 1, int)
    judge.trace(PAGES)
    judge.ask("blocks", 2, int)
    with pytest.raises(pytest.fail.Exception, match="printed    saw 2\n"):
        judge.expect(5, 6, "blocks(2)", "the number of blocks")
    assert session.outcome.traces == {}
    judge.trace(PAGES)
    with pytest.raises(pytest.fail.Exception):
        judge.expect(5, 6, "blocks(2)", "the number of blocks")
    assert "expected   6" in beside(list(session.outcome.traces["2b"]["said"]))


def test_what_came_back_stands_above_what_was_expected_with_a_mark_where_they_differ() -> None:
    said = ["called     f()", "came back  [1, 2, 3]", "expected   [1, 7, 3]", "breaks     order"]
    assert beside(said) == ["", *said[:3], " " * 15 + "^ here they begin to differ", said[3]]
    longer = ["called     f()", "came back  " + "a" * 100, "expected   " + "a" * 101, "breaks     order"]
    assert beside(longer)[4:6] == ["came back  " + "a" * 10, "expected   " + "a" * 11]
    assert beside(longer)[6] == " " * 21 + "^ here they begin to differ"
    raised = ["called     f()", "raised     KeyError: 7"]
    assert beside(raised) == ["", *raised]
    assert beside([]) == []


def test_the_lines_below_a_picture_are_inside_its_frame() -> None:
    for trace in (PAGES, ACCESSES, TABLE):
        svg = with_lines(read_trace_of(trace).as_svg(), ["", "came back  <1>", "expected   " + "x" * 300])
        root = ElementTree.fromstring(svg)
        texts = list(root.iter(f"{SVG}text"))
        assert texts[-4].text == "came back  <1>"
        assert float(texts[-1].get("y", "")) < float(root.get("height", ""))
        assert max(7 * len(text.text or "") for text in texts[-4:]) < float(root.get("width", ""))
    assert with_lines(svg, []) == svg
