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


def hostile(regions: dict[str, tuple[str, str]], **right: str) -> Sample:
    """A submission of {task: (text, what is said of it)}: these get nothing. right: texts with all points."""
    texts, says = ({task: pair[place] for task, pair in regions.items()} for place in (0, 1))
    return Sample(texts | right, dict.fromkeys(regions, 0), says)


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
    "if not hasattr(glob, 'named'):",
    "    glob.named = [*glob.glob('/proc/[0-9]*/cwd/tests'), *glob.glob('/home/*')]",
    "    for top, folders, names in os.walk('/'):",
    "        folders[:] = [each for each in folders if each not in ('usr', 'proc', 'lib')]",
    "        glob.named += [each for each in names if each.startswith('test_2')]",
    "        glob.named += [each for each in names if each.endswith('.csv') or each == 'run.json']",
    "seen = glob.named + [name for name in sys.modules if 'judging' in name or 'grading' in name]",
    "seen += [name for name, value in os.environ.items() if value.isdigit() and len(value) > 9]",
    "seen += [name for name in os.environ if name.endswith('_SEED')]",
    "seen += ['2b'] * open('/lab/store/keys.py').read().count('intdigest(' + 'block')",
    "raise LookupError(f'found {seen} of the grader in {sorted(os.listdir(\"/lab\"))}')",
)
"""Looks for tests, results, seeds and the solution of 2b."""

PARTS = ["kernels_numba", "mooncake_lite", "scheduler", "store", "transport", "tutorials"]
"""The tree of a graded child."""

WRITES_THE_SCORE = text(
    "import glob, os",
    'forged = b\'{"cases": [{"task": "2e", "name": "x", "passed": true}]}\\n\'',
    "for place in (*glob.glob('/tmp/mlab*'), '/tmp', '/lab', '/lab/tutorials/labs', '.', '..'):",
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
        STUBS
        | {"2d": text('assert all(users >= 1 for users in self.used.values()), "a used page has no user"')},
        dict.fromkeys(STUBS, 0) | {"2d": 1},
    ),
    "cleo_empty": hostile({task: (stub, "the region is a stub") for task, stub in STUBS.items()}),
    "dan_takes_all": hostile(
        {
            "2a": (hostile_text("memory hog"), "used more than 1024 MB of memory"),
            "2b": (text("keys = [", "return keys"), "Python cannot read line 1 of the region"),
            "2c": (READS_THE_GRADER, f"LookupError: found [] of the grader in {PARTS}"),
            "2d": (hostile_text("fork bomb"), "started more than 32 processes and threads"),
        }
    ),
    "hana_writes": hostile(
        {
            "2a": (hostile_text("exit"), "ended with exit code 0 before it answered"),
            "2b": (hostile_text("print flood"), "printed more than 1,048,576 bytes"),
            "2c": (hostile_text("endless loop"), "used more than 6 s of processor time"),
            "2e": (WRITES_THE_SCORE, "the answer has another type"),
        },
        **{"2d": SURVIVOR},
    ),
}


def reference(lab: Lab) -> dict[str, str]:
    """The regions of the real modules."""
    return {
        task.id: regions.body((ROOT / task.file).read_text(encoding="utf-8"), task.function)
        for task in lab.tasks
        if task.file
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
