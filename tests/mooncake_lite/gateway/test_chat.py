"""The terminal chat against a real gateway: history, the line under an answer, and its end."""

from __future__ import annotations

import io
import os
import pty
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from mooncake_lite import messages as m
from mooncake_lite.cli import main
from mooncake_lite.errors import UserError
from mooncake_lite.tools import chat as chat_module
from mooncake_lite.tools.chat import TEMPERATURE, chat, summary
from mooncake_lite.tools.client import StreamedAnswer
from mooncake_lite.tools.repetition import repeated
from tests.mooncake_lite.gateway.conftest import Start
from tests.mooncake_lite.gateway.fake_cluster import (
    LIMIT_S,
    MAX_MODEL_LEN,
    FakeCluster,
    GatewayProcess,
    first_token_only,
    free_port,
    make_model_folder,
)

CODE = """
import signal, sys
from mooncake_lite.cli import main
signal.signal(signal.SIGINT, signal.default_int_handler)  # whoever runs the tests may ignore Ctrl-C
sys.exit(main(["chat", *sys.argv[1:]]))
"""


@dataclass
class Done:
    """What a command left."""

    returncode: int
    stdout: str
    stderr: str


Run = Callable[[list[str], str], Done]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """The whole command, as the console script runs it, with a text as its input."""

    def run_command(arguments: list[str], text: str) -> Done:
        monkeypatch.setattr(sys, "stdin", io.StringIO(text))
        return Done(main(["chat", *arguments]), *capsys.readouterr())

    return run_command


def test_a_conversation_keeps_its_history_and_shows_what_was_cached(
    gateway: GatewayProcess, cluster: FakeCluster, run: Run
) -> None:
    done = run(
        ["--url", gateway.url, "--system", "be brief", "--temperature", "0"], "hello\n\n[b]x\n/quit\nno\n"
    )

    assert (done.returncode, done.stderr) == (0, "")
    assert "20 cached" in done.stdout
    assert "tok/s" in done.stdout
    submits = cluster.all_of(m.Submit)
    assert len(submits) == 2
    assert submits[0].body.sampling.temperature == 0
    first = "system\nbe brief\nuser\nhello\nassistant\n"
    assert first in done.stdout
    # The second prompt is the first conversation, its answer, and the new question.
    assert f"{first}{first}\nuser\n[b]x\nassistant\n" in done.stdout


@pytest.mark.parametrize("system", [[], ["--system", "be brief"]])
@pytest.mark.parametrize("words", [[], ["--max-tokens", "100"]])
def test_a_long_conversation_goes_on_without_its_oldest_questions(
    gateway: GatewayProcess, cluster: FakeCluster, run: Run, system: list[str], words: list[str]
) -> None:
    """Each answer repeats its prompt. So the third prompt would be longer than the context."""
    questions = [f"question {number} {'abcdefghij' * 3}" for number in range(7)]
    done = run(["--url", gateway.url, *system, *words], "\n".join(questions))

    assert (done.returncode, done.stderr) == (0, "")
    assert "error" not in done.stdout
    assert "questions left out to fit into the context: " in done.stdout
    submits = cluster.all_of(m.Submit)
    assert len(submits) == len(questions)
    assert {submit.request.max_tokens for submit in submits} == {int((words or [0, MAX_MODEL_LEN // 4])[1])}
    last = gateway.http.post(
        "/detokenize", json={"tokens": submits[-1].body.token_ids, "skip_special_tokens": True}
    ).json()["prompt"]
    assert last.startswith("system\nbe brief\n") == bool(system)
    assert "question 6" in last
    assert not last.removeprefix("system\nbe brief\n").startswith("user\nquestion 0")


def test_a_question_that_leaves_less_than_the_longest_answer_is_asked(
    gateway: GatewayProcess, cluster: FakeCluster, run: Run
) -> None:
    done = run(["--url", gateway.url], "hello\n" + "01234 " * 75 + "\n")

    assert "error" not in done.stdout
    assert cluster.all_of(m.Submit)[-1].request.max_tokens < MAX_MODEL_LEN // 4


def test_an_answer_that_repeats_itself_is_stopped_and_its_loop_forgotten(
    gateway: GatewayProcess, cluster: FakeCluster, run: Run
) -> None:
    loop = gateway.http.post("/tokenize", json={"prompt": " il Corriere dii," * 20}).json()["tokens"]

    def unended(cluster: FakeCluster, submit: m.Submit) -> None:
        first_token_only(cluster, submit)
        for index in range(0, len(loop), 16):
            more = m.Tokens(submit.request.request_id, 1 + index, loop[index : index + 16])
            cluster.tokens(2, more)

    cluster.behaviour = unended
    done = run(["--url", gateway.url, "--max-tokens", "400"], "hello\nand now\n")

    assert done.stdout.count("stopped, because it repeats itself") == 2
    assert done.stdout.count("il Corriere") < 2 * 25
    first, second = cluster.all_of(m.Submit)
    cluster.wait_cancelled(first.request.request_id)
    prompt = gateway.http.post("/detokenize", json={"tokens": second.body.token_ids}).json()["prompt"]
    assert 1 <= prompt.count("Corriere") <= 2


@pytest.mark.quick
@pytest.mark.parametrize(
    "unit", ["x", "ab\n", "il Corriere dii, ", "a line of text\n" * 3 + "another\n", "word " * 40]
)
def test_a_loop_is_seen_whatever_repeats(unit: str) -> None:
    said = "To begin with, there is this: "
    endless = said + unit * 1000
    seen = next(length for length in range(len(endless)) if repeated(endless[:length]))
    assert seen < len(said) + max(5 * len(unit), 300)
    cut = endless[: seen - repeated(endless[:seen])]
    assert not repeated(cut)
    assert cut.startswith(said)


@pytest.mark.quick
def test_what_only_looks_like_a_loop_is_none() -> None:
    numbered = "".join(f"{number}. The next line of this list\n" for number in range(100))
    table = "| a | b |\n" + "|---|---|\n" + "".join(f"| {n} | {n * n} |\n" for n in range(90))
    for text in (numbered, table, "-" * 200, "", "ha " * 60, Path(__file__).read_text()):
        assert not [length for length in range(len(text)) if repeated(text[:length])]


def test_the_end_of_input_ends_the_chat(gateway: GatewayProcess, run: Run) -> None:
    done = run(["--url", f"{gateway.url}/v1/"], "")

    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_refused_question_is_told_and_forgotten(gateway: GatewayProcess, run: Run) -> None:
    done = run(["--url", gateway.url], "0123456789 " * 200 + "\nhello\n")

    assert done.returncode == 0
    assert "However, the prompt has" in done.stdout
    assert "(HTTP 400)" in done.stdout
    assert "user\nhello\nassistant\n" in done.stdout


@pytest.mark.parametrize("url", ["http://127.0.0.1:{port}", "nonsense", "http://[bad", "ftp://127.0.0.1"])
def test_no_server_is_one_line_and_exit_code_2(run: Run, url: str) -> None:
    done = run(["--url", url.format(port=free_port())], "hello\n")

    assert done.returncode == 2
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1
    assert "--url" in done.stderr


def test_a_wrong_key_is_one_line_and_exit_code_2(start: Start, run: Run) -> None:
    gateway, _ = start(api_key="secret")

    wrong = run(["--url", gateway.url, "--api-key", "guess"], "hello\n")
    right = run(["--url", gateway.url, "--api-key", "secret"], "hello\n")

    assert (wrong.returncode, len(wrong.stderr.splitlines())) == (2, 1)
    assert "--api-key or MOONCAKE_LITE_API_KEY" in wrong.stderr
    assert (right.returncode, right.stderr) == (0, "")


def begun(gateway: GatewayProcess, stdin: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", CODE, "--url", gateway.url]
    return subprocess.Popen(command, stdin=stdin, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.fixture
def terminal() -> Iterator[tuple[int, int]]:
    ends = pty.openpty()
    yield ends
    for end in ends:
        os.close(end)


@pytest.mark.parametrize("key", [signal.SIGINT, None], ids=["ctrl-c", "ctrl-d"])
def test_ctrl_c_and_ctrl_d_at_the_prompt_end_the_chat_cleanly(
    gateway: GatewayProcess, terminal: tuple[int, int], key: int | None
) -> None:
    ours, theirs = terminal
    process = begun(gateway, theirs)
    prompt = process.stdout.read(2)
    if key is None:
        os.write(ours, b"\x04")
    else:
        process.send_signal(key)
    _, written = process.communicate(timeout=LIMIT_S)

    assert (prompt, process.returncode, written) == ("> ", 0, "")


def test_ctrl_c_in_an_answer_stops_its_work_and_a_second_one_ends_the_chat(
    gateway: GatewayProcess, cluster: FakeCluster
) -> None:
    cluster.behaviour = lambda cluster, submit: None
    process = begun(gateway, subprocess.PIPE)
    for _ in range(2):
        process.stdin.write("hello\n")
        process.stdin.flush()
        submit = cluster.wait_for(m.Submit)
        process.send_signal(signal.SIGINT)
        cluster.wait_cancelled(submit.request.request_id)
        cluster.received.clear()
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    shown, written = process.communicate(timeout=LIMIT_S)

    assert (process.returncode, written) == (0, "")
    assert shown.split() == ["stopped", "stopped"]


def test_what_was_said_of_a_stopped_answer_stays_in_the_history(
    gateway: GatewayProcess, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = iter(["half an ans", "", ""])

    def interrupted(_: object, __: object, answer: StreamedAnswer, on_text: object) -> None:
        answer.text = next(answers)
        raise KeyboardInterrupt

    history: list[list[dict[str, str]]] = []
    real = chat_module.ask
    monkeypatch.setattr(chat_module, "stream_answer", interrupted)
    monkeypatch.setattr(
        chat_module, "ask", lambda *given: (history.append(list(given[2]["messages"])), real(*given))[1]
    )
    run(["--url", gateway.url], "one\ntwo\nthree\n/quit\n")

    said = [[message["content"] for message in messages] for messages in history]
    assert said == [["one"], ["one", "half an ans", "two"], ["one", "half an ans", "three"]]


def test_the_temperature_is_low_unless_the_user_names_one(
    gateway: GatewayProcess, cluster: FakeCluster, run: Run
) -> None:
    run(["--url", gateway.url], "hello\n")
    run(["--url", gateway.url, "--temperature", "0.7"], "hello\n")

    submits = cluster.all_of(m.Submit)
    assert [submit.body.sampling.temperature for submit in submits] == [TEMPERATURE, 0.7]
    assert TEMPERATURE < 0.5


def test_a_temperature_that_the_model_names_is_used(start: Start, run: Run, tmp_path: Path) -> None:
    folder = make_model_folder(tmp_path / "model")
    (folder / "generation_config.json").write_text('{"eos_token_id": 1, "temperature": 0.6, "top_k": 20}')
    gateway, cluster = start(model_folder=folder)
    run(["--url", gateway.url], "hello\n")
    gateway.http.post("/v1/completions", json={"prompt": "hello", "top_k": 3})
    gateway.close()

    submits = cluster.all_of(m.Submit)
    assert [(it.body.sampling.temperature, it.body.sampling.top_k) for it in submits] == [(0.6, 20), (0.6, 3)]


def test_an_answer_cannot_command_the_terminal(gateway: GatewayProcess, run: Run) -> None:
    done = run(["--url", gateway.url], "a\x1b]0;title\x07b\n")

    assert "\x1b" not in done.stdout
    assert "a]0;titleb" in done.stdout


@pytest.mark.quick
def test_the_line_under_an_answer() -> None:
    usage = {"prompt_tokens": 100, "completion_tokens": 11, "prompt_tokens_details": {"cached_tokens": 64}}

    answer = StreamedAnswer("text", "length", usage, {}, 0.5, 2.5)

    assert summary(answer) == (
        "100 prompt tokens, 64 cached · first text after 0.50 s · 5.0 tok/s · cut at the token limit"
    )


@pytest.mark.quick
@pytest.mark.parametrize(
    "option", [["--temperature", "3"], ["--temperature", "nan"], ["--top-p", "0"], ["--max-tokens", "0"]]
)
def test_options_out_of_range_are_refused_before_anything_is_sent(option: list[Any]) -> None:
    result = CliRunner().invoke(chat, option)

    assert result.exit_code == 2
    assert not isinstance(result.exception, UserError)
