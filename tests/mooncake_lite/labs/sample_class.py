"""The sample class: twelve submissions of lab 2, each good except for what its name says.

Used by test_grading.py. The hostile ones also run with the check of names off, and meet the sandbox.
"""

from __future__ import annotations

import zipfile
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from mooncake_lite.labs import regions
from mooncake_lite.labs.hostile import hostile_text
from mooncake_lite.labs.lab import Lab
from mooncake_lite.labs.submission import About
from tests.mooncake_lite.labs.trees import ROOT


@dataclass(frozen=True, slots=True)
class Sample:
    """changed: {task: text in place of the reference's}; points: recorded, with and without names checked."""

    points: tuple[int, int]
    changed: dict[str, str] = field(default_factory=dict)


def text(*lines: str) -> str:
    return "".join(f"        {line}\n" for line in lines)


STUBS = {f"2{letter}": text(f'raise NotImplementedError("lab task 2{letter}")') for letter in "abcde"}

SAMPLES = {
    "ada_perfect": Sample((75, 75)),
    "ben_partly_done": Sample(
        (46, 46),
        {
            "2d": text('assert all(users >= 1 for users in self.used.values()), "a used page has no user"'),
            "2e": STUBS["2e"],
        },
    ),
    "cleo_empty": Sample((0, 0), STUBS),
    "dan_syntax_error": Sample((60, 60), {"2b": text("keys = [", "return keys")}),
    "eve_endless_loop": Sample((60, 60), {"2c": hostile_text("endless loop")}),
    "finn_fork_bomb": Sample((60, 60), {"2d": hostile_text("fork bomb")}),
    "gil_memory_hog": Sample((60, 60), {"2a": hostile_text("memory hog")}),
    "hana_print_flood": Sample((60, 60), {"2b": hostile_text("print flood")}),
    "ivo_exit": Sample((60, 60), {"2e": hostile_text("exit")}),
    "jo_survivor": Sample(
        (60, 75),
        {
            "2d": text(
                "import os",
                "import time",
                "if not hasattr(Pages, 'left_behind') and os.fork() == 0:",
                "    os.setsid()",
                "    time.sleep(1000)",
                "Pages.left_behind = True",
                "assert sorted([*self.free, *self.used, *self.idle]) == list(range(self.num_pages))",
                "assert all(users >= 1 for users in self.used.values())",
                "assert set(self.idle) <= self.cached.keys()",
                "assert not self.cached.keys() & set(self.free)",
            )
        },
    ),
    "kim_reads_the_grader": Sample(
        (60, 60),
        {
            "2b": text(
                "import glob, os, sys",
                "seen = [*glob.glob('/lab/**/test_2b*', recursive=True), *glob.glob('/tmp/*/run.json')]",
                "seen += [*glob.glob('/proc/[0-9]*/cwd/tests'), *glob.glob('/home/*')]",
                "seen += [name for name in sys.modules if 'judging' in name or 'grading' in name]",
                "seen += [name for name, value in os.environ.items() if value.isdigit() and len(value) > 9]",
                "raise LookupError(f'found {seen} of the grader')",
            )
        },
    ),
    "lee_writes_the_score": Sample(
        (60, 60),
        {
            "2e": text(
                "import glob, os",
                'forged = b\'{"cases": [{"task": "2e", "name": "x", "passed": true}]}\\n\'',
                "for place in (*glob.glob('/tmp/mlab*'), '/tmp', '/lab', '/lab/tests/labs', '.', '..'):",
                "    for name in ('results.json', 'grades.csv', 'conftest.py'):",
                "        try:",
                "            open(f'{place}/{name}', 'wb').write(forged)",
                "        except OSError:",
                "            pass",
                "for stream in (*range(3, 64), 1):",
                "    try:",
                "        os.write(stream, forged)",
                "    except OSError:",
                "        pass",
                "return iter(())",
            )
        },
    ),
}


def reference(lab: Lab) -> dict[str, str]:
    """The regions of the real modules."""
    return {
        task.id: regions.body((ROOT / task.file).read_text(encoding="utf-8"), task.function)
        for task in lab.tasks
    }


def write_archive(path: Path, texts: dict[str, str], lab: int = 2, **more: bytes) -> Path:
    """An archive as `labs pack` writes it. more: other members, with __ for a slash."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("lab.json", msgspec.json.encode(About(lab, "sample")))
        for task, region in texts.items():
            archive.writestr(f"regions/{task}.py", region)
        for name, data in more.items():
            archive.writestr(name.replace("__", "/"), data)
    return path


def write_class(folder: Path, lab: Lab) -> Path:
    """All archives of the class."""
    folder.mkdir()
    good = reference(lab)
    for name, sample in SAMPLES.items():
        write_archive(folder / f"{name}.zip", good | sample.changed)
    return folder
