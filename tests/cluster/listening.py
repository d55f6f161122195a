"""Hears a cluster's KV events as a program written for vLLM does: by a replay of all of them."""

from __future__ import annotations

from typing import Any

import msgspec
import zmq

from store.keys import PrefixChain
from tests.patience import wait_until

LIMIT_S = 10.0
END = (-1).to_bytes(8, "big", signed=True)
BLOCK = 64


def replayed(endpoint: Any) -> list[list[Any]]:
    """All events since the cluster's start, as MessagePack has them: [tag, fields ...]."""
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    try:
        socket.setsockopt(zmq.RCVTIMEO, int(LIMIT_S * 1000))
        socket.connect(endpoint)
        socket.send_multipart([b"", bytes(8)])
        events: list[list[Any]] = []
        while True:
            _, number, payload = socket.recv_multipart()
            if number == END:
                return events
            ts, batch, rank = msgspec.msgpack.decode(payload)
            assert ts > 1.7e9
            assert rank == 3
            events += batch
    finally:
        socket.close(linger=0)
        context.term()


def assert_all_blocks_are_heard(endpoint: Any, prompts: list[list[int]]) -> None:
    """Every full block of every prompt, with its tokens and its place in the chain, in DRAM and on SSD."""
    blocks = {tuple(prompt[:end]) for prompt in prompts for end in range(BLOCK, len(prompt) + 1, BLOCK)}
    assert wait_until(lambda: blocks <= prefixes(replayed(endpoint), "SSD"), LIMIT_S)
    assert blocks <= prefixes(replayed(endpoint), "CPU")


def removed(endpoint: Any) -> set[tuple[int, str]]:
    """(key, medium) of every block that has gone."""
    gone = (fields for tag, *fields in replayed(endpoint) if tag == "BlockRemoved")
    return {(key, where) for keys, where, *_ in gone for key in keys}


def prefixes(events: list[list[Any]], medium: str) -> set[tuple[int, ...]]:
    """The whole prefix that each stored block stands for, put together from events alone."""
    known: dict[int | None, tuple[int, ...]] = {None: ()}
    found = set()
    for tag, *fields in events:
        if tag != "BlockStored":
            continue
        keys, parent, tokens, size, _, where = fields
        assert size == BLOCK
        assert parent is None or PrefixChain(BLOCK, last_key=parent).extend(tokens) == keys
        for index, key in enumerate(keys):
            known[key] = known[parent] + tuple(tokens[index * size : (index + 1) * size])
            parent = key
            if where == medium:
                found.add(known[key])
    return found
