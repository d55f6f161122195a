"""Files that an editor or a shell has written with a byte order mark are read as those without one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mooncake_lite.config.reading import read_toml
from mooncake_lite.errors import RequestError, UserError
from mooncake_lite.gateway.bodies import parse_chat, parse_completion, parse_detokenize, parse_tokenize
from mooncake_lite.labs.grading import read_marks
from mooncake_lite.labs.lab import lab_in
from mooncake_lite.labs.questions import read_answers
from mooncake_lite.profiles.file import SHIPPED, read_profile
from mooncake_lite.simulator.sweep import read_sweep
from mooncake_lite.workloads.traces import read_trace

pytestmark = pytest.mark.quick

ROOT = Path(__file__).parents[3]
LINE = '{"timestamp": 0, "input_length": 5, "output_length": 1, "hash_ids": [1]}\n'
(PROFILE,) = (ROOT / "mooncake_lite" / "profiles" / SHIPPED).glob("SmolLM2-135M-Instruct.json")
LAB = lab_in(ROOT, 0)


def sweep(path: Path) -> Any:
    path.with_name("made.jsonl").write_text(LINE)
    return read_sweep(path)


def answers(path: Path) -> Any:
    folder = path.parent / LAB.folder
    folder.mkdir(parents=True, exist_ok=True)
    path.rename(folder / "answers.toml")
    return read_answers(path.parent, LAB, "answers.toml")


FILES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "trace": (read_trace, LINE * 2),
    "config": (read_toml, "prefill = 2\n"),
    "config with a table": (read_toml, "[serve]\nprefill = 2\n"),
    "sweep": (sweep, 'trace = "made.jsonl"\n[vary]\nnodes = ["1P1D", "2P1D"]\n'),
    "profile": (read_profile, PROFILE.read_text()),
    "answers": (answers, "first_rank = 12\n"),
    "marks": (read_marks, "student,prediction,report\nada,1,\n"),
}


@pytest.mark.parametrize("name", FILES)
def test_a_file_with_a_byte_order_mark_is_read(name: str, tmp_path: Path) -> None:
    read, text = FILES[name]
    found = []
    for encoding in ("utf-8", "utf-8-sig"):
        (tmp_path / "file").write_text(text, encoding=encoding)
        found.append(read(tmp_path / "file"))
    assert found[1] == found[0]


@pytest.mark.parametrize("name", ["trace", "config", "sweep", "profile"])
def test_a_file_in_utf_16_is_refused_with_what_to_do(name: str, tmp_path: Path) -> None:
    read, text = FILES[name]
    (tmp_path / "file").write_text(text, encoding="utf-16")
    with pytest.raises(UserError, match="this is UTF-16; save it as UTF-8"):
        read(tmp_path / "file")


@pytest.mark.parametrize(
    ("parse", "body"),
    [
        (parse_completion, '{"prompt": "x", "seed": 1}'),
        (parse_chat, '{"messages": [{"role": "user", "content": "x"}], "seed": 1}'),
        (parse_tokenize, '{"prompt": "x"}'),
        (parse_detokenize, '{"tokens": [1]}'),
    ],
)
def test_a_body_from_a_file_with_a_byte_order_mark_is_read(parse: Callable[[bytes], Any], body: str) -> None:
    assert parse(body.encode("utf-8-sig")) == parse(body.encode())
    with pytest.raises(RequestError, match="this is UTF-16; save it as UTF-8"):
        parse(body.encode("utf-16"))
