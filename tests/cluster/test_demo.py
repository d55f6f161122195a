"""The demo as a user runs it: four clusters, identical tokens, and what is reused."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from mooncake_lite.cli import cli
from mooncake_lite.tools.demo import story

SHORT_TOKENS = 320
"""Of the document; the whole one takes five times 10 s to prefill beside other tests."""

SHORT_ANSWERS = {"a": 8, "b": 40, "c": 8}
"""The prompt of b ends in the middle of a block, which 40 tokens fill."""


@pytest.mark.timeout(900)  # four starts, and twelve answers of the real model
def test_the_demo_gives_the_same_tokens_from_every_source(
    tmp_path: Path, soak: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if soak == 1:
        monkeypatch.setattr(story, "DOCUMENT_TOKENS", SHORT_TOKENS)
        monkeypatch.setattr(story, "MAX_TOKENS", SHORT_ANSWERS)
    blocks_tokens = (story.DOCUMENT_TOKENS - 64) // 64 * 64
    rows_file = tmp_path / "rows.json"

    run = CliRunner().invoke(cli, ["demo", "--json", str(rows_file)])

    assert run.exit_code == 0, run.output
    assert run.output.rstrip().endswith("tokens identical: yes")
    result = json.loads(rows_file.read_text())
    asked = {"first": "abc", "restarted": "abc", "2 prefill": "abb", "reuse off": "abc"}
    assert [(row["cluster"], row["question"]) for row in result["rows"]] == [
        (cluster, question) for cluster, questions in asked.items() for question in questions
    ]
    assert result["identical"] is True
    print(json.dumps(result["speedup"]), result["warnings"])
    a, b, c, a_again, _, _, computed, other, own, *off = [row["cached_tokens"] for row in result["rows"]]
    assert a == {"dram": 0, "ssd": 0}
    assert b["dram"] >= blocks_tokens
    assert c["dram"] > b["dram"]
    assert a_again["ssd"] >= blocks_tokens
    assert [row["prefill_rank"] for row in result["rows"][6:9]] == [1, 2, 1]
    assert computed == {"dram": 0, "ssd": 0}
    assert other == b
    assert own == {"pages": b["dram"], "dram": 0, "ssd": 0}
    assert off == [{"dram": 0, "ssd": 0}] * 3
