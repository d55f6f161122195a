"""nano_mooncake.py: its tokens are the engine's, it stays small and on its own, and it always ends."""

from __future__ import annotations

import ast
import importlib.util
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import threading
from contextlib import closing
from pathlib import Path
from queue import SimpleQueue
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mooncake_lite.model.resolve import resolve_model
from mooncake_lite.model.tokenizer import load_tokenizer
from store.keys import prefix_keys
from tests.patience import wait_until
from tests.tutorials import nano_prompts
from tests.tutorials.pages import fences

ROOT = Path(__file__).resolve().parents[2]
FILE = ROOT / "tutorials" / "nano_mooncake.py"
CHAPTER = ROOT / "tutorials" / "00b_mooncake_in_300_lines.md"
OURS = {path.parent.name for path in ROOT.glob("*/__init__.py")}
LINES = 300
LIMIT_S = 60.0


@pytest.fixture(scope="module")
def nano() -> ModuleType:
    """Import the file. Its choice for NumPy's threads is undone."""
    spec = importlib.util.spec_from_file_location("nano_mooncake", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OPENBLAS_NUM_THREADS", os.environ.get("OPENBLAS_NUM_THREADS", "1"))
        spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def pulled() -> Path:
    """Return the folder of the default model, which the file expects in the cache."""
    return resolve_model("default")


@pytest.fixture(scope="module")
def expected() -> list[dict[str, Any]]:
    return json.loads(nano_prompts.FILE.read_text())["prompts"]


def run(waves: list[list[dict[str, Any]]], *, decodes: int = 1, pool_blocks: int = 512) -> dict[str, Any]:
    """Answer waves of prompts in a process of its own: what nano_worker.py writes."""
    task = {"prefills": 2, "decodes": decodes, "pool_blocks": pool_blocks}
    task |= {"waves": [[one["text"] for one in wave] for wave in waves]}
    task |= {"answer_tokens": nano_prompts.ANSWER_TOKENS}
    done = subprocess.run(
        [sys.executable, "-m", "tests.tutorials.nano_worker"],
        input=json.dumps(task),
        capture_output=True,
        text=True,
        timeout=4 * LIMIT_S,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def threads_of(nano: ModuleType) -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if isinstance(thread, nano.Store)]


def test_its_greedy_tokens_are_the_engine_s_with_and_without_reuse(
    pulled: Path, expected: list[dict[str, Any]]
) -> None:
    waves = [expected[:3], expected[3:]]
    tokenizer = load_tokenizer(pulled)
    found = run(waves)
    for request, one in zip(itertools.chain(*found["requests"]), expected, strict=True):
        messages = [{"role": "user", "content": one["text"]}]
        assert request["prompt"] == tokenizer.encode(tokenizer.apply_chat_template(messages))
        assert request["answer"] == one["answer"], one["text"]
    assert found["requests"][0][0]["cached"] == 0
    assert [request["cached"] > 250 for request in found["requests"][1]] == [True, True, False, True, False]
    assert found["threads"] == 0


@pytest.mark.parametrize(("decodes", "pool_blocks"), [(0, 8), (1, 0)], ids=["colocated", "no pool"])
def test_tokens_stay_the_same_in_a_pool_that_evicts_and_with_ranks_that_do_both(
    pulled: Path, expected: list[dict[str, Any]], decodes: int, pool_blocks: int
) -> None:
    some = [expected[0], expected[5], expected[1], expected[5]]
    found = run([[one] for one in some], decodes=decodes, pool_blocks=pool_blocks)
    assert [request["answer"] for [request] in found["requests"]] == [one["answer"] for one in some]
    assert (found["requests"][-1][0]["cached"] > 0) == (pool_blocks > 0)
    assert max(found["held"]) == pool_blocks


def test_the_committed_answers_are_what_the_engine_gives_today(pulled: Path, soak: int) -> None:
    if soak == 1:
        pytest.skip("takes the engine half a minute; run by make soak")
    committed = json.loads(nano_prompts.FILE.read_text())
    made = nano_prompts.choose(pulled)
    for one in (*committed["prompts"], *made["prompts"]):
        assert one.pop("margin") >= nano_prompts.MARGIN  # its last digits differ from machine to machine
    assert made == committed


@pytest.mark.quick
def test_the_committed_prompts_are_eight_of_up_to_512_tokens_with_a_margin() -> None:
    prompts = json.loads(nano_prompts.FILE.read_text())["prompts"]
    assert len(prompts) == 8
    assert 400 < max(one["prompt_tokens"] for one in prompts) <= 512
    assert min(one["margin"] for one in prompts) >= 1e-3


@pytest.mark.quick
def test_it_has_at_most_300_lines_and_imports_nothing_of_ours() -> None:
    text = FILE.read_text()
    assert len(text.splitlines()) <= LINES
    names = {
        name
        for node in ast.walk(ast.parse(text))
        for name in (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [node.module or "."]
            if isinstance(node, ast.ImportFrom)
            else []
        )
    }
    tops = {name.split(".")[0] for name in names}
    assert len(OURS) >= 5
    assert tops - set(sys.stdlib_module_names) == {"numpy", "safetensors", "tokenizers", "xxhash"}
    assert tops & OURS == set()


@pytest.mark.quick
def test_each_function_and_class_names_a_file_of_ours_that_is_there() -> None:
    nodes = [
        node
        for node in ast.walk(ast.parse(FILE.read_text()))
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name != "__init__"
    ]
    assert len(nodes) > 20
    for node in nodes:
        named = re.findall(r"[\w/]+\.py", ast.get_docstring(node) or "")
        assert named, node.name
        assert [name for name in named if not (ROOT / name).exists()] == [], node.name


@pytest.mark.quick
def test_its_keys_are_the_public_standard_s(nano: ModuleType) -> None:
    tokens = [(7 * i) % 49152 for i in range(100)]
    assert nano.chained_keys(tokens) == prefix_keys(tokens, nano.BLOCK)
    assert nano.chained_keys(tokens, nano.chained_keys(tokens[:40])) == nano.chained_keys(tokens)
    assert nano.chained_keys(tokens[:15]) == []


@pytest.mark.quick
def test_a_full_store_evicts_the_end_of_the_prefix_that_was_not_used_for_longest(nano: ModuleType) -> None:
    inbox: SimpleQueue = SimpleQueue()
    store = nano.Store("store", SimpleNamespace(inbox=inbox), 4)
    for keys in ("abc", "x"):
        store.keep({key: np.zeros(1) for key in keys})
    assert len(store.leading(list("abz"))) == 2
    store.keep({"y": np.zeros(1), "z": np.zeros(1)})
    reports = [inbox.get_nowait() for _ in range(3)]
    assert reports[-1] == ("changed", "store", ["y", "z"], ["c", "x"])
    assert list(store.blocks) == ["b", "a", "z", "y"]


@pytest.mark.quick
def test_the_chapter_shows_lines_of_the_file_from_top_to_bottom() -> None:
    source = FILE.read_text().splitlines()
    page = CHAPTER.read_text().splitlines()
    shown = [page[fence.start : fence.stop] for fence in fences(page) if fence.kind == "py"]
    assert len(shown) > 8
    reached = 0
    for lines in shown:
        places = [at for at in range(len(source)) if source[at : at + len(lines)] == lines]
        assert len(places) == 1, "\n".join(lines)
        assert places[0] >= reached, "\n".join(lines)
        reached = places[0] + len(lines)
    assert sum(map(len, shown)) > len(source) / 3


def conductor(nano: ModuleType, near: tuple[int, int], pool: int, queue_s: tuple[float, float]) -> Any:
    """Return a Conductor of two prefill ranks without threads; near, pool: blocks known of a prompt."""
    one = object.__new__(nano.Mooncake)
    one.prefills = [SimpleNamespace(name="0"), SimpleNamespace(name="1")]
    keys = range(100)
    one.index = {"0": set(keys[: near[0]]), "1": set(keys[: near[1]]), "store": set(keys[:pool])}
    one.queue_s = {"0": queue_s[0], "1": queue_s[1]}
    one.token_s, one.step_s = 0.01, 0.05
    return one


@pytest.mark.quick
@pytest.mark.parametrize(
    ("near", "pool", "queue_s", "chosen"),
    [
        ((0, 0), 0, (0.0, 0.0), ("0", False)),
        ((0, 20), 20, (0.0, 0.0), ("1", False)),
        ((0, 20), 20, (0.0, 1.0), ("0", True)),
        ((14, 20), 20, (0.0, 1.0), ("0", False)),
        ((0, 0), 20, (3.0, 0.0), ("1", True)),
    ],
    ids=["nothing is cached", "near", "busy, so fetch", "below the threshold", "idle"],
)
def test_algorithm_1_chooses_the_least_predicted_ttft(
    nano: ModuleType,
    near: tuple[int, int],
    pool: int,
    queue_s: tuple[float, float],
    chosen: tuple[str, bool],
) -> None:
    request = SimpleNamespace(prompt=[0] * 480, reusable=list(range(29)))
    fetch = conductor(nano, near, pool, queue_s).schedule(request)
    assert (request.rank.name, fetch) == chosen


@pytest.mark.quick
def test_a_request_that_would_miss_a_limit_is_refused_with_the_figures(nano: ModuleType) -> None:
    request = SimpleNamespace(prompt=[0] * 480, reusable=[])
    with pytest.raises(ValueError, match=r"refused: predicted TTFT 65\.8 s, TBT 0\.05 s"):
        conductor(nano, (0, 0), 0, (61.0, 61.0)).schedule(request)
    slow = conductor(nano, (0, 0), 0, (0.0, 0.0))
    slow.step_s = 2.5
    with pytest.raises(ValueError, match=r"TBT 2\.50 s"):
        slow.schedule(request)


def test_threads_end_when_the_caller_fails_and_when_one_of_them_does(nano: ModuleType, pulled: Path) -> None:
    def interrupted() -> None:
        with closing(nano.Mooncake()):
            assert len(threads_of(nano)) == 4
            raise KeyboardInterrupt

    def broken() -> None:
        with closing(nano.Mooncake()) as mooncake:
            mooncake.store.inbox.put(("get", None, None))
            mooncake.wait(lambda: False)

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert threads_of(nano) == []
    with pytest.raises(RuntimeError, match="store failed"):
        broken()
    assert threads_of(nano) == []


def program(*arguments: str, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(FILE), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | environment,
    )


def test_the_command_answers_each_prompt_in_its_order(pulled: Path) -> None:
    out, error = program("What is the capital of France?", "Name one colour. \udcff").communicate(
        timeout=LIMIT_S
    )
    assert error == ""
    lines = out.splitlines()
    assert lines[0] == "The capital of France is Paris."
    assert [
        bool(re.fullmatch(r"\[\d+ tokens, \d+ cached, TTFT \d+\.\d\d s\]", line)) for line in lines
    ].count(True) == 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], 'usage: python nano_mooncake.py "PROMPT" ...'),
        (["--help"], 'usage: python nano_mooncake.py "PROMPT" ...'),
        (["word " * 2000], "2031 prompt tokens + 64 to answer: at most 2048"),
    ],
    ids=["nothing", "an option", "too long"],
)
def test_bad_input_is_one_line_and_exit_code_2(pulled: Path, arguments: list[str], words: str) -> None:
    started = program(*arguments)
    out, error = started.communicate(timeout=LIMIT_S)
    assert (started.returncode, out) == (2, "")
    assert error.startswith("nano_mooncake: ")
    assert words in error
    assert error.count("\n") == 1


def test_without_the_model_it_says_how_to_get_it(tmp_path: Path) -> None:
    started = program("Hello", MOONCAKE_LITE_CACHE=str(tmp_path))
    _, error = started.communicate(timeout=LIMIT_S)
    assert (started.returncode, error.count("\n")) == (2, 1)
    assert error.endswith("run `mooncake-lite model pull`\n")


def test_ctrl_c_in_the_middle_of_a_prompt_ends_the_process_in_one_line(pulled: Path) -> None:
    started = program("word " * 500)
    try:
        tasks = f"/proc/{started.pid}/task"  # the Conductor and four others
        assert wait_until(lambda: len(os.listdir(tasks)) >= 5, LIMIT_S)
        started.send_signal(signal.SIGINT)
        out, error = started.communicate(timeout=LIMIT_S)
    finally:
        started.kill()
        started.wait()
    assert (started.returncode, out, error) == (2, "", "nano_mooncake: stopped\n")
