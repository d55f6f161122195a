"""The commands of `mooncake-lite labs` for students.

Each finds the tree in which one works, and leaves the rest to the module that it names. What only an
instructor needs is in instructor_commands.py. Explained in docs/explain/labs.md.
"""

from __future__ import annotations

import time
from pathlib import Path

import click

from mooncake_lite.errors import LabError
from mooncake_lite.labs.instructor_commands import dev, grade, pack, release
from mooncake_lite.labs.lab import Lab, LabTask, find_root, lab_here, lab_in, labs_in

WATCH_S = 0.3

LAB = click.argument("number", type=int, metavar="LAB")


class LabsGroup(click.Group):
    """Commands in the order in which one meets them."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Name the commands."""
        return list(self.commands)


@click.group(cls=LabsGroup)
def labs() -> None:
    """Do the labs of a course, hand them in, and grade them."""


@labs.command("list")
def list_labs() -> None:
    """List the labs, their hours, and the points of your last check."""
    root = find_root(Path.cwd())
    for number, lab in labs_in(root).items():
        click.echo(f"{number:>2}  {lab.title:<28}  {lab.hours:>5} hours  {_score(root, lab)}")


@labs.command()
@LAB
def start(number: int) -> None:
    """Begin a lab.

    In the full repository this makes a branch with stubs in place of the lab's solutions. In a release, which
    has stubs already, it prints the sheet.
    """
    from mooncake_lite.labs.starting import start as begin

    click.echo(begin(*lab_here(number)))


@labs.command()
@LAB
@click.argument("task", required=False)
@click.option("--watch", is_flag=True, help="Check again whenever a file of the lab is saved, until Ctrl-C.")
@click.option("--gpu", is_flag=True, help="Run CUDA kernels on a GPU too, if there is one.")
def check(number: int, task: str | None, watch: bool, gpu: bool) -> int:
    """Test your code with the public tests, all tasks or one, or compare your answers in a lab of questions.

    CUDA kernels run in Numba's simulator under the race checker, and must lower to PTX. Exit code 0 means
    that these tasks pass every public test and every gate, or that every answer is right. Costs are shown
    once prediction.toml has your prediction of them.
    """
    root, lab = lab_here(number)
    tasks = [lab.task(task)] if task else lab.tasks
    if not watch:
        return _check_once(root, lab, tasks, gpu)
    files = [root / file for file in lab.files]
    files += [root / lab.folder / name for name in ("prediction.toml", lab.answers_file)]
    while True:
        before = _saved(files)
        _check_once(root, lab, tasks, gpu)
        click.echo("watching; Ctrl-C ends it")
        while _saved(files) == before:
            time.sleep(WATCH_S)


@labs.command()
@click.argument("task")
def hint(task: str) -> None:
    """Show the next of the three hints of a task."""
    from mooncake_lite.labs.notes import read_notes, write_notes

    root, found = _task(task)
    notes = read_notes(root)
    given = min(notes.hints.get(task, 0) + 1, len(found.hints))
    notes.hints[task] = given
    write_notes(root, notes)
    click.echo(f"{task}, hint {given} of {len(found.hints)}: {found.hints[given - 1]}")


@labs.command()
@click.argument("task")
@click.option("--svg", type=click.Path(path_type=Path), help="Write the picture to this file, as SVG.")
def show(task: str, svg: Path | None) -> None:
    """Draw the first failing test of the last check of TASK, or the messages of the requests of lab 0.

    The picture shows which sequences used which pages, which keys or blocks came back, which item was
    evicted, which threads accessed which cells, or which process sent which message.
    """
    from mooncake_lite.labs.notes import read_notes
    from mooncake_lite.labs.questions import picture
    from mooncake_lite.labs.show import Drawn, beside, read_trace_of, with_lines

    drawn: Drawn
    said: list[str] = []
    if task.isdecimal():
        root, lab = lab_here(int(task))
        if not lab.questions:
            raise LabError(f"lab {task} has tasks; name one: mooncake-lite labs show {lab.ids[0]}")
        drawn = picture(root, lab)
    else:
        root, _ = _task(task)
        trace = read_notes(root).traces.get(task)
        if trace is None:
            raise LabError(
                f"nothing to draw for {task}: no test with a picture failed in its last check; "
                f"mooncake-lite labs check {task[:-1]} {task} makes a new one"
            )
        drawn = read_trace_of(trace)
        if "test" in trace:
            sentence = trace["test"].removeprefix("test_").replace("_", " ")
            click.echo(f"{task}, test `{sentence}`", err=svg is not None)
        said = beside(trace.get("said", []))
    if svg is None:
        click.echo("\n".join([drawn.as_text(), *said]))
        return
    try:
        svg.write_text(with_lines(drawn.as_svg(), said), encoding="utf-8")
    except OSError as error:
        raise LabError(f"--svg {svg} cannot be written: {error.strerror}") from None


@labs.command("run")
@LAB
@click.option(
    "--model",
    default="",
    help="Name or folder of a model; -: play only what no model computes. [default: that of serve]",
)
@click.option(
    "--plot",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Draw seconds and what was reused, both sides, into this SVG file.",
)
def run_lab(number: int, model: str, plot: Path | None) -> int:
    """Run your finished lab in the server, beside the reference.

    Shows whether tokens and counts are equal, what was reused, and how long each part took. Exit code 1 means
    that some differ. A release has the reference's numbers in place of its code: those that do not depend on
    the machine.
    """
    from mooncake_lite.labs.playing import play

    root, lab = lab_here(number)
    return 0 if play(root, lab, model, click.echo, plot) else 1


@labs.command()
@LAB
def score(number: int) -> None:
    """Show the points of your last check of the whole lab, and what each task has open."""
    from mooncake_lite.labs.checking import open_parts

    root, lab = lab_here(number)
    click.echo("\n".join([_score(root, lab), *open_parts(root, lab)]))


for handed_over in (pack, release, grade, dev):
    labs.add_command(handed_over)


def _score(root: Path, lab: Lab) -> str:
    from mooncake_lite.labs.checking import score_in_words
    from mooncake_lite.labs.questions import answers_in_words

    return answers_in_words(root, lab) if lab.questions else score_in_words(root, lab)


def _check_once(root: Path, lab: Lab, tasks: list[LabTask], gpu: bool) -> int:
    from mooncake_lite.labs.checking import check as run
    from mooncake_lite.labs.questions import check_answers

    click.echo(f"checking lab {lab.number}, {' '.join(task.id for task in tasks) or 'answers'}")
    try:
        if lab.questions:
            return 0 if check_answers(root, lab, tasks, click.echo) else 1
        return 0 if run(root, lab, tasks, click.echo, gpu=gpu) else 1
    except LabError as error:
        click.echo(str(error))
        return 1


def _task(task: str) -> tuple[Path, LabTask]:
    """Find a task such as 2a. Raises LabError if there is none."""
    root = find_root(Path.cwd())
    if not task[:-1].isdecimal():
        raise LabError(f"{task!r} is no task; tasks are called 2a, 2b and so on")
    return root, lab_in(root, int(task[:-1])).task(task)


def _saved(files: list[Path]) -> list[int]:
    """When each file was saved last, in ns; 0 for one that is being replaced."""
    return [path.stat().st_mtime_ns if path.exists() else 0 for path in files]
