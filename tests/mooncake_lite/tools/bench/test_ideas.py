"""The benchmark of ideas: what its figures mean, and that both sides of a row do the same work."""

from __future__ import annotations

import contextlib
import http.server
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mooncake_lite.errors import ClusterError
from mooncake_lite.model.config import load_config
from mooncake_lite.model.forward import Model, load_model
from mooncake_lite.profiles.file import Profile
from mooncake_lite.tools.bench import cluster as clusters
from mooncake_lite.tools.bench import ideas, ideas_cluster, ideas_members, ideas_overlap
from mooncake_lite.tools.bench.cluster import Ask, Reply, stream_times
from mooncake_lite.tools.bench.engine_sides import random_prompts
from mooncake_lite.tools.bench.ideas_cluster import Crowd, figures, on_a_fast_engine
from mooncake_lite.tools.bench.ideas_rank import Rank, separately
from mooncake_lite.tools.bench.result import Row
from mooncake_lite.tools.streams import Prompt, Stream
from scheduler.costs.load_or_compute import PROBE_EVERY
from tests import emulation
from tests.cluster.tiny import words
from tests.mooncake_lite.tools.bench.conftest import VOCABULARY


@pytest.fixture(scope="module")
def model(tiny: Path) -> Model:
    return load_model(tiny)


# ------------------------------------------------------------------------------------ one rank


def test_n_answers_are_those_of_n_requests_and_take_fewer_pages(model: Model) -> None:
    (prompt,) = random_prompts(1, 40, VOCABULARY)
    rank = Rank(model, 400, "off")
    together, apart = rank.ask([prompt], 20, n=4), separately(rank, prompt, 4, 20)
    assert together.tokens == apart.tokens
    assert len({tuple(answer) for answer in apart.tokens}) == 4
    # 40 + 20 tokens are 4 pages; the first 2 are full pages of the prompt
    assert (together.pages, apart.pages) == (2 + 4 * 2, 4 * 4)


@pytest.mark.parametrize(("sharing", "pages"), [("off", 0), ("hash", 4), ("radix", 7)])
def test_a_rank_keeps_its_pages_for_the_next_request(model: Model, sharing: str, pages: int) -> None:
    first, other = random_prompts(2, 192, VOCABULARY)
    rank = Rank(model, 400, sharing)
    rank.ask([first], 1)
    pages_of = rank._state.pages
    free = len(pages_of.free)
    rank.ask([first[:120] + other[120:]], 1)
    # 192 tokens are 12 pages; new ones stay in the cache, by hash as blocks and by radix as pages
    assert free - len(pages_of.free) == (0 if sharing == "off" else 12 - pages)


# ------------------------------------------------------------------------------------ clusters


class Cluster(http.server.BaseHTTPRequestHandler):
    """Streams as many pieces as tokens are asked for. Every 17th answer of one token has reused tokens."""

    asked = 0

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert body["ignore_eos"] is True
        self.send_response(200)
        self.end_headers()
        Cluster.asked += body["max_tokens"] == 1
        reused = 128 * (Cluster.asked % (PROBE_EVERY + 1) == 0)
        span = {"stage": "compute", "seconds": 0.1, "count": len(body["prompt"]) - reused}
        store = {"stage": "store", "seconds": 0.01, "count": 1}
        answer = {"choices": [{"text": "a"}], "mooncake_lite": {"spans": [span, store]}}
        event = json.dumps(answer).encode()
        for _ in range(body["max_tokens"]):
            self.wfile.write(b"data: " + event + b"\n\n")
        self.wfile.write(b"data: [DONE]\n\n")

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def port() -> Iterator[int]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Cluster)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server.server_address[1]
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.quick
def test_ttft_begins_when_a_request_is_sent_and_the_longest_gap_is_a_median_of_answers() -> None:
    found = [(0.0, [1.0, 2.0, 3.0]), (2.0, [5.0, 6.0, 11.0]), (4.0, [6.0, 8.0, 10.0])]
    replies = [Reply(Ask(0.0, [1], 3), sent_s, times=times) for sent_s, times in found]
    assert figures(replies) == pytest.approx((2000.0, 2000.0, 2000.0))


@pytest.mark.quick
def test_every_stream_has_the_times_of_its_own_pieces(port: int) -> None:
    times = stream_times(port, random_prompts(2, 8, VOCABULARY), 5)
    assert [len(each) for each in times] == [5, 5]
    assert all(each == sorted(each) for each in times)


@pytest.mark.quick
def test_enough_pages_are_more_than_any_answer_needs() -> None:
    assert Crowd(sequences=8, tokens=128, new=130, pages=80).enough == 8 * 18


@pytest.mark.quick
def test_members_that_answer_otherwise_than_one_rank_are_an_error(
    tiny: Path, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = contextlib.nullcontext(SimpleNamespace(port=port))
    monkeypatch.setattr(ideas_members, "started", lambda flags: started)
    answers = iter([("a", ""), ("b", "")])

    def answered(url: str, prompts: list[Prompt]) -> tuple[list[Stream], float]:
        text, error = next(answers)
        return [Stream(text, [0.0, 1.0, 2.0], error)], 0.0

    monkeypatch.setattr(ideas_members, "play", answered)
    with pytest.raises(ClusterError, match="512 tokens on one rank and on 2 members: answers differ"):
        ideas_members.context(tiny, VOCABULARY, 2, 512, 2, 1)
    answers = iter([("a", ""), ("", "it broke off")])
    with pytest.raises(ClusterError, match="on 2 members: it broke off"):
        ideas_members.context(tiny, VOCABULARY, 2, 512, 2, 1)


@pytest.mark.quick
def test_a_fast_engine_that_never_loads_is_an_error(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ideas_cluster, "ROUNDS", 0)
    with pytest.raises(ClusterError, match="of 0 requests to a fast engine 0 loaded their prefix"):
        on_a_fast_engine(port, VOCABULARY, 20, 10)


def test_a_quick_run_has_each_idea_beside_its_absence(
    tiny: Path, tmp_path: Path, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through a server that answers at once in place of each cluster."""
    flags: list[list[str]] = []

    @contextlib.contextmanager
    def started(given: list[str], profile: Profile | None = None) -> Iterator[SimpleNamespace]:
        flags.append([*given, "--profile", "file"] if profile else given)
        yield SimpleNamespace(port=port)

    shipped = emulation.profile_of(emulation.model_folder(tmp_path / "model"))
    monkeypatch.setattr(clusters, "started", started)
    monkeypatch.setattr(ideas_overlap, "started", started)
    monkeypatch.setattr(ideas_members, "started", started)
    monkeypatch.setattr(clusters, "scaled_profile", lambda *_: shipped)
    words().save(str(tiny / "tokenizer.json"))
    template = {"chat_template": "{% for message in messages %}{{ message.content }}{% endfor %}"}
    (tiny / "tokenizer_config.json").write_text(json.dumps(template))
    rows = ideas.run(quick=True, folder=tiny)
    assert list(dict.fromkeys(row.name.partition(":")[0] for row in rows)) == NAMES
    assert all(row.ours > 0 and row.peer is not None and row.peer.value > 0 for row in rows)
    check_flags(flags, rows, tiny)


NAMES = [
    *("prefix sharing, hash", "prefix sharing, radix", "n = 4"),
    *("drafts by prompt lookup, 2 threads", "drafts by prompt lookup, 1 thread"),
    "prefix by layers beside a pass",
    *("preemption, swap", "preemption, swap, no prefix caching"),
    *("load", "compute, engine 1,000 times as fast"),
    "from the first token until all is stored, by layers",
    "from the first token until the second token, by layers",
    "from the first token until all is stored, by chunks",
    "from the first token until the second token, by chunks",
    "to the first token, two ranks in a pipeline",
    "decode on two tensor parallel members of one thread",
    "decode on 2 members with pages for 256 tokens each",
    "colocated with a pool, shared prefix",
    *("split, no shared prefix", "split, shared prefix"),
    *("pooled, no shared prefix", "pooled, shared prefix"),
    *("colocated with prefix sharing, shared prefix", "colocated with chunked prefill, no shared prefix"),
    "TPOT with --trace, one stream of 64 + 17 tokens",
]


def check_flags(flags: list[list[str]], rows: list[Row], folder: Path) -> None:
    """Assert that each cluster is one that `serve` accepts, and that all of them serve the folder."""
    from mooncake_lite.config.reading import config_from
    from mooncake_lite.model.sizes import context_length

    assert len(flags) == 5 + 2 + 3 + 2 + 2 + 2 + 6 + 2
    for given in flags:
        assert given[0] == str(folder)
        values: dict[str, Any] = {}
        for flag, value in zip(given[1:], [*given[2:], "--"]):
            if flag.startswith("--no-"):
                values[flag.removeprefix("--no-")] = False
            elif flag.startswith("--"):
                read = int(value) if value.isdigit() else value
                values[flag.removeprefix("--")] = True if value.startswith("--") else read
        config = config_from({"model": given[0], **values}, "a benchmark")
        if config.engine == "real":
            most = 512 if config.batch_invariant else 127  # a context has a unit on each of two members
            assert context_length(config, load_config(folder)) <= most
