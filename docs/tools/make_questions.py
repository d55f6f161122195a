"""Plays the questions that the paper leaves open, and writes docs/explain/questions/.

    make questions                                 plays all that has no result yet, then writes the pages
    python docs/tools/make_questions.py --only 6   one of them
    python docs/tools/make_questions.py --out FOLDER   plays them anew, and compares with the results here

Each run that has ended is kept, so that a call after Ctrl-C goes on. Some questions play published traces:
MOONCAKE_LITE_TRACES names their folder. How a question is made: docs/tools/questions/__init__.py.
"""

from __future__ import annotations

import io
import json
import pkgutil
import re
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Executor, Future, as_completed
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import click
import questions
from questions.frame import Found, Point, Rows, Seeds, table

from mooncake_lite.config.machine import machine, signed, usable_cores
from mooncake_lite.config.progress import counted
from mooncake_lite.errors import ClusterError, UserError
from mooncake_lite.simulator.figure import canvas
from mooncake_lite.simulator.sweep import processes

DOCS = Path(__file__).parents[1]
RESULTS = DOCS / "reference" / "measured" / "questions"
PAGES, FIGURES = DOCS / "explain" / "questions", DOCS / "explain" / "figures"
MODULES = Path(questions.__file__).parent

ANSWER = re.compile(r"^\*\*Answer\.\*\* (.*?)\n\n", re.MULTILINE | re.DOTALL)


def modules() -> dict[int, ModuleType]:
    """Return the modules of the questions by number."""
    found = [one.name for one in pkgutil.iter_modules([str(MODULES)]) if re.match(r"q\d\d_", one.name)]
    return {int(name[1:3]): import_module(f"questions.{name}") for name in sorted(found)}


def played(module: ModuleType, result: Path, executor: Executor, *, quick: bool) -> None:
    """Play a question's points that are not in its file of parts, and write its result."""
    points, part = module.points(quick), result.with_suffix(".part")
    known = [json.loads(line) for line in part.read_text().splitlines()] if part.exists() else []
    done = {_name(row["point"]): row for row in known}
    missing = [point for point in points if _name(point) not in done]
    measured_on = machine()
    with counted(f"question {_number(module)}", len(missing)) as told, part.open("a") as file:
        for point, found, cpu_s in _ran(module, missing, executor):
            done[_name(point)] = {"point": point, "found": rounded(found), "cpu_s": round(cpu_s, 2)}
            file.write(json.dumps(done[_name(point)]) + "\n")
            file.flush()
            told()
    rows = [done[_name(point)] for point in points]
    command = f"python docs/tools/make_questions.py --only {_number(module)}" + " --quick" * quick
    about = {"command": command, "cpu_s": round(sum(row["cpu_s"] for row in rows))}
    text = ",\n".join(json.dumps(row) for row in rows)
    head = json.dumps(signed(measured_on, about), indent=1)[:-2]
    result.write_text(f'{head},\n "rows": [\n{text}\n]}}\n', encoding="utf-8")
    part.unlink()


def _ran(module: ModuleType, points: list[Point], executor: Executor) -> Iterator[tuple[Point, Found, float]]:
    """Run points on all cores, then those that need the machine for themselves. Yields them as they end."""
    futures: dict[Future[tuple[Found, float]], Point] = {}
    for point in points:
        if not point.get("alone"):
            futures[executor.submit(timed, module.__name__, point)] = point
    for future in as_completed(futures):
        yield futures[future], *future.result()
    for point in points:
        if point.get("alone"):
            yield point, *timed(module.__name__, point)


def timed(name: str, point: Point) -> tuple[Found, float]:
    """Run a point, in any process. Returns what it came to, and the CPU seconds of this process."""
    began = time.process_time()
    return import_module(name).run(point), time.process_time() - began


def rounded(found: Any) -> Any:
    """Return a result as JSON has it, with six digits of each number: more are noise, and files are read."""
    if isinstance(found, float):
        return float(f"{found:.6g}")
    if isinstance(found, dict):
        return {str(name): rounded(one) for name, one in found.items()}
    return [rounded(one) for one in found] if isinstance(found, list | tuple) else found


def _name(point: Point) -> str:
    return json.dumps(point, sort_keys=True)


def _number(module: ModuleType) -> int:
    return int(module.__name__.rpartition(".")[2][1:3])


def rows_of(found: dict[str, Any]) -> Rows:
    """Return the rows of a result."""
    return Rows((row["point"], row["found"]) for row in found["rows"])


def page(module: ModuleType, found: dict[str, Any]) -> str:
    """Return a question's page with the numbers of a result."""
    name, number = module.__name__.rpartition(".")[2], _number(module)
    template = (MODULES / f"{name}.md").read_text(encoding="utf-8")
    text = template.format_map(module.numbers(rows_of(found)))
    on = found["machine"]
    foot = (
        f"\n## How it was measured\n\n`{found['command']}`, commit {found['commit']}, {found['date'][:10]},\n"
        f"{on['cores']} cores of {on['cpu']}: {found['cpu_s']:,} s of CPU time. The numbers of this\n"
        f"page are made of [its result](../../reference/measured/questions/{number:02}.json) by\n"
        f"[its module](../../tools/questions/{name}.py).\n"
    )
    return text.rstrip() + "\n" + foot


def index(pages: dict[int, tuple[str, str]]) -> str:
    """Return the page with the table of answers. pages: number -> (file name, text)."""
    lines = []
    for number, (name, text) in sorted(pages.items()):
        title, answer = text.partition("\n")[0].partition(". ")[2], ANSWER.search(text)
        assert answer is not None, f"{name} has no answer"
        lines.append([f"[{number}. {title}]({name})", " ".join(answer[1].split())])
    before, mark, _ = (PAGES / "README.md").read_text(encoding="utf-8").partition("<!-- answers -->\n")
    return before + mark + table(["question", "answer"], lines).replace(" --: ", " --- ") + "\n"


def figure(module: ModuleType, rows: Rows) -> bytes:
    """Return a question's figure, as SVG."""
    file = io.BytesIO()
    with canvas(file, ".svg", module.__name__, (7, 3.4)) as (axes,):
        module.draw(axes, rows)
    return file.getvalue()


def page_name(module: ModuleType) -> str:
    """Return the file name of a question's page."""
    return module.__name__.rpartition(".")[2][1:].replace("_", "-") + ".md"


def written() -> dict[Path, str]:
    """Return the text of each page of which there is a result, and of the table of answers."""
    pages = {}
    for number, module in modules().items():
        if (file := RESULTS / f"{number:02}.json").exists():
            text = page(module, json.loads(file.read_text(encoding="utf-8")))
            pages[number] = page_name(module), text
    return {PAGES / name: text for name, text in pages.values()} | {PAGES / "README.md": index(pages)}


def compared(module: ModuleType, ours: dict[str, Any], theirs: dict[str, Any]) -> list[str]:
    """Return what a second result says otherwise: claims that fail, and numbers whose ranges are apart."""
    numbers, others = module.numbers(rows_of(ours)), module.numbers(rows_of(theirs))
    wrong = [f"does not hold: {claim}" for claim, holds in module.claims(others).items() if not holds]
    for name, number in numbers.items():
        other = others[name]
        if isinstance(number, Seeds) and (max(number) < min(other) or max(other) < min(number)):
            wrong.append(f"{name}: {number.spread:.4g} here, {other.spread:.4g} there")
    return wrong


@click.command()
@click.option("--only", multiple=True, type=int, help="This question. May be given several times.")
@click.option("--quick", is_flag=True, help="Fewer and smaller runs, which no page shows; needs --out.")
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), help="Write results here.")
@click.option("--jobs", type=click.IntRange(1, 256), help="Runs at once.  [default: one per core]")
def main(only: tuple[int, ...], quick: bool, out: Path | None, jobs: int | None) -> None:
    """Play what has no result, and write the pages; with --out, play anew and compare with the pages."""
    if quick and out is None:
        raise click.UsageError("--quick needs --out FOLDER: its results are not those of the pages")
    chosen = {number: module for number, module in modules().items() if not only or number in only}
    if unknown := set(only) - set(chosen):
        raise click.UsageError(f"there is no question {min(unknown)}")
    folder, failed = out or RESULTS, []
    folder.mkdir(parents=True, exist_ok=True)
    for number, module in chosen.items():
        result = folder / f"{number:02}.json"
        try:
            if not result.exists():
                with processes(jobs or usable_cores(), mpi=False) as executor:
                    played(module, result, executor, quick=quick)
        except (UserError, ClusterError) as error:
            failed.append(f"question {number}: {error}")
            continue
        found = json.loads(result.read_text(encoding="utf-8"))
        if out is not None and not quick:
            wrong = compared(module, json.loads((RESULTS / result.name).read_text(encoding="utf-8")), found)
            click.echo(f"question {number}: {'; '.join(wrong) or 'the same answer'}")
        elif out is None:
            wrong = [
                claim for claim, holds in module.claims(module.numbers(rows_of(found))).items() if not holds
            ]
            failed += [f"question {number} does not hold: {claim}" for claim in wrong]
            (FIGURES / f"question-{number:02}.svg").write_bytes(figure(module, rows_of(found)))
    if out is None:
        for path, text in written().items():
            path.write_text(text, encoding="utf-8")
    if failed:
        raise click.ClickException("; ".join(failed))


if __name__ == "__main__":
    sys.exit(main())
