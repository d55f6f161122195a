"""What the demo plays: three questions about one document, in four clusters.

Called by `demo.command`. Everything about HTTP is in `mooncake_lite.tools.client`, about the child process in
`launch.serve_child`, about judgement in `demo.report`; here is only the order of things and what to notice.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
from rich.console import Console
from rich.markup import escape
from rich.status import Status

from mooncake_lite.config.machine import usable_cores
from mooncake_lite.config.serve import ServeConfig
from mooncake_lite.launch.serve_child import Cluster
from mooncake_lite.launch.threads import threads_for
from mooncake_lite.tools.client import TRACED, AnswerFailed, StreamedAnswer, stream_answer
from mooncake_lite.tools.demo.document import DOCUMENT_TOKENS, document_text, shorten
from mooncake_lite.tools.demo.report import Row

START_LIMIT_S = 120.0
SILENT_LIMIT_S = 120.0
"""Before the demo gives up: a cold prefill of the document on one slow core."""

QUESTIONS = {
    "a": "What is the main idea of the paper?",
    "b": "What is the difference between prefill and decode?",
    "c": "Explain it again in simpler words.",
}
MAX_TOKENS = {"a": 24, "b": 80, "c": 32}
"""b is the longest: its answer must fill at least one block of 64 tokens, or c has nothing of it to reuse."""

NOTICE_FIRST = {
    "a": "(a) A question about the document. Nothing is cached: every prompt token is computed.",
    "b": "(b) Another question. The document's KV comes from the DRAM pool; the question alone is computed.",
    "c": "(c) A follow-up. More is cached than prompt (b) has tokens: the answer's own KV is reused too.",
}
NOTICE_RESTARTED = (
    "(d) The same again. KV comes from the HDF5 tier; what is asked for twice goes back into DRAM."
)
NOTICE_TWO = (
    "(e) Two prefill ranks take turns. Each has a prefix cache in its own pages, as one server has. "
    "Rank 1 computes (a). Rank 2 gets (b): its own cache is empty, and the document comes from the pool. "
    "Rank 1 gets (b) too, and finds the document in its own pages."
)
NOTICE_OFF = "(f) The same again, each prompt computed from its first token. The answers must be the same."
REUSE_OFF = "--no-enable-prefix-caching"
POOL_ALONE = ["--prefix-sharing", "off"]
"""The one prefill rank finds nothing in its own pages, so that all reuse is the pool's."""

TWO_PREFILL = ["--prefill", "2", "--policy", "round-robin"]
"""The default policy would give all questions to one rank, because both are idle and on one node."""


class Story:
    """Plays the demo and keeps its rows.

    model_dir   folder of the model to serve; its tokenizer counts the document's tokens
    work_dir    an empty folder of this run, for the tier and the logs
    """

    def __init__(
        self, console: Console, model_dir: Path, work_dir: Path, count_tokens: Callable[[str], int]
    ) -> None:
        self.console = console
        self.rows: list[Row] = []
        self._model_dir = model_dir
        self._work_dir = work_dir
        self._tier = ["--ssd-dir", str(work_dir / "tier"), "--ssd-bytes", "1GiB"]
        self._document = shorten(document_text(), DOCUMENT_TOKENS, count_tokens)
        self._document_tokens = count_tokens(self._document)

    def play(self) -> list[Row]:
        """All steps in order; the rows of the table. Raises ClusterError when a cluster fails."""
        self.console.print(
            f"The document: the first {self._document_tokens:,} tokens of docs/explain/paper.md"
        )
        self.console.print(
            "(The model is tiny. Do not look for wisdom: look at the times, and at the tokens.)"
        )
        pool = [*POOL_ALONE, *self._tier]
        with self._cluster("first", "four ranks: conductor, prefill, decode, store", pool) as cluster:
            for question, notice in NOTICE_FIRST.items():
                self.console.print(notice)
                self._ask(cluster, "first", question)
        with self._cluster("restarted", "the same tier folder, empty DRAM", pool) as cluster:
            self.console.print(NOTICE_RESTARTED)
            for question in QUESTIONS:
                self._ask(cluster, "restarted", question)
        # As many threads as one prefill rank has: questions come one at a time, and TTFT can be compared.
        threads = ["--threads", str(threads_for(ServeConfig(), usable_cores(), "prefill"))]
        with self._cluster("2 prefill", " ".join(TWO_PREFILL), TWO_PREFILL + threads) as cluster:
            self.console.print(NOTICE_TWO)
            for question in "abb":
                self._ask(cluster, "2 prefill", question)
        with self._cluster("reuse off", REUSE_OFF, [*POOL_ALONE, REUSE_OFF]) as cluster:
            self.console.print(NOTICE_OFF)
            for question in QUESTIONS:
                self._ask(cluster, "reuse off", question)
        return self.rows

    @contextlib.contextmanager
    def _cluster(self, name: str, what: str, flags: list[str]) -> Iterator[Cluster]:
        """A ready cluster, stopped at the end whatever happens."""
        sizes = ["--max-model-len", "2560", "--pool-bytes", "256MiB", "--kv-cache-bytes", "256MiB"]
        log = self._work_dir / f"{name.replace(' ', '-')}.log"
        cluster = Cluster([str(self._model_dir), *sizes, *flags], log)
        with cluster:
            with self._progress(f"Starting a cluster ({what})") as status:
                cluster.wait_ready(START_LIMIT_S, lambda detail: status.update(f"Starting: {escape(detail)}"))
            self.console.print(f"  watch it: mooncake-lite top --url {cluster.base_url}", highlight=False)
            yield cluster
            with self._progress("Stopping it"):
                cluster.stop()

    def _ask(self, cluster: Cluster, name: str, question: str) -> None:
        """One question: ask, keep the row, say in a line what came back."""
        body = {"messages": self._messages(question), "temperature": 0, "max_tokens": MAX_TOKENS[question]}
        limits, answer = httpx.Timeout(10.0, read=SILENT_LIMIT_S), StreamedAnswer()
        with (
            self.console.status("waiting for the first token") as status,
            httpx.Client(base_url=cluster.base_url, trust_env=False, timeout=limits) as client,
        ):

            def show(_: str) -> None:
                status.update(escape(answer.text.replace("\n", " ")[-80:]))

            stream_answer(client, body, answer, show, TRACED)
        if not answer.usage:
            raise AnswerFailed("the server broke off in the middle of an answer: no usage came")
        row = Row(question=question, cluster=name, answer=answer)
        self.rows.append(row)
        self._tell(row)

    def _messages(self, question: str) -> list[dict[str, str]]:
        """The conversation that ends with this question. What is shared, the document, comes first."""
        system = {"role": "system", "content": f"Answer questions about this document.\n\n{self._document}"}
        if question != "c":
            return [system, _user(question)]
        answered = next(row.answer for row in self.rows if row.question == "b")
        return [system, _user("b"), {"role": "assistant", "content": answered.text}, _user("c")]

    def _tell(self, row: Row) -> None:
        answer = row.answer
        line = f"  {row.question} on rank {row.prefill_rank}: first token after {answer.ttft_s:.3f} s"
        cached = f"cached {row.source} of {answer.prompt_tokens:,} tokens"
        self.console.print(f"{line}; {cached}", highlight=False)
        self.console.print(f"     {_glimpse(answer)}", style="dim", markup=False, highlight=False)

    @contextlib.contextmanager
    def _progress(self, what: str) -> Iterator[Status]:
        """A spinner on a terminal, and in any case one line with the seconds when it is done."""
        started = time.monotonic()
        with self.console.status(what) as status:
            yield status
        self.console.print(f"{what}: {time.monotonic() - started:.1f} s", highlight=False)


def _user(question: str) -> dict[str, str]:
    return {"role": "user", "content": QUESTIONS[question]}


def _glimpse(answer: StreamedAnswer) -> str:
    """The beginning of an answer on one line of at most 75 characters."""
    line = " ".join(answer.text.split())
    return f'"{line[:70]}..."' if len(line) > 73 else f'"{line}"'
