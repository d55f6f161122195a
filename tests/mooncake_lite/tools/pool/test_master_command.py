"""`mooncake-lite store master`: where it may listen, and one line for whatever is wrong."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from mooncake_lite.cli import main
from tests.store.mooncake_store.running import master_process, new_store


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--host", "0.0.0.0"], "--host 0.0.0.0: other machines can reach it; give --key-file as well"),
        (["--host", "no such host"], "--host 'no such host' is no address of this machine"),
        (["--host", ""], "--host '' is no address of this machine"),
    ],
)
@pytest.mark.quick
def test_an_address_that_cannot_be_listened_at_is_one_line(
    capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    assert main(["store", "master", "--rpc-port", "0", *words]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert message in said


@pytest.mark.quick
@pytest.mark.parametrize("content", [b"", b"no keys", b"\x94\xa1a\xa1b\xa1c\xa1d"])
def test_a_file_that_holds_no_keys_is_named(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, content: bytes
) -> None:
    file = tmp_path / "keys"
    file.write_bytes(content)
    assert main(["store", "master", "--rpc-port", "0", "--key-file", str(file)]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert str(file) in said


def test_a_master_listens_at_a_host_name_too() -> None:
    with master_process(10_000, "--host", "localhost") as (address, _):
        store = new_store(address)
        assert (store.put("a", b"1"), store.get("a"), store.close()) == (0, b"1", 0)


@pytest.mark.quick
def test_a_key_file_that_cannot_be_read_and_a_port_that_is_taken_are_one_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["store", "master", "--rpc-port", "0", "--key-file", str(tmp_path / "a" / "b")]) == 2
    assert f"--key-file {tmp_path}/a/b cannot be read: No such file or directory" in capsys.readouterr().err
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        assert main(["store", "master", "--rpc-port", str(other.getsockname()[1])]) == 2
    assert "store master: " in capsys.readouterr().err
