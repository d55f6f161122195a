"""The sample report of teachers and students: its numbers are those of lab 5, and its points add up."""

from __future__ import annotations

import csv
import os
import re
import subprocess
import sys
from collections import defaultdict
from itertools import pairwise
from math import floor
from pathlib import Path

import pytest

from mooncake_lite.labs.lab import lab_in
from mooncake_lite.labs.starting import data_module
from mooncake_lite.labs.variant import class_of, sizes
from tests.mooncake_lite.labs.trees import ROOT

PAGE = (ROOT / "tutorials/labs/sample_report/README.md").read_text(encoding="utf-8")
LAB = lab_in(ROOT, 5)


def played(folder: Path, settings: list[str]) -> dict[str, dict[str, list[float]]]:
    """Return {setting: {request: seconds of its arrival and its tokens}} of the class self-study."""
    seed = class_of(ROOT).seed
    for name, data in data_module(ROOT, LAB).data(seed, sizes(LAB, seed)).items():
        (folder / name).write_bytes(data)
    command = [sys.executable, str(ROOT / LAB.folder / "play.py"), str(folder / "requests.jsonl"), *settings]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=True)
    found: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in csv.DictReader(done.stdout.splitlines()):
        found[row["setting"]][row["request"]].append(float(row["seconds"]))
    return found


def test_the_numbers_of_the_sample_report_are_those_of_the_class(tmp_path: Path) -> None:
    for setting, requests in played(tmp_path, ["8", "64", "128", "whole"]).items():
        longest = max(after - before for times in requests.values() for before, after in pairwise(times[1:]))
        mean = sum(times[1] - times[0] for times in requests.values()) / len(requests)
        said = {
            "8": f"{mean:.2f} s with 8",
            "64": f"longest gap is {longest:.3f} s",
            "128": f"{longest:.3f} s",
        }
        assert said.get(setting, f"stood still for {longest:.3f} s") in " ".join(PAGE.split()).replace(
            "> ", ""
        )
        assert setting != "64" or f"The mean is {mean:.2f} s with 64" in PAGE


@pytest.mark.quick
def test_the_sample_report_has_at_most_150_words_and_its_points_add_up() -> None:
    assert sum(len(line.split()) for line in re.findall(r"^> ?(.*)$", PAGE, re.MULTILINE)) <= 150
    *parts, total = re.findall(r"^\| .+? \| \**([\d.]+)\** \| \**(\d+)\** \|", PAGE, re.MULTILINE)
    assert (floor(sum(float(got) for got, _ in parts)), sum(int(most) for _, most in parts)) == (12, 15)
    assert total == ("12", "15")
    assert "ada,,12" in PAGE
