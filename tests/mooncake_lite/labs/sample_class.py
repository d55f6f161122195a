"""The sample class: submissions of lab 2, each good except for what it changes.

Used by test_grading.py, which grades it with the check of names off, so that hostile code meets the sandbox.
"""

from __future__ import annotations

import zipfile
from collections.abc import Iterable
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
    """changed: {task: text in place of the reference's}; points: {task: recorded, where it is not 15}; says:
    {task: what its state or its failures say}."""

    changed: dict[str, str] = field(default_factory=dict)
    points: dict[str, int] = field(default_factory=dict)
    says: dict[str, str] = field(default_factory=dict)


def hostile(regions: dict[str, tuple[str, str]]) -> Sample:
    """A submission of {task: (text, what is said of it)}, where each of these tasks gets nothing."""
    texts, says = ({task: pair[place] for task, pair in regions.items()} for place in (0, 1))
    return Sample(texts, dict.fromkeys(regions, 0), says)


def text(*lines: str) -> str:
    return "".join(f"        {line}\n" for line in lines)


STUBS = {f"2{letter}": text(f'raise NotImplementedError("lab task 2{letter}")') for letter in "abcde"}

SURVIVOR = text(
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
"""Leaves a process behind, and is right."""

READS_THE_GRADER = text(
    "import glob, os, sys",
    "seen = [*glob.glob('/lab/**/test_2b*', recursive=True), *glob.glob('/tmp/*/run.json')]",
    "seen += [*glob.glob('/proc/[0-9]*/cwd/tests'), *glob.glob('/home/*')]",
    "seen += [name for name in sys.modules if 'judging' in name or 'grading' in name]",
    "seen += [name for name, value in os.environ.items() if value.isdigit() and len(value) > 9]",
    "raise LookupError(f'found {seen} of the grader')",
)

WRITES_THE_SCORE = text(
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

SAMPLES = {
    "ada_perfect": Sample(),
    "ben_partly_done": Sample(
        {
            "2d": text('assert all(users >= 1 for users in self.used.values()), "a used page has no user"'),
            "2e": STUBS["2e"],
        },
        {"2d": 1, "2e": 0},
    ),
    "cleo_empty": hostile({task: (stub, "the region is a stub") for task, stub in STUBS.items()}),
    "dan_ends": hostile(
        {
            "2b": (text("keys = [", "return keys"), "Python cannot read line 1 of the region"),
            "2c": (hostile_text("endless loop"), "used more than 3 s of processor time"),
            "2e": (hostile_text("exit"), "ended with exit code 0 before it answered"),
        }
    ),
    "finn_takes_all": hostile(
        {
            "2a": (hostile_text("memory hog"), "used more than 1024 MB of memory"),
            "2d": (hostile_text("fork bomb"), "started more than 32 processes and threads"),
        }
    ),
    "hana_writes": hostile(
        {
            "2b": (hostile_text("print flood"), "printed more than 1,048,576 bytes"),
            "2e": (WRITES_THE_SCORE, "the answer of the region has another type"),
        }
    ),
    "jo_looks_around": Sample(
        {"2b": READS_THE_GRADER, "2d": SURVIVOR}, {"2b": 0}, {"2b": "LookupError: found [] of the grader"}
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


def write_class(folder: Path, lab: Lab, names: Iterable[str] = SAMPLES) -> Path:
    """All archives of the class, or those of these names."""
    folder.mkdir()
    good = reference(lab)
    for name in names:
        write_archive(folder / f"{name}.zip", good | SAMPLES[name].changed)
    return folder
