"""The main conversations with the control plane, as text: each file of scenarios/ is what really happens.

`pytest tests/mooncake_lite/control --rewrite-scenarios` writes it there; read the diff.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import get_args

import pytest

from mooncake_lite.control import effects as fx
from scheduler import ADMISSIONS
from scheduler.placement import POLICIES
from scheduler.queues import QUEUES
from tests.mooncake_lite.control.commands import COMMANDS, after
from tests.mooncake_lite.control.scenario import Scenario

pytestmark = pytest.mark.quick

FOLDER = Path(__file__).parent / "scenarios"
FILES = sorted(FOLDER.glob("*.txt"))


def played(text: str) -> str:
    """The same scenarios with their effects and books as they are."""
    return "\n".join(lines(text)) + "\n"


def lines(text: str) -> Iterator[str]:
    scenario: Scenario | None = None
    for line in text.splitlines():
        words = line.split()
        if line.startswith("#"):
            if scenario is not None:
                yield f"  {scenario.books()}"
                yield ""
            scenario = None
            yield line
        elif line.startswith("cluster"):
            scenario = Scenario(words)
            yield line
        elif line.startswith(">"):
            assert scenario is not None, f"{line!r} comes before the line `cluster`"
            yield line
            for effect in scenario.tell(words[1:]):
                yield f"  {effect}"
        else:
            assert not words or line.startswith("  "), f"{line!r} is no title, no event and no effect"
    if scenario is not None:
        yield f"  {scenario.books()}"


def test_every_command_and_every_effect_has_a_scenario() -> None:
    lines = [line.split() for file in FILES for line in file.read_text().splitlines() if line[:1] in "> "]
    assert {words[1] for words in lines if words[:1] == [">"]} == {"books", "wait", *COMMANDS}
    shown = {words[0] for words in lines if words}
    assert {kind.__name__ for kind in get_args(fx.Effect)} <= shown


@pytest.mark.parametrize(
    ("word", "names"), [("policy", POLICIES), ("admission", ADMISSIONS), ("order", QUEUES)]
)
def test_every_policy_form_of_admission_and_queue_has_a_scenario(word: str, names: Iterable[str]) -> None:
    clusters = [
        line.split() for file in FILES for line in file.read_text().splitlines() if line.startswith("cluster")
    ]
    assert {after(words, word) for words in clusters} == {None, *names}


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_conversation_goes_as_it_is_written(file: Path, request: pytest.FixtureRequest) -> None:
    text = file.read_text(encoding="utf-8")
    found = played(text)
    if request.config.getoption("--rewrite-scenarios", default=False):
        file.write_text(found, encoding="utf-8")
        return

    assert found == text, "if it should go so: pytest tests/mooncake_lite/control --rewrite-scenarios"
