"""`mooncake-lite generate` refuses in one line, pulls in sight of the user, and needs nothing of Linux."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from mooncake_lite import model
from mooncake_lite.cli import main
from mooncake_lite.errors import ModelError


@pytest.mark.quick
def test_an_unknown_device_is_refused_in_one_line_before_a_model_is_looked_for(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["generate", "Hello", "--model", "/nonexistent", "--device", "foo"]) == 2
    assert capsys.readouterr().err == "mooncake-lite: error: device='foo': use cpu or cuda\n"


@pytest.mark.quick
@pytest.mark.parametrize("option", ["--temperature", "--top-p"])
def test_what_is_no_number_is_refused_before_a_model_is_looked_for(
    capsys: pytest.CaptureFixture[str], option: str
) -> None:
    assert main(["generate", "Hello", "--model", "/nonexistent", option, "nan"]) == 2
    assert f"Invalid value for '{option}': nan is not in the range" in capsys.readouterr().err


def test_a_pull_is_shown(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def pull(name: str, *, progress: Any) -> Path:
        progress("download", 0, 98_000_000)
        raise ModelError("no network")

    monkeypatch.setattr(model, "resolve_model", pull)
    assert main(["generate", "Hello"]) == 2
    shown = capsys.readouterr().err
    assert shown.startswith("downloading the model (98 MB)\n")
    assert shown.endswith("mooncake-lite: error: no network\n")


def test_it_answers_where_the_system_tells_no_affinity(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delattr(os, "sched_getaffinity")
    assert main(["generate", "What is the capital of France?", "--max-tokens", "8"]) == 0
    assert "Paris" in capsys.readouterr().out
