"""The commands of `mooncake-lite labs` that hand work over: pack for students, grade for teachers.

Imported by commands.py when one of them is used. Explained in docs/how-to/teach-a-course.md.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import click

from mooncake_lite.errors import LabError, printable
from mooncake_lite.labs.lab import Lab, find_root, lab_here, lab_in, labs_in

SEED = "MOONCAKE_LITE_LABS_SEED"
"""Variable with the seed of a class: on a command line every user of the machine could read it."""
SHOW_ALL = "show every part at once, for people who learn alone. [default: the public tests]"
FOLDER = click.Path(exists=True, file_okay=False, path_type=Path)


@click.command()
@click.argument("number", type=int, metavar="LAB")
@click.option("--out", type=click.Path(path_type=Path), help="The archive. [default: lab-LAB.zip]")
def pack(number: int, out: Path | None) -> None:
    """Write the archive that you hand in: the text of your regions, prediction, report and figures."""
    from mooncake_lite.labs.submission import pack as write

    root, lab = lab_here(number)
    lab.must_be_graded()
    path = out or Path(f"lab-{number}.zip")
    for line in write(root, lab, path):
        click.echo(line)
    click.echo(f"wrote {path}")


@click.command()
@click.argument("submissions", type=FOLDER)
@click.option("--lab", "number", type=int, required=True, help="Number of the lab.")
@click.option(
    "--seed",
    required=True,
    envvar=SEED,
    help=f"Seed of the class, as it was given to `labs release`. Also {SEED}.",
)
@click.option(
    "-j", "--jobs", type=click.IntRange(min=1), default=1, show_default=True, help="Submissions at a time."
)
@click.option(
    "--out",
    type=click.Path(dir_okay=False, path_type=Path),
    default=Path("grades.csv"),
    show_default=True,
    help="The table. A folder of its name gets a page and a Gradescope result for each student.",
)
@click.option("--trusted", is_flag=True, help="Grade without a sandbox: only for code that you have read.")
@click.option("--show-all", is_flag=True, help=f"In a Gradescope result, {SHOW_ALL}")
def grade(
    submissions: Path, number: int, seed: str, jobs: int, out: Path, trusted: bool, show_all: bool
) -> None:
    """Grade the archives in a folder.

    Works offline. Points that a teacher gives are read from SUBMISSIONS/marks.csv, if it is there. In the
    folder of a release, the code and the tests of that release grade.
    """
    from mooncake_lite.labs.grade_pages import PRIVATE, write_grades
    from mooncake_lite.labs.grading import Grade, class_name_of, grade_folder
    from mooncake_lite.labs.histogram import ENDING, failures

    def told(grade: Grade) -> None:
        notes = f"  {'; '.join(grade.messages)}" if grade.messages else ""
        points = f"{grade.automatic:>3}/{most} automatic, {grade.total:>3} in all"
        click.echo(printable(f"{grade.name:<24} {points}{notes}"))

    root, lab = lab_here(number)
    lab.must_be_graded()
    if not out.parent.is_dir():
        raise LabError(f"--out {out}: there is no folder {out.parent}; make it, or name another file")
    pages = out.with_suffix("")
    if pages == out or (pages.exists() and not pages.is_dir()):
        raise LabError(f"--out {out}: pages go to the folder {pages}; name a file such as grades.csv instead")
    most = sum(task.points.total for task in lab.tasks)
    warn = partial(click.echo, err=True)
    grades = grade_folder(root, lab, submissions, seed, jobs=jobs, trusted=trusted, told=told, warn=warn)
    write_grades(lab, grades, out, show_all=show_all)
    histogram = failures(lab, grades, class_name_of(root, grades))
    out.with_suffix(ENDING).write_text(histogram.as_svg(), encoding="utf-8")
    click.echo(f"\n{histogram.as_text()}\n")
    alone = f"{out.with_suffix(PRIVATE)} and {out.with_suffix(ENDING)}"
    click.echo(f"wrote {out}, {out.with_suffix('')}/ and, for you alone, {alone}")


@click.command()
@click.argument("number", type=int, metavar="LAB")
@click.option("--class", "class_name", required=True, help="Name of the class, for its README.")
@click.option(
    "--seed", required=True, help="Any text that you keep to yourself; it chooses sizes, data and questions."
)
@click.option("--out", type=click.Path(path_type=Path), help="A new folder for the release.")
@click.option(
    "--autograder",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Archive for Gradescope: the release, the seed, and scripts that install and grade.",
)
@click.option("--show-all", is_flag=True, help=f"With --autograder, {SHOW_ALL}")
def release(
    number: int, class_name: str, seed: str, out: Path | None, autograder: Path | None, show_all: bool
) -> None:
    """Write the tree that you give to a class: stubs, one variant, no solutions, no history."""
    from mooncake_lite.labs.autograder import write_autograder
    from mooncake_lite.labs.release import release as write

    root, lab = lab_here(number)
    if out is None and autograder is None:
        raise click.UsageError("nothing to write; name a folder with --out, or an archive with --autograder")
    if out is not None:
        out = out.resolve()
        files = write(root, lab, class_name, seed, out)
        click.echo(f"wrote {files} files to {out}; keep the seed: grading needs it")
        _add_reference(root, lab, out)
    if autograder is not None:
        write_autograder(root, lab, class_name, seed, autograder, show_all=show_all)
        click.echo(f"wrote {autograder}; it has the seed: give it to no student")


def _add_reference(root: Path, lab: Lab, out: Path) -> None:
    """Add the reference's numbers to a release of a lab that can be played."""
    from mooncake_lite.labs.playing import REFERENCE, SCRIPT, write_reference

    if not (out / lab.folder / SCRIPT).exists():
        return
    try:
        rows = write_reference(root, lab, out)
        click.echo(f"played the reference: {rows} rows in {lab.folder}/{REFERENCE}, for labs run")
    except LabError as error:
        click.echo(f"note: labs run of this release compares with nothing: {error}", err=True)


@click.group()
def dev() -> None:
    """Develop labs."""


@dev.command("check")
@click.option("--lab", "number", type=int, help="Number of one lab. [default: all labs]")
@click.option("--quick", is_flag=True, help="Leave out mutants, hostile code and the time of a check.")
def check_labs(number: int | None, quick: bool) -> int:
    """Test what every lab promises: each rule on each lab, with a line for each.

    Needs the full repository, and a machine that allows a sandbox.
    """
    from mooncake_lite.labs.dev_check import dev_check

    root = find_root(Path.cwd())
    labs = labs_in(root) if number is None else {number: lab_in(root, number)}
    good = True
    for lab in labs.values():
        click.echo(f"lab {lab.number}, {lab.title}")
        good = dev_check(root, lab, quick=quick, say=click.echo) and good
    return 0 if good else 1


@dev.command("mutants")
@click.argument("number", type=int, metavar="LAB")
@click.option("--task", help="One of its tasks. [default: all]")
def list_mutants(number: int, task: str | None) -> int:
    """List the mistakes in a region that cost no point: small changes that all tests let pass.

    Those that attempts/equal.toml names do the same as the reference. Takes some minutes.
    """
    from rich.console import Console
    from rich.progress import track

    from mooncake_lite.labs.bench import bench_of, benches_like
    from mooncake_lite.labs.mutants import mutants
    from mooncake_lite.labs.survivors import equal_of, survivors

    root, lab = lab_here(number)
    if not lab.files:
        raise LabError(f"lab {number} has no regions, so nothing in it can be mutated")
    tasks = [lab.task(task)] if task else lab.tasks

    left = 0
    with bench_of(root, lab) as bench, benches_like(bench) as benches:
        known = equal_of(bench)
        for one in track(tasks, console=Console(stderr=True), transient=True):
            passed = [mutant.what for mutant in survivors(benches, one)]
            total, equal = len(mutants(bench.region(one))), known.get(one.id, {})
            unknown = [what for what in passed if what not in equal]
            left += len(unknown)
            counts = f"{total - len(passed)} noticed, {len(equal)} equal, {len(unknown)} pass"
            click.echo(f"{one.id}: {total} mutants, {counts}")
            for what in unknown:
                click.echo(f"  {what}")
            for what in sorted(equal.keys() - set(passed)):
                click.echo(f"  noticed, though equal.toml names it: {what}")
    return 1 if left else 0
