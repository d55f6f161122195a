"""Regions: found by name in whole files and broken ones, taken out, put back, never anything else changed."""

from __future__ import annotations

import ast
import gc
import time
from concurrent.futures import ThreadPoolExecutor

import msgspec
import pytest

from mooncake_lite.errors import LabError
from mooncake_lite.labs import regions
from mooncake_lite.labs.gates import look_at, transplanted
from mooncake_lite.labs.lab import lab_in
from mooncake_lite.labs.tidy import untidy
from tests.mooncake_lite.labs.trees import ROOT

pytestmark = pytest.mark.quick
LAB = lab_in(ROOT, 2)

SOURCE = '''\
class Pool:
    def size(self) -> int:
        """Return it."""
        # labs:begin 2a
        # why
        return 1
        # labs:end 2a

    def other(
        self,
    ) -> None:
        pass
'''


def test_a_region_is_the_body_below_the_docstring_without_marks() -> None:
    assert regions.body(SOURCE, "Pool.size") == "        # why\n        return 1\n"
    assert regions.marked(SOURCE) == {"2a": regions.Span(4, 6, 8)}
    assert regions.body(SOURCE, "Pool.other") == "        pass\n"


def test_a_stub_takes_the_place_of_the_region_and_of_its_marks() -> None:
    stripped = regions.stripped(SOURCE, {"Pool.size": "2a"})
    assert stripped == SOURCE.replace(
        "        # labs:begin 2a\n        # why\n        return 1\n        # labs:end 2a\n",
        '        raise NotImplementedError("lab task 2a")\n',
    )
    assert regions.is_stub(regions.body(stripped, "Pool.size"))


@pytest.mark.parametrize("task", LAB.tasks, ids=lambda task: task.id)
def test_a_region_put_back_gives_the_same_file(task) -> None:
    source = (ROOT / task.file).read_text(encoding="utf-8")
    text = regions.body(source, task.function)
    stripped = regions.stripped(source, {task.function: task.id})
    assert transplanted(LAB, task, stripped, text) == regions.without_marks(source)
    assert len(text.splitlines()) <= regions.MOST_LINES
    assert look_at(LAB, task, source) == ""
    assert "is a stub" in look_at(LAB, task, stripped)


def test_a_region_is_found_in_a_file_that_python_cannot_parse() -> None:
    broken = SOURCE.replace("return 1", "return (1")
    assert regions.body(broken, "Pool.size") == "        # why\n        return (1\n"
    with_comment = broken.replace("        # why", "#   debug")
    assert regions.body(with_comment, "Pool.size") == "#   debug\n        return (1\n"
    with_tabs = broken.replace("        return (1", "\t\treturn (1")
    assert regions.body(with_tabs, "Pool.size").endswith("return (1\n")


def test_a_function_that_was_renamed_is_missed_by_name() -> None:
    with pytest.raises(LabError, match=r"Pool.size is not there; restore its first line"):
        regions.body(SOURCE.replace("def size", "def length"), "Pool.size")
    with pytest.raises(LabError, match=r"Pool.size is not there"):
        regions.body("class Pool:\n  def other(:\n", "Pool.size")


@pytest.mark.parametrize(
    "text", ["", "  pass\n", "    ...\n", '    raise NotImplementedError("lab task 2a")\n', "    # nothing\n"]
)
def test_an_unwritten_region_is_a_stub(text: str) -> None:
    assert regions.is_stub(text)


@pytest.mark.parametrize(
    "marks",
    [
        "# labs:begin 2a\n# labs:begin 2b\n",
        "# labs:end 2a\n",
        "# labs:begin 2a\n",
        "# labs:begin 2a\n# labs:end 2b\n",
    ],
)
def test_marks_that_do_not_pair_are_refused(marks: str) -> None:
    with pytest.raises(LabError):
        regions.marked(marks)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("        return 1\n\n    other = 2\n", "more than the body of one function"),
        (
            "        return 1\n\n    def other(self):\n        return 2\n",
            "more than the body of one function",
        ),
        ("        return (1\n", "Python cannot read"),
        ("        x = 1\n" * 5000, "characters; 20,000 are allowed"),
        ("(" * 9000, "Python cannot read"),
        ("        return " + "-" * 19000 + "1\n", "Python cannot read the region"),
        ("        return '\0'\n", "null bytes"),
    ],
)
def test_a_text_that_is_no_body_is_not_transplanted(text: str, says: str) -> None:
    task = LAB.task("2a")
    clean = regions.stripped((ROOT / task.file).read_text(encoding="utf-8"), LAB.files[task.file])
    with pytest.raises(LabError, match=says):
        transplanted(LAB, task, clean, text)


@pytest.mark.parametrize("deep", ["return " + "a+" * 9000 + "a", "raise a" + ".a" * 9000])
def test_a_body_is_refused_as_too_deep_where_python_itself_cannot_read_it(deep: str) -> None:
    """3.11 cannot, 3.13 can."""
    task = LAB.task("2a")
    clean = regions.stripped((ROOT / task.file).read_text(encoding="utf-8"), LAB.files[task.file])
    try:
        ast.parse(f"def f():\n    {deep}")
    except (RecursionError, MemoryError):
        with pytest.raises(LabError, match="Python cannot read the region"):
            transplanted(LAB, task, clean, f"        {deep}\n")
    else:
        assert deep in transplanted(LAB, task, clean, f"        {deep}\n")


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("import os", "imports"),
        ("open('x')", "uses the name open"),
        ("self.take.__globals__", "private attribute __globals__; no name that begins with _"),
        ("held.gi_frame", "uses gi_frame, an attribute of Python's own frames and code"),
        ("[held.tb_frame.f_back]", "uses f_back, an attribute of Python's own frames"),
        ("global take", "outer name take"),
        ("[os for os in held]; eval('1')", "uses the name eval"),
        ("[open for open in held]; open('x')", "uses the name open"),
        ("held = (lambda eval: 0), eval", "uses the name eval"),
        ("class Own: get = open; open = 1", "uses the name open"),
        ("__builtins__", "uses the name __builtins__"),
        ("__builtins__ = new; held = __builtins__", "uses the name __builtins__"),
        ("held.__builtins__", "private attribute __builtins__"),
        ("held.f_builtins", "uses f_builtins, an attribute of Python's own frames"),
        ("match held:\n            case int(gi_frame=new): pass", "uses gi_frame"),
        ("'{0.gi_frame.f_locals}'.format(held)", "uses format, which can read private attributes"),
        ("('{' + '0.gi_frame}').format(held)", "uses format, which can read private attributes"),
        ("'{0[0].x}'.format_map(held)", "uses format_map"),
        ("held.\uff47i_frame", "uses gi_frame"),
        ("dict.get(self.used, 1)", "uses get of a type; call it as a method of the object"),
        ("int.bit_count(1)", "uses bit_count of a type"),
        ("self.free._asked = 0", "private attribute _asked"),
        ("kind = dict", "gives a type another name, kind = dict"),
        ("held = [kind := int]", "gives a type another name"),
        ("held.testing.measure('1')", "uses testing, a part of NumPy that can run any code"),
    ],
)
def test_a_region_uses_only_names_that_are_listed(line: str, says: str) -> None:
    task = LAB.task("2a")
    source = (ROOT / task.file).read_text(encoding="utf-8")
    wrong = regions.replace(source, task.function, f"        {line}\n        return None\n")
    assert says in look_at(LAB, task, wrong)
    assert look_at(LAB, task, wrong).startswith(f"line {2 if 'match' in line else 1} of the region")
    anything = msgspec.structs.replace(task, private=["__builtins__"])
    assert "__builtins__" not in says or says in look_at(LAB, anything, wrong)


def test_a_region_may_use_its_own_names_in_every_scope() -> None:
    task = LAB.task("2a")
    source = (ROOT / task.file).read_text(encoding="utf-8")
    text = """\
        try:
            order = sorted(held, key=lambda page: (page, len(held)))
        except ValueError as error:
            print(error, dict.fromkeys(held))
        def inner(number, *rest, **more):
            return [other for other in order if (twice := 2 * other) > number], rest, more, twice
        class Own:
            def size(self):
                return len(order)
        match new:
            case [first, *others]:
                return inner(first), others, Own
            case {"a": one, **left}:
                return one, left
    """
    assert look_at(LAB, task, regions.replace(source, task.function, text)) == ""


@pytest.mark.parametrize("lines", [regions.MOST_LINES, regions.MOST_LINES + 1])
def test_lines_of_the_body_are_counted_and_those_of_the_docstring_are_not(lines: int) -> None:
    task = LAB.task("2a")
    source = (ROOT / task.file).read_text(encoding="utf-8")
    long = regions.replace(source, task.function, "        held += new\n" * (lines - 1) + "        return\n")
    said = [f"the region has {lines} lines, and 40 are enough"]
    assert untidy(long, task.function) == (said if lines > regions.MOST_LINES else [])


def test_regions_of_several_submissions_can_be_read_at_once() -> None:
    def let_others_run(*_: object) -> None:
        time.sleep(0)

    source = (ROOT / LAB.tasks[0].file).read_text(encoding="utf-8")
    gc.callbacks.append(let_others_run)  # as Hypothesis has one
    try:
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(lambda _: regions.find(source, LAB.tasks[0].function), range(40)))
    finally:
        gc.callbacks.remove(let_others_run)
