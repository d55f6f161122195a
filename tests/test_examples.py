"""The programs in examples/ run. reuse.py runs against a cluster in tests/cluster/test_serving.py."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[1] / "examples"


def run(name: str, *arguments: str) -> list[str]:
    """Run an example. Return the lines that it printed."""
    command = [sys.executable, str(EXAMPLES / name), *arguments]
    return subprocess.run(
        command, check=True, timeout=120, stdout=subprocess.PIPE, text=True
    ).stdout.splitlines()


def test_control_by_hand_prints_the_effects_of_two_events() -> None:
    lines = run("control_by_hand.py")
    assert [line.split("(")[0] for line in lines] == [
        *("at 1.0 s: RequestArrived", "    -> Decided", "    -> StartPrefill", "    -> WakeAt"),
        *("at 1.3 s: PrefillEnded", "    -> StartDecode", "    -> BlockStored", "    -> BlockStored"),
        "    -> HoldBlocks",
    ]


def test_offline_batch_answers_every_prompt() -> None:
    assert "' Paris." in run("offline_batch.py")[1]
