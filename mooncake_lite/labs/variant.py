"""Variants: sizes, data and questions that differ from class to class. The code never does.

Used by `labs start`, `release` and the tests of a lab. A teacher's seed is any text. The public and the
private seed are digests of it, so the public one, which a release holds, does not tell the private one.
Explained in docs/explain/labs.md, "Variants".
"""

from __future__ import annotations

import hashlib
import random
import re
from pathlib import Path

import msgspec

from mooncake_lite import __version__
from mooncake_lite.errors import LabError
from mooncake_lite.labs.lab import Lab

CLASS_FILE = "lab-class.json"
"""In the root of a release: which class it was made for."""

SELF_STUDY = "self-study"
"""The seed of whoever works in the full repository."""


class Class(msgspec.Struct, frozen=True):
    """A class and its variant.

    name      as the teacher called it
    lab       number of the released lab, 0 in the full repository
    seed      public seed
    outside   {file with regions: digest of what it is apart from them}
    version   of mooncake-lite, of which the release was made
    """

    name: str
    lab: int
    seed: int
    outside: dict[str, str] = {}
    version: str = ""


class Sizes(dict[str, int]):
    """The sizes of a variant by name, also as attributes."""

    def __getattr__(self, name: str) -> int:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"lab.toml has no size {name!r} under [variant]") from None


def public_seed(text: str) -> int:
    """Return the seed of the data and tests that students see."""
    return _digest("public", text)


def private_seed(text: str) -> int:
    """Return the seed of the tests that only a teacher runs."""
    return _digest("private", text)


def sizes(lab: Lab, seed: int) -> Sizes:
    """Draw the sizes of a variant, one value of each list."""
    return Sizes(
        {name: random.Random(f"{seed} {name}").choice(values) for name, values in lab.variant.items()}
    )


def questions(lab: Lab, seed: int) -> list[str]:
    """Draw one question for each figure."""
    return [random.Random(f"{seed} {figure.title}").choice(figure.questions) for figure in lab.figures]


def sheet(lab: Lab, root: Path, seed: int) -> str:
    """Return the sheet with the numbers and questions of a variant in place of {name} and {question_1}.

    A question may name sizes too. {builtins} stands for the names that every region may use.

    Raises LabError when the sheet names something that lab.toml does not have.
    """
    text = (root / lab.folder / "lab.md").read_text(encoding="utf-8")
    values = {name: f"{value:,}" for name, value in sizes(lab, seed).items()}

    def value(match: re.Match[str]) -> str:
        if match[1] not in values:
            raise LabError(f"{lab.folder}/lab.md: {match[0]} is no size of [variant] and no question")
        return values[match[1]]

    asked = [re.sub(r"\{(\w+)\}", value, question) for question in questions(lab, seed)]
    values |= {f"question_{number}": question for number, question in enumerate(asked, 1)}
    values["builtins"] = ", ".join(f"`{name}`" for name in lab.names)
    return re.sub(r"\{(\w+)\}", value, text)


def class_of(root: Path) -> Class:
    """Return the class of a release, or that of self-study in the full repository.

    Raises LabError for a file that cannot be read.
    """
    path = root / CLASS_FILE
    if not path.exists():
        return Class(SELF_STUDY, 0, public_seed(SELF_STUDY), version=__version__)
    try:
        return msgspec.json.decode(path.read_bytes(), type=Class)
    except (OSError, msgspec.MsgspecError) as error:
        raise LabError(f"{path}: {error}; unpack the release again") from None


def _digest(purpose: str, text: str) -> int:
    return int.from_bytes(hashlib.sha256(f"{purpose}\0{text}".encode()).digest()[:6], "big")
