"""`mooncake-lite generate` refuses in one line, pulls in sight of the user, and needs nothing of Linux."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from numba.core import event
from rich.console import Console

from mooncake_lite.cli import main
from mooncake_lite.engine import commands, compiling, local
from mooncake_lite.engine.runner import Runner
from mooncake_lite.errors import ModelError
from scheduler.instance import Result, Step
from tests.mooncake_lite.model.sound_folder import add_token, rewrite, sound_folder


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


@pytest.mark.quick
def test_a_prompt_that_the_model_cannot_take_is_refused_in_one_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    folder = sound_folder(tmp_path / "model")
    add_token(folder, "<|tool|>")
    assert main(["generate", "say <|tool|>", "--model", str(folder)]) == 2
    said = capsys.readouterr().err
    assert said.startswith("mooncake-lite: error: the text has the token '<|tool|>', and its id ")
    assert said.count("\n") == 1
    rewrite(folder, "tokenizer_config.json", chat_template=...)
    assert main(["generate", "hello", "--model", str(folder)]) == 2
    assert "error: this model has no chat template" in capsys.readouterr().err


def test_a_pull_is_shown(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def pull(name: str, *, progress: Any) -> Path:
        progress("download", 0, 98_000_000)
        raise ModelError("no network")

    monkeypatch.setattr("mooncake_lite.model.resolve.resolve_model", pull)
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


def test_drafts_change_no_bit_of_an_answer_that_repeats_its_prompt(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = Counter[int]()
    run = Runner.run

    def counting(self: Runner, step: Step) -> Result:
        rows.update(len(chunk.token_ids) for chunk in step.chunks if not chunk.prompt)
        return run(self, step)

    monkeypatch.setattr(Runner, "run", counting)
    prompt = "Copy this text word by word:\nThe harbour of the old town lies below a hill. In the morning "
    prompt += "the fishing boats come back with herring and cod, and the auction begins before seven."
    shown = []
    for how in ("off", "prompt-lookup"):
        assert main(["generate", prompt, "--max-tokens", "40", "--batch-invariant", "--speculate", how]) == 0
        shown.append(capsys.readouterr().out)
    assert shown[0] == shown[1]
    assert rows[1] < 60, "few drafts were right"
    assert rows[4] + rows[8] > 3


@pytest.mark.quick
@pytest.mark.parametrize("value", ["ngram", "0.5", ""])
def test_a_wrong_word_for_drafts_is_told_in_one_line(value: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "Hello", "--speculate", value]) == 2
    assert capsys.readouterr().err == f"mooncake-lite: error: speculate={value!r}: use off or prompt-lookup\n"


def compile_for(clock: SimpleNamespace, seconds: float) -> None:
    """A step that is not in the cache."""
    with event.trigger_event("numba:compile", data={}):
        clock.now += seconds


@pytest.mark.quick
def test_compiling_is_shown_on_stderr_and_is_no_part_of_the_rate(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    clock = SimpleNamespace(now=0.0)

    def tokens(*arguments: object, speculates: bool) -> Iterator[tuple[int, int]]:
        for token in range(3):
            clock.now += 0.1
            yield 0, token

    words = SimpleNamespace(push=lambda ids: f"word{ids[0]} ", flush=lambda: "")
    tokenizer = SimpleNamespace(encode=lambda *_, **__: [1], eos_ids=[], detokenizer=lambda: words)
    monkeypatch.setattr("mooncake_lite.model.resolve.resolve_model", lambda *_, **__: tmp_path)
    monkeypatch.setattr("mooncake_lite.model.tokenizer.load_tokenizer", lambda folder: tokenizer)
    monkeypatch.setattr("mooncake_lite.model.forward.load_model", lambda *_: None)
    monkeypatch.setattr(local, "generate_all", tokens)
    monkeypatch.setattr(commands, "time", SimpleNamespace(perf_counter=lambda: clock.now))
    monkeypatch.setattr(compiling, "kernel_use", lambda *_: compiling.KernelUse(dtype="float32"))
    steps = [(name, lambda: compile_for(clock, 20.0)) for name in ("a fake", "another")]
    monkeypatch.setattr(compiling, "steps_of", lambda use: steps)
    monkeypatch.setattr(compiling, "MAX_HELPERS", 0)
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    assert main(["generate", "Hello", "--raw"]) == 0
    shown = capsys.readouterr()
    assert shown.out == "word0 word1 word2 \n"
    first, second, figures = shown.err.splitlines()
    assert first == "compiling kernels for this machine; later starts find them in the cache"
    assert second.startswith("compiled 2 groups of kernels in ")
    assert figures == "[1 prompt tokens, 3 answered, 10.0 tokens/s]"


@pytest.mark.quick
def test_in_a_terminal_a_bar_names_what_is_being_compiled() -> None:
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=120, color_system=None)
    with compiling.console_compiling(console) as report:
        report(2, 6, "decode attention float32")
    assert "compiling decode attention float32" in screen.getvalue()
    assert "2/6" in screen.getvalue()


@pytest.mark.quick
def test_helpers_are_started_once_something_is_compiled_and_end_with_the_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    endless = [sys.executable, "-c", "import time; time.sleep(600)"]
    started: list[subprocess.Popen[bytes]] = []

    def start_child(command: list[str], **streams: Any) -> subprocess.Popen[bytes]:
        assert command[1:3] == ["-m", "kernels_numba.ahead"]
        started.append(subprocess.Popen(endless, **streams))
        return started[-1]

    def compile_ahead(steps: object, report: Any) -> None:
        assert started == []
        report(0, 2, "one")
        report(1, 2, "two")
        assert [process.poll() for process in started] == [None, None]

    monkeypatch.setattr(compiling, "start_child", start_child)
    monkeypatch.setattr(compiling, "compile_ahead", compile_ahead)
    compiling.compile_with_helpers(compiling.KernelUse(dtype="float32"), lambda *_: None, helpers=2)
    assert all(process.returncode is not None for process in started)


def test_a_cold_start_compiles_in_sight_and_the_next_one_compiles_nothing(tmp_path: Path, soak: int) -> None:
    if soak == 1:
        pytest.skip("compiles every kernel of the default model; run by make soak")
    command = [sys.executable, "-m", "mooncake_lite", "generate", "What is the capital of France?"]
    environment = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path)}
    runs = [
        subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=True)
        for _ in range(2)
    ]
    assert [run.stdout for run in runs] == ["The capital of France is Paris.\n"] * 2
    assert ["compil" in run.stderr for run in runs] == [True, False]
