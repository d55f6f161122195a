"""The commands of scenarios: a line of words becomes an event.

    arrived a 40 tokens keys x1..x2 max 10 limit 5     a request; without keys nothing may be reused
    arrived a 40 tokens answers 3                      a request for three answers: branches 0, 1 and 2
    arrived a 16 tokens ttft 500 tbt 35                limits in milliseconds
    arrived a 16 tokens class 2 tenant t               a service class, 0 the highest; a tenant
    cancelled a | cancelled a branch 1 | cancelled a answered
    prefilled a | loaded a | ended a                   answers of the rank that has the latest order about a
    chunk a 0..2                                       blocks 0 to 2 of those that it stores are in the pool
    ended a tokens 5                                   its answer was whole, and had 5 tokens
    computed a 8                                       8 prompt tokens, on a rank that decodes on
    prefilled a finished | prefilled a finished 0 2    the first token (of these branches) was the last one
    ended a branch 1 | preempted a 50 tokens branch 1  of another branch than 0
    failed a why | failed a late why                   late: bytes may still land
    failed a code engine_error why                     for good
    preempted a 50 tokens keys x1..x3                  late: bytes of a swap may still land
    swap a 49 tokens keys x1..x3                       the rank asks where the KV of these tokens may go
    swapped a 50 tokens keys x1..x3                    it is there
    wants 2 #1 x3 after x1 x2                          rank 2 asks where x3 may go, which follows x2
    put #1 | put #1 failed | put #1 late               the places of that GrantPuts are written, or are not
    read #1 | read #1 bad x2 | read #1 problem why | read #1 late why
    copied #1 | copied #1 failed | copied #1 late
    checked #1 | checked #1 bad 2 | checked #1 problem why     bad: how many of the first ones
    saved 3 written x1                                 rank 3 says what became of saves
    evicted 3 x1 | removed 3 x1 | removed 3 x1 unsure
    command 1 rm x1 x2 [force] [hard] [soft 5]         a pool command; abandoned 1
    listed #1 a/1 b/2                                  what a rank answers to the first ListOpen
    undelivered StartPrefill                           the latest order of this name could not be sent
    received a | received a branch 1                   its gateway has every token; `ended a unheard`: not yet
    recalled a 3 keys x1 | recalled a 0:2 1:4 2:whole  what its gateway has, in tokens, by branch
    lost 3 died | lost 3 failed: why | lost 3 silent unseen    unseen: it may write still
    gateway-lost died | gateway-lost final died | gateway-ready | stop why

`attempt 1` and `epoch 1` after an answer about a request name another one than the latest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from mooncake_lite.control import effects as fx
from mooncake_lite.control import events as ev
from mooncake_lite.control.request import client_id_of
from mooncake_lite.simulator.workload import mixed

SUMS = [21, 22]
BLOCK_TOKENS = 16


def digest_of(key: int) -> int:
    """A second digest for a block of which only the key is known."""
    return mixed(key, 2)


def after(words: Sequence[str], word: str) -> str | None:
    """The word that follows this one; None when it is not there."""
    return words[words.index(word) + 1] if word in words else None


def words_after(words: list[str], word: str) -> list[str]:
    """All words after this one; none when it is not there."""
    return words[words.index(word) + 1 :] if word in words else []


TRANSFERS = (fx.LoadBlocks, fx.CopyBlocks, fx.CheckBlocks)


class Context:
    """What commands refer to.

    names      key -> its name
    orders     that the control plane has given
    recalls    of answers
    requests   that have arrived
    """

    def __init__(self) -> None:
        self.names: dict[int, str] = {}
        self.orders: list[Any] = []
        self.recalls: list[fx.Recall] = []
        self.requests: list[str] = []

    def keys(self, words: Sequence[str]) -> list[int]:
        """Keys by their names, up to the first word that is none; x1..x3 stands for x1 x2 x3."""
        found = []
        for word in words:
            first, _, last = word.partition("..")
            stem = first.rstrip("0123456789")
            if stem == first or not stem:
                break
            begin = int(first[len(stem) :])
            end = int(last[len(stem) :]) if last else begin
            for name in (f"{stem}{number}" for number in range(begin, end + 1)):
                key = mixed(int.from_bytes(name.encode(), "little"))
                self.names[key] = name
                found.append(key)
        return found

    def order(self, *kinds: type, **fields: Any) -> Any:
        """The latest order of one of these kinds with these fields."""
        for order in reversed(self.orders):
            if isinstance(order, kinds) and all(getattr(order, name) == fields[name] for name in fields):
                return order
        raise AssertionError(f"there was no {' or '.join(kind.__name__ for kind in kinds)} with {fields}")

    def numbered(self, kind: type, words: list[str]) -> Any:
        """The order of this kind whose number stands second. Transfers of store ranks are counted by us."""
        number = int(words[1].removeprefix("#"))
        return self.transfers[number - 1] if kind in TRANSFERS else self.order(kind, number=number)

    @property
    def transfers(self) -> list[Any]:
        """The orders so far that move or compare blocks."""
        return [order for order in self.orders if isinstance(order, TRANSFERS)]

    def job(self, words: list[str], *kinds: type) -> tuple[int, int, str, int]:
        """(rank, epoch, request, attempt) of an answer to the latest of these orders about a request."""
        order = self.order(*kinds, request_id=words[1])
        return (
            order.rank,
            int(after(words, "epoch") or 0),
            words[1],
            int(after(words, "attempt") or order.attempt),
        )


DECODES = fx.StartDecode, fx.StartServe
"""Orders that a rank answers with the end of the request."""


def numbers(words: Sequence[str], word: str) -> list[int]:
    """The numbers behind a word: 0 if there are none, and nothing without the word."""
    if word not in words:
        return []
    return [int(number) for number in words[words.index(word) + 1 :] if number.isdecimal()] or [0]


def arrived(context: Context, words: list[str]) -> ev.Event:
    keys = context.keys(words_after(words, "keys"))
    context.requests.append(words[1])
    limit_s = float(after(words, "limit") or "inf")
    max_tokens = int(after(words, "max") or 10)
    digests = list(map(digest_of, keys))
    n = int(after(words, "answers") or 1)
    class_id = int(after(words, "class") or 0)
    limits_s = [float(after(words, name) or "inf") / 1000 for name in ("ttft", "tbt")]
    return ev.RequestArrived(
        words[1],
        int(words[2]),
        max_tokens,
        keys,
        digests,
        class_id,
        limit_s,
        n,
        after(words, "tenant") or "",
        *limits_s,
        "gateway",
        session=after(words, "session") or "",
    )


def prefilled(context: Context, words: list[str]) -> ev.Event:
    job = context.job(words, fx.StartPrefill)
    order = context.order(fx.StartPrefill, request_id=words[1])
    computed = BLOCK_TOKENS * (len(order.store) + (order.tail is not None))  # the tail counts as full
    checksums = [SUMS] * len(order.store)
    compute_s = 0.1 * computed / BLOCK_TOKENS
    return ev.PrefillEnded(*job, checksums, numbers(words, "finished"), 0.01, compute_s, 0.01, computed)


def chunk_stored(context: Context, words: list[str]) -> ev.Event:
    first, _, last = words[2].partition("..")
    count = int(last or first) + 1 - int(first)
    return ev.ChunkStored(*context.job(words, fx.StartPrefill), int(first), [SUMS] * count)


def failed(context: Context, words: list[str]) -> ev.Event:
    job = context.job(words, fx.StartPrefill, *DECODES)
    return ev.RequestFailed(*job, words[-1], "late" in words, "code" in words, after(words, "code") or "")


def preempted(context: Context, words: list[str]) -> ev.Event:
    keys = context.keys(words_after(words, "keys"))
    job, branch = context.job(words, *DECODES), int(after(words, "branch") or 0)
    digests, late = list(map(digest_of, keys)), "late" in words
    return ev.Preempted(*job, int(words[2]), keys, digests, branch, late)


def swapped(context: Context, words: list[str]) -> ev.Event:
    keys = context.keys(words_after(words, "keys"))
    job, branch = context.job(words, *DECODES), int(after(words, "branch") or 0)
    kind = ev.SwapWanted if words[0] == "swap" else ev.Swapped
    return kind(*job, int(words[2]), keys, list(map(digest_of, keys)), branch)


def wants(context: Context, words: list[str]) -> ev.Event:
    keys, before = context.keys(words[3:]), context.keys(words_after(words, "after"))
    chain: list[tuple[int | None, int]] = []
    for key in keys:
        chain.append((before[-1] if before else None, len(before)))
        before.append(key)
    return ev.PutsWanted(
        int(words[1]), 0, int(words[2].removeprefix("#")), keys, list(map(digest_of, keys)), chain,
        ["gone"] * len(keys),
    )  # fmt: skip


def put(context: Context, words: list[str]) -> ev.Event:
    order = context.numbered(fx.GrantPuts, words)
    ids = [place.object_id for place in order.places if place is not None]
    if "failed" in words or "late" in words:
        return ev.PutsEnded(order.rank, 0, order.number, [], [], ids, "late" in words)
    return ev.PutsEnded(order.rank, 0, order.number, ids, [SUMS] * len(ids))


def read(context: Context, words: list[str]) -> ev.Event:
    order = context.numbered(fx.LoadBlocks, words)
    problem = " ".join(words_after(words, "problem") or words_after(words, "late"))
    bad = order.keys if problem else context.keys(words_after(words, "bad"))
    ok = [key not in bad for key in order.keys]
    sums = [SUMS if good else [] for good in ok]
    return ev.BlocksLoaded(order.rank, 0, order.number, ok, sums, 0.02, problem, "late" in words)


def copied(context: Context, words: list[str]) -> ev.Event:
    order = context.numbered(fx.CopyBlocks, words)
    sums = [[] if words[2:] else SUMS for _ in order.targets]
    return ev.BlocksCopied(order.rank, 0, order.number, sums, "late" in words)


def checked(context: Context, words: list[str]) -> ev.Event:
    order = context.numbered(fx.CheckBlocks, words)
    num_bad = int(after(words, "bad") or 0)
    good = [index >= num_bad for index in range(len(order.refs))]
    return ev.BlocksChecked(order.rank, 0, order.number, good, " ".join(words_after(words, "problem")))


def pool_command(context: Context, words: list[str]) -> ev.Event:
    what: Any = words[2]
    soft_s = float(after(words, "soft") or 0.0)
    keys = context.keys(words[3:])
    force, hard = "force" in words, "hard" in words
    return ev.PoolCommand(int(words[1]), what, keys, "block" if what == "get" else "", force, hard, soft_s)


def hint(context: Context, words: list[str]) -> ev.Event:
    verb, keys = words[1], context.keys(words[2:])
    seconds = after(words, "for")
    return ev.HintArrived(
        "h", "gateway", verb, keys, list(map(digest_of, keys)), after(words, "session") or "",  # type: ignore[arg-type]
        after(words, "tenant") or "", seconds=None if seconds is None else float(seconds),
        copies=int(after(words, "copies") or 1),
    )  # fmt: skip


def saved(context: Context, words: list[str]) -> ev.Event:
    state: Any = words[2]
    return ev.BlocksSaved(int(words[1]), 0, context.keys(words[3:]), state)


def listed(context: Context, words: list[str]) -> ev.Event:
    asked = [order for order in context.orders if isinstance(order, fx.ListOpen)]
    order = asked[int(words[1].removeprefix("#")) - 1]
    work = [(name, int(attempt)) for name, _, attempt in (word.partition("/") for word in words[2:])]
    return ev.OpenListed(order.rank, 0, order.number, work)


def recalled(context: Context, words: list[str]) -> ev.Event:
    recall = [order for order in context.recalls if order.request_id == words[1]][-1]
    keys = context.keys(words_after(words, "keys"))
    answers = []
    for word in words[2 : words.index("keys") if "keys" in words else None]:
        branch, _, count = word.rpartition(":")
        whole = count == "whole"
        answers.append(
            ev.AnswerSoFar(
                int(branch or recall.branches[0]),
                0 if whole else int(count),
                whole,
                keys,
                list(map(digest_of, keys)),
            )
        )
    return ev.Recalled(words[1], recall.attempt, answers)


def heard_before(event: ev.Event) -> list[ev.Event]:
    """What a gateway says of the last tokens before their rank reports the end of an answer."""
    match event:
        case ev.DecodeEnded():
            branches = [event.branch]
        case ev.PrefillEnded():
            branches = event.finished
        case _:
            return []
    return [ev.AnswerReceived(client_id_of(event.request_id), branch) for branch in branches]


def undelivered(context: Context, words: list[str]) -> ev.Event:
    return ev.Undelivered(context.order(getattr(fx, words[1])), "its queue is full")


COMMANDS: dict[str, Callable[[Context, list[str]], ev.Event]] = {
    "arrived": arrived,
    "cancelled": lambda context, words: ev.RequestCancelled(
        words[1], int(after(words, "branch") or -1), "answered" in words
    ),
    "chunk": chunk_stored,
    "prefilled": prefilled,
    "loaded": lambda context, words: ev.DecodeLoaded(*context.job(words, fx.StartDecode)),
    "computed": lambda context, words: ev.PromptComputed(
        *context.job(words, fx.StartPrefill, fx.StartServe), int(words[2]), 0.1 * int(words[2]) / BLOCK_TOKENS
    ),
    "ended": lambda context, words: ev.DecodeEnded(
        *context.job(words, *DECODES), int(after(words, "branch") or 0), int(after(words, "tokens") or 0)
    ),
    "failed": failed,
    "preempted": preempted,
    "swap": swapped,
    "swapped": swapped,
    "wants": wants,
    "put": put,
    "read": read,
    "copied": copied,
    "checked": checked,
    "saved": saved,
    "evicted": lambda context, words: ev.TierEvicted(int(words[1]), 0, context.keys(words[2:])),
    "removed": lambda context, words: ev.BlocksRemoved(
        int(words[1]), 0, context.keys(words[2:]), "unsure" not in words
    ),
    "command": pool_command,
    "hint": hint,
    "abandoned": lambda context, words: ev.CommandAbandoned(int(words[1])),
    "listed": listed,
    "undelivered": undelivered,
    "received": lambda context, words: ev.AnswerReceived(words[1], int(after(words, "branch") or 0)),
    "recalled": recalled,
    "lost": lambda context, words: ev.RankLost(
        int(words[1]), 0, " ".join(word for word in words[2:] if word != "unseen"), "unseen" not in words
    ),
    "gateway-lost": lambda context, words: ev.GatewayLost("gateway", words[-1], "final" in words),
    "gateway-ready": lambda context, words: ev.GatewayReady("gateway-1"),
    "stop": lambda context, words: ev.StopRequested(" ".join(words[1:]), 2.0),
}
"""By the first word of a line."""
