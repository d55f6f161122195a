"""Runs a page as its reader would, and compares what is printed with what the page says.

Called by `test_tutorials`. One page is one scratch folder, one Python namespace and one set of background
jobs, all gone at the end. How a page is marked up is explained in docs/how-to/write-a-page.md.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import sys
import time
from pathlib import Path

from mooncake_lite.launch.serve_child import free_port
from tests.tutorials.pages import Step, figures, matches, rewrite, steps
from tests.tutorials.processes import POLL_S, PythonWorker, Session

TUTORIALS = Path(__file__).resolve().parents[2] / "tutorials"
STEP_LIMIT_S = 280.0
"""One command at most: the first start of a cluster compiles kernels, and may take 90 s."""

_KILL = re.compile(r"kill(?: -(?:SIG)?([A-Z0-9]+))? %(\d+)")


class PageError(AssertionError):
    """A step of a page did not do what the page says."""


def environment(port: int) -> dict[str, str]:
    """What a page's commands see: this Python's own commands first, a free port in PORT, plain output.

    One thread in the page's own Python: two wait for each other for very long beside other tests.
    """
    chosen = {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PORT": str(port),
        "COLUMNS": "100",
        "NO_COLOR": "1",
        "TERM": "dumb",
        "PYTHONUNBUFFERED": "1",
        "NUMBA_NUM_THREADS": "1",
    }
    return {**os.environ, **chosen}


class PageRun:
    """One run of one page. Use `run_page`."""

    def __init__(self, page: Path, scratch: Path, limit_s: float) -> None:
        self.page = page
        self.limit_s = limit_s
        self.replacements: dict[tuple[int, int], str] = {}
        self._text = page.read_text(encoding="utf-8")
        self._lines = self._text.split("\n")
        self._folder = scratch / "work"
        self._folder.mkdir(parents=True)
        (self._folder / TUTORIALS.name).symlink_to(TUTORIALS)  # for pages that run a program of that folder
        self._outputs = scratch
        self._environment = environment(free_port())
        self._jobs: list[Session] = []
        self._python: PythonWorker | None = None

    def run(self) -> int:
        """All steps in order; how many there were.

        Raises PageError at the first that fails, or when a figure has not been drawn.
        """
        found = steps(self._text)
        try:
            for step in found:
                output = self._run(step)
                self._compare(step, output)
        finally:
            stopped = self._stop()
        if not stopped:
            raise PageError(f"{self.page}: a background job had to be killed at the end of the page")
        for figure, line in figures(self._text).items():
            if not self._drawn(figure).exists():
                name = self._drawn(figure).name
                raise PageError(f"{self.page}:{line}: {figure} is shown, but no block has written {name}")
        return len(found)

    def copy_figures(self) -> None:
        """Put what the page has drawn beside the page."""
        for figure in figures(self._text):
            target = self.page.parent / figure
            target.parent.mkdir(exist_ok=True)
            shutil.copyfile(self._drawn(figure), target)

    def rewritten(self) -> str:
        """The page with the outputs that differed replaced by the real ones."""
        return rewrite(self._text, self.replacements)

    def _run(self, step: Step) -> str:
        if step.kind == "python":
            return self._run_python(step)
        if step.kind == "background":
            return self._start(step)
        if match := _KILL.fullmatch(step.source):
            return self._kill(step, match[1] or "TERM", int(match[2]))
        return self._run_command(step)

    def _run_python(self, step: Step) -> str:
        if self._python is None:
            self._python = PythonWorker(self.page, self._folder, self._environment)
        try:
            result = self._python.run(step.source, step.line, self.limit_s)
        except (TimeoutError, EOFError) as error:
            raise self._failed(step, str(error)) from None
        if result["error"]:
            raise self._failed(step, result["error"])
        return result["output"]

    def _run_command(self, step: Step) -> str:
        session = Session(step.source, self._folder, self._environment, self._outputs / f"{step.line}.out")
        try:
            code = session.wait(self.limit_s)
            if code is None:
                raise self._failed(step, f"not finished within {self.limit_s:.0f} s", session)
            if left := session.left_behind():
                raise self._failed(step, f"it left {len(left)} processes behind", session)
            if code != step.exit_code:
                raise self._failed(step, f"exit code {code}, not {step.exit_code}", session)
        finally:
            session.stop(signal.SIGKILL)
        return session.output()

    def _start(self, step: Step) -> str:
        """Start a background job and wait until it has printed what the page expects next."""
        session = Session(step.source, self._folder, self._environment, self._outputs / f"{step.line}.out")
        self._jobs.append(session)
        wanted = self._expected(step)
        end = time.monotonic() + self.limit_s
        while not (wanted and matches(wanted, session.output(), beginning=True)):
            if session.process.poll() is not None:
                raise self._failed(step, f"it ended with exit code {session.process.returncode}", session)
            if wanted is None:
                break
            if time.monotonic() > end:
                raise self._failed(
                    step, f"it has not printed {wanted!r} within {self.limit_s:.0f} s", session
                )
            time.sleep(POLL_S)
        return session.output()

    def _kill(self, step: Step, name: str, number: int) -> str:
        """`kill %1`: stop a background job as its shell would, and wait for its end."""
        if not 1 <= number <= len(self._jobs):
            raise self._failed(step, f"there is no background job {number}")
        session = self._jobs[number - 1]
        before = len(session.output())
        signals = {str(item.value): item for item in signal.Signals} | {
            item.name.removeprefix("SIG"): item for item in signal.Signals
        }
        if not session.stop(signals[name]):
            raise self._failed(step, "the job did not end and was killed", session)
        return session.output()[before:]

    def _drawn(self, figure: str) -> Path:
        """Where the page's code writes a figure: under its bare name, in the folder that it runs in."""
        return self._folder / Path(figure).name

    def _expected(self, step: Step) -> str | None:
        return None if step.expected is None else "\n".join(self._lines[slice(*step.expected)])

    def _compare(self, step: Step, output: str) -> None:
        wanted = self._expected(step)
        if wanted is None or step.expected is None:
            return
        if not matches(wanted, output, beginning=step.kind == "background"):
            self.replacements[step.expected] = output

    def check(self) -> None:
        """Raises PageError when an output differed, or a figure does not lie beside the page."""
        for (start, stop), output in sorted(self.replacements.items()):
            wanted = "\n".join(self._lines[start:stop])
            raise PageError(
                f"{self.page}:{start + 1}: the page says\n{wanted}\nbut what is printed is\n{output}"
            )
        for figure, line in figures(self._text).items():
            if not (self.page.parent / figure).exists():
                raise PageError(f"{self.page}:{line}: {figure} is not there; run with --rewrite-tutorials")

    def _failed(self, step: Step, why: str, session: Session | None = None) -> PageError:
        printed = f"\n{session.output()[-3000:]}" if session else ""
        jobs = [
            f"\nbackground job `{job.command}`:\n{job.output()[-3000:]}"
            for job in self._jobs
            if job != session
        ]
        return PageError(f"{self.page}:{step.line}: {step.source}\n{why}{printed}{''.join(jobs)}")

    def _stop(self) -> bool:
        if self._python is not None:
            self._python.stop()
        stopped = [job.stop() for job in self._jobs]
        return all(stopped)


def run_page(
    page: Path, scratch: Path, *, rewrite_outputs: bool = False, limit_s: float = STEP_LIMIT_S
) -> int:
    """Run a page in an empty scratch folder; how many steps it had.

    rewrite_outputs   write what is really printed into the page instead of failing, and its figures beside it
    limit_s           seconds that one step may take
    Raises PageError, naming the page and the line.
    """
    run = PageRun(page, scratch, limit_s)
    count = run.run()
    if rewrite_outputs:
        run.copy_figures()
        if run.replacements:
            page.write_text(run.rewritten(), encoding="utf-8")
    else:
        run.check()
    return count
