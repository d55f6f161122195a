"""Maps of kernel accesses as text and as SVG, from data alone."""

from __future__ import annotations

from xml.etree import ElementTree

import msgspec
import pytest

from mooncake_lite.labs.access_map import COLOURS, AccessMap

pytestmark = pytest.mark.quick

MAP = AccessMap(
    "key_cache",
    "page",
    [2, 3, 4, 9],
    [["r...", "r...", ".r.."], ["....", "....", "...."], ["w!b.", "...w", "...w"]],
)


def test_text_has_a_line_for_neighbours_that_do_the_same() -> None:
    assert MAP.as_text().splitlines() == [
        "key_cache: which thread reads (r), writes (w), reads and writes (b), races for (!) which page",
        "columns: page 2-4, 9; lines: threads of block (0, 0, 0)",
        "after 0 barriers",
        "  thread     0-1  r...",
        "  thread       2  .r..",
        "after 1 barrier",
        "  thread     0-2  ....",
        "after 2 barriers",
        "  thread       0  w!b.",
        "  thread     1-2  ...w",
    ]


def test_an_svg_has_a_square_with_a_note_for_each_access() -> None:
    root = ElementTree.fromstring(MAP.as_svg())
    name = "{http://www.w3.org/2000/svg}"
    squares = {
        title.text: square.get("fill")
        for square in root.iter(f"{name}rect")
        for title in square.iter(f"{name}title")
    }
    assert len(squares) == 8
    assert squares["thread 0 reads page 2"] == COLOURS["r"]
    assert squares["thread 0 races for page 3"] == COLOURS["!"]
    assert squares["thread 2 writes page 9"] == COLOURS["w"]


def test_names_cannot_break_the_svg() -> None:
    ElementTree.fromstring(msgspec.structs.replace(MAP, array='<&">').as_svg())


def test_a_map_is_data_that_comes_back_from_a_child_process() -> None:
    sent = msgspec.json.encode(MAP)
    assert b'"kind":"accesses"' in sent
    assert msgspec.json.decode(sent, type=AccessMap) == MAP


def test_a_map_without_accesses_can_be_drawn() -> None:
    empty = AccessMap("scores", "cell", [], [])
    assert len(empty.as_text().splitlines()) == 2
    ElementTree.fromstring(empty.as_svg())
