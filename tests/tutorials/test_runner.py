"""The runner itself, on small pages: what it runs, what it refuses, and that nothing stays behind."""

import os
import time
from pathlib import Path

import pytest

from tests.patience import wait_until
from tests.tutorials.processes import Session
from tests.tutorials.runner import PageError, environment, run_page


def write(tmp_path: Path, *lines: str) -> Path:
    page = tmp_path / "page.md"
    page.write_text("\n".join(lines) + "\n")
    return page


def run(tmp_path: Path, *lines: str, limit_s: float = 20.0, rewrite: bool = False) -> int:
    page = write(tmp_path, *lines)
    return run_page(page, tmp_path / "run", limit_s=limit_s, rewrite_outputs=rewrite)


def test_python_blocks_share_a_namespace(tmp_path: Path) -> None:
    count = run(
        tmp_path,
        *("```python", "x = 20", "```"),
        *("```python", "print(x + 1)", "```", "```text", "21", "```"),
    )

    assert count == 2


def test_a_traceback_names_the_page_and_the_real_line(tmp_path: Path) -> None:
    with pytest.raises(PageError, match=r'page\.md", line 5, in <module>\s+1 / 0'):
        run(tmp_path, "", "prose", "```python", "x = 1", "1 / 0", "```")


def test_an_output_that_differs_fails_and_names_its_line(tmp_path: Path) -> None:
    with pytest.raises(PageError, match=r"page\.md:3: the page says\n2\nbut what is printed is\n1"):
        run(tmp_path, "```console", "$ echo 1", "2", "```")


def test_an_output_of_python_that_differs_fails(tmp_path: Path) -> None:
    with pytest.raises(PageError, match="but what is printed is\n1"):
        run(tmp_path, "```python", "print(1)", "```", "```text", "2", "```")


def test_commands_share_the_scratch_folder_and_see_a_free_port(tmp_path: Path) -> None:
    run(tmp_path, "```console", "$ echo $PORT > port", "$ test $(cat port) -gt 1023", "```")

    assert (tmp_path / "run" / "work" / "port").exists()


def test_the_folder_of_a_page_holds_only_the_programs_of_the_tutorials(tmp_path: Path) -> None:
    command = "test -f tutorials/nano_mooncake.py"
    assert run(tmp_path, "```console", "$ ls", "tutorials", f"$ {command}", "```") == 2


def test_the_commands_of_this_python_come_first(tmp_path: Path) -> None:
    import sys

    assert environment(1)["PATH"].split(os.pathsep)[0] == str(Path(sys.executable).parent)


def test_a_wrong_exit_code_fails_and_the_stated_one_does_not(tmp_path: Path) -> None:
    with pytest.raises(PageError, match="exit code 3, not 0"):
        run(tmp_path, "```console", "$ exit 3", "```")

    assert run_page(write(tmp_path, "```console", "$ exit 3  # exit 3", "```"), tmp_path / "again") == 1


def test_a_command_that_does_not_end_is_killed_at_its_limit(tmp_path: Path) -> None:
    began = time.monotonic()
    with pytest.raises(PageError, match="not finished within 0 s"):
        run(tmp_path, "```console", "$ sleep 60", "```", limit_s=0.2)

    assert time.monotonic() - began < 20


def test_a_python_block_that_does_not_end_is_killed_at_its_limit(tmp_path: Path) -> None:
    with pytest.raises(PageError, match="not finished within 1 s"):
        run(tmp_path, "```python", "while True: pass", "```", limit_s=1.0)


def test_a_python_block_that_ends_python_is_named(tmp_path: Path) -> None:
    with pytest.raises(PageError, match="Python ended with exit code 7"):
        run(tmp_path, "```python", "import os; os._exit(7)", "```")


def test_a_command_that_leaves_a_process_behind_fails(tmp_path: Path) -> None:
    with pytest.raises(PageError, match="left 1 processes behind"):
        run(tmp_path, "```console", "$ (sleep 60 & echo $! > pid)", "```")

    pid = int((tmp_path / "run" / "work" / "pid").read_text())
    assert not alive(pid)


def test_a_background_job_is_waited_for_until_it_prints_what_the_page_says(tmp_path: Path) -> None:
    job = '$ python -c \'import time; open("up", "w"); print("ready"); time.sleep(60)\' &'

    assert run(tmp_path, "```console", job, "ready", "$ test -e up", "```") == 2


def test_a_background_job_that_ends_too_early_fails(tmp_path: Path) -> None:
    with pytest.raises(PageError, match="ended with exit code 4"):
        run(tmp_path, "```console", "$ exit 4 &", "ready", "```")


def test_kill_stops_a_background_job_and_shows_its_last_words(tmp_path: Path) -> None:
    script = "trap 'echo bye; exit' TERM; echo up; while true; do sleep 0.05; done"
    (tmp_path / "job.sh").write_text(script)

    run(tmp_path, "```console", f"$ bash {tmp_path}/job.sh &", "up", "$ kill %1", "bye", "```")


def test_background_jobs_are_gone_at_the_end_of_the_page(tmp_path: Path) -> None:
    run(tmp_path, "```console", "$ sh -c 'echo $$ > pid; echo up; exec sleep 60' &", "up", "```")

    assert not alive(int((tmp_path / "run" / "work" / "pid").read_text()))


def test_rewriting_puts_the_real_outputs_into_the_page(tmp_path: Path) -> None:
    run(
        tmp_path,
        *("```console", "$ echo 1", "?", "```"),
        *("```python", "print(2)", "```", "```text", "```"),
        rewrite=True,
    )

    text = (tmp_path / "page.md").read_text()
    assert text.split("\n")[:3] == ["```console", "$ echo 1", "1"]
    assert text.endswith("```text\n2\n```\n")


def test_rewriting_keeps_dots_that_match(tmp_path: Path) -> None:
    lines = ("```console", "$ echo took 3 s", "took ... s", "```")
    run(tmp_path, *lines, rewrite=True)

    assert (tmp_path / "page.md").read_text() == "\n".join(lines) + "\n"


DRAWS = ("```python", "print('<svg/>', file=open('a.svg', 'w'), end='')", "```", "![A](figures/a.svg)")


def test_rewriting_puts_the_figures_that_the_code_draws_beside_the_page(tmp_path: Path) -> None:
    run(tmp_path, *DRAWS, rewrite=True)

    assert (tmp_path / "figures" / "a.svg").read_text() == "<svg/>"
    assert run_page(tmp_path / "page.md", tmp_path / "again") == 1


def test_a_figure_that_does_not_lie_beside_the_page_fails(tmp_path: Path) -> None:
    with pytest.raises(PageError, match=r"page\.md:4: figures/a\.svg is not there"):
        run(tmp_path, *DRAWS)


@pytest.mark.parametrize("rewrite", [False, True])
def test_a_figure_that_no_block_draws_fails_and_stays_as_it_is(tmp_path: Path, rewrite: bool) -> None:
    (tmp_path / "figures").mkdir()
    (tmp_path / "figures" / "a.svg").write_text("old")

    with pytest.raises(PageError, match=r"page\.md:4: .* no block has written a\.svg"):
        run(tmp_path, "```python", "1", "```", "![A](figures/a.svg)", rewrite=rewrite)
    assert (tmp_path / "figures" / "a.svg").read_text() == "old"


def test_an_image_from_elsewhere_or_within_code_is_shown_only(tmp_path: Path) -> None:
    run(tmp_path, "![B](../docs/b.svg)", "```text", "![A](figures/a.svg)", "```")


def test_a_session_is_stopped_with_all_its_process_groups(tmp_path: Path) -> None:
    command = 'python -c "import os, time; os.setpgid(0, 0); print(1, flush=True); time.sleep(60)" & wait'
    session = Session(command, tmp_path, environment(1), tmp_path / "out")
    assert wait_until(session.output)
    assert len(session.members()) == 2
    assert not session.stop(limit_s=0.5)  # bash ends, its child in another group does not
    assert session.members() == []


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"
