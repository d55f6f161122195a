"""The demo as a user runs it: three clusters, identical tokens, and what is reused."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from mooncake_lite.cli import cli
from mooncake_lite.tools.demo import story

SHORT_TOKENS = 320
"""Of the document; the whole one takes four times 10 s to prefill beside other tests."""


def test_the_demo_gives_the_same_tokens_from_every_source(
    tmp_path: Path, soak: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if soak == 1:
        monkeypatch.setattr(story, "DOCUMENT_TOKENS", SHORT_TOKENS)
    blocks_tokens = (story.DOCUMENT_TOKENS - 64) // 64 * 64
    rows_file = tmp_path / "rows.json"

    run = CliRunner().invoke(cli, ["demo", "--json", str(rows_file)])

    assert run.exit_code == 0, run.output
    assert run.output.rstrip().endswith("tokens identical: yes")
    result = json.loads(rows_file.read_text())
    assert [row["question"] + " " + row["cluster"] for row in result["rows"]] == [
        f"{question} {cluster}" for cluster in ("first", "restarted", "reuse off") for question in "abc"
    ]
    assert result["identical"] is True
    print(json.dumps(result["speedup"]), result["warnings"])
    a, b, c, a_again, _, _, *off = [row["cached_tokens"] for row in result["rows"]]
    assert a == {"dram": 0, "ssd": 0}
    assert b["dram"] >= blocks_tokens
    assert c["dram"] > b["dram"]
    assert a_again["ssd"] >= blocks_tokens
    assert off == [{"dram": 0, "ssd": 0}] * 3
