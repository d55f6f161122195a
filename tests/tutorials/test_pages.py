"""How a page is read: fences, steps, expected outputs."""

import pytest

from tests.tutorials.pages import PageSyntaxError, matches, rewrite, steps

pytestmark = pytest.mark.quick


def page(*lines: str) -> str:
    return "\n".join(lines)


def test_a_python_block_is_a_step_that_begins_at_its_own_line() -> None:
    [step] = steps(page("# Title", "", "```python", "x = 1", "print(x)", "```"))

    assert (step.kind, step.source, step.line, step.expected) == ("python", "x = 1\nprint(x)", 4, None)


def test_a_text_block_is_what_the_block_before_it_prints() -> None:
    [step] = steps(page("```python", "print(1)", "```", "prose", "```text", "1", "```"))

    assert step.expected == (5, 6)


def test_a_text_block_after_a_drawing_belongs_to_nobody() -> None:
    [step] = steps(page("```python", "x = 1", "```", "```", "a drawing", "```", "```text", "1", "```"))

    assert step.expected is None


def test_each_command_of_a_console_block_is_followed_by_what_it_prints() -> None:
    first, second = steps(page("```console", "$ echo a", "a", "$ echo b", "b", "b", "```"))

    assert (first.source, first.line, first.expected) == ("echo a", 2, (2, 3))
    assert (second.source, second.line, second.expected) == ("echo b", 4, (4, 6))


def test_a_command_goes_on_after_a_backslash() -> None:
    [step] = steps(page("```console", "$ echo a \\", ">   b", "a b", "```"))

    assert (step.source, step.expected) == ("echo a b", (3, 4))


def test_a_command_says_its_exit_code_in_a_comment() -> None:
    [step] = steps(page("```console", "$ false  # exit 1", "```"))

    assert (step.source, step.exit_code) == ("false", 1)


def test_an_ampersand_makes_a_background_job() -> None:
    [step] = steps(page("```console", "$ sleep 5 &", "```"))

    assert (step.kind, step.source) == ("background", "sleep 5")


def test_a_block_of_another_kind_is_not_run() -> None:
    assert steps(page("```sh", "$ rm -rf everything", "```", "```", "$ no", "```")) == []


def test_a_fence_that_is_never_closed_is_an_error_with_its_line() -> None:
    with pytest.raises(PageSyntaxError, match="line 2"):
        steps(page("", "```python", "x = 1"))


def test_a_console_block_without_a_command_is_an_error() -> None:
    with pytest.raises(PageSyntaxError, match="line 2"):
        steps(page("```console", "echo a", "```"))


@pytest.mark.parametrize(
    ("expected", "output", "same"),
    [
        ("a\nb", "a\nb\n", True),
        ("a ", "a", True),
        ("a", "a\nb", False),
        ("took ... s", "took 1.25 s", True),
        ("first\n...\nlast", "first\n1\n2\nlast", True),
        ("first\n...\nlast", "first\nlast", False),
        ("1+1 (x)", "1+1 (x)", True),
        ("1+1", "111", False),
        ("?", "anything", False),
        ("a", "compiling kernels for this machine; ...\ncompiled 9 groups of kernels in 3 s\na\n", True),
    ],
)
def test_dots_stand_for_anything_and_the_rest_for_itself(expected: str, output: str, same: bool) -> None:
    assert matches(expected, output) is same


def test_a_background_job_need_only_begin_as_expected() -> None:
    assert matches("...ready", "starting\nready\nmore", beginning=True)
    assert not matches("...ready", "starting\n", beginning=True)


def test_rewriting_replaces_outputs_and_nothing_else() -> None:
    text = page("```console", "$ a", "old", "$ b", "old", "old", "```", "end")

    assert rewrite(text, {(2, 3): "1\n2\n", (4, 6): ""}) == page(
        "```console", "$ a", "1", "2", "$ b", "```", "end"
    )
