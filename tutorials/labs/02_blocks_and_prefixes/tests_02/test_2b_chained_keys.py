"""2b: the key of a block is a hash of the key before it and its own tokens, however the tokens arrive."""

from __future__ import annotations

import struct
from typing import Any

import msgspec
from xxhash import xxh3_64_intdigest

from mooncake_lite.labs.judging import Judge

MOST_ROWS, MOST_CELLS = 20, 80
"""Of a table: pieces that are shown, and characters for the tokens of one."""


class Chain(msgspec.Struct):
    """What a chain answered, and what is left in it."""

    keys: list[list[int] | None]
    pending: list[int]
    last_key: int | None
    hashed: int


def chain(
    lab: Judge, pieces: list[list[int]], block_tokens: int, salt: bytes = b"", last_key: int | None = None
) -> Chain:
    inputs = {"block_tokens": block_tokens, "salt": salt.hex(), "pieces": pieces, "last_key": last_key}
    seen = lab.ask("chain", inputs, Chain)
    lab.trace(drawn(pieces, block_tokens, seen))
    return seen


def drawn(pieces: list[list[int]], block_tokens: int, seen: Chain) -> dict[str, Any]:
    """A table for `labs show`: each piece, the ends of blocks in it, and the keys that it returned."""
    rows, end = [], 0
    for piece, keys in zip(pieces[:MOST_ROWS], seen.keys):
        places = range(end, end + len(piece))
        cells = "".join("." + "|" * ((place + 1) % block_tokens == 0) for place in places)
        came_back = "refused" if keys is None else " ".join(f"{key % 2**16:04x}" for key in keys) or "none"
        rows.append([f"{end}-{end + len(piece) - 1}", cells[:MOST_CELLS], came_back])
        end += 0 if keys is None else len(piece)
    after = f"{len(seen.pending)} tokens are pending after all {len(pieces)} pieces"
    title = f"pieces of a prompt, and the last digits of the keys they returned; {after}"
    return {
        "kind": "table",
        "title": title,
        "columns": ["tokens", f"| ends a block of {block_tokens}", "keys"],
        "rows": rows,
    }


def key_of_prefix(tokens: list[int], block_tokens: int, salt: bytes = b"") -> int:
    """The key of the last block of a prefix of whole blocks: the public standard, read from its end."""
    local = xxh3_64_intdigest(struct.pack(f"<{block_tokens}I", *tokens[-block_tokens:]))
    if len(tokens) > block_tokens:
        before = key_of_prefix(tokens[:-block_tokens], block_tokens, salt)
    elif salt:
        before = xxh3_64_intdigest(salt)
    else:
        return local
    return xxh3_64_intdigest(struct.pack("<QQ", before, local))


def keys_of(tokens: list[int], block_tokens: int, salt: bytes = b"") -> list[int]:
    ends = range(block_tokens, len(tokens) + 1, block_tokens)
    return [key_of_prefix(tokens[:end], block_tokens, salt) for end in ends]


def prompt(lab: Judge, blocks: int, more: int = 0) -> list[int]:
    return [lab.random.randrange(2**32) for _ in range(blocks * lab.size.page_tokens + more)]


def in_pieces(lab: Judge, tokens: list[int]) -> list[list[int]]:
    size = lab.size.pieces
    return [tokens[begin : begin + size] for begin in range(0, len(tokens), size)]


def test_a_whole_prompt_has_the_keys_of_the_public_standard(lab: Judge) -> None:
    size = lab.size.page_tokens
    tokens = prompt(lab, 6, more=size - 1)
    seen = chain(lab, [tokens], size)
    lab.expect(
        seen.keys,
        [keys_of(tokens, size)],
        f"PrefixChain({size}).extend({len(tokens)} tokens)",
        "seq[0] = local[0], and seq[i] = XXH3(seq[i-1] || local[i]); a partial block has no key",
    )


def own_keys(lab: Judge, tokens: list[int], block_tokens: int) -> list[int]:
    """The keys that the region gives to a prompt in one piece, right or wrong. One test judges them."""
    (keys,) = chain(lab, [tokens], block_tokens).keys
    lab.expect(
        len(set(keys or ())),
        len(tokens) // block_tokens,
        f"PrefixChain({block_tokens}).extend({len(tokens)} tokens) (different keys)",
        "each full block has a key of its own",
    )
    return keys or []


def test_each_piece_returns_the_keys_of_the_blocks_that_it_completes(lab: Judge) -> None:
    size = lab.size.page_tokens
    tokens = prompt(lab, 5, more=1)
    pieces = in_pieces(lab, tokens)
    keys, end, expected = own_keys(lab, tokens, size), 0, []
    seen = chain(lab, pieces, size)
    for piece in pieces:
        expected.append(keys[end // size : (end + len(piece)) // size])
        end += len(piece)
    lab.expect(
        seen.keys,
        expected,
        f"extend() of {len(pieces)} pieces of {lab.size.pieces} tokens, blocks of {size}",
        "a key is returned with the piece that completes its block, once",
    )


def test_the_tokens_of_a_partial_block_stay_pending(lab: Judge) -> None:
    size = lab.size.page_tokens
    tokens = prompt(lab, 3, more=lab.random.randint(1, size - 1))
    last_key = own_keys(lab, tokens, size)[-1]
    seen = chain(lab, in_pieces(lab, tokens), size)
    lab.expect(
        (seen.pending, seen.last_key),
        (tokens[3 * size :], last_key),
        f"extend() of {len(tokens)} tokens in pieces (pending, last_key)",
        "pending holds the tokens after the last full block, and last_key is that block's key",
    )


def test_a_salt_comes_before_the_first_block(lab: Judge) -> None:
    size = lab.size.page_tokens
    tokens, salt = prompt(lab, 4), lab.random.randbytes(9)
    for pieces in ([tokens], [tokens[:1], *in_pieces(lab, tokens[1:])]):
        called = f"PrefixChain({size}, salt={salt!r}).extend({len(tokens)} tokens), first {len(pieces[0])}"
        seen = chain(lab, pieces, size, salt)
        lab.expect(
            [key for keys in seen.keys for key in keys or ()],
            keys_of(tokens, size, salt),
            called,
            "seq[0] = XXH3(XXH3(salt) || local[0]); every later key then differs too",
        )


def test_equal_blocks_after_different_prefixes_have_different_keys(lab: Judge) -> None:
    size = lab.size.page_tokens
    same, first, second = prompt(lab, 1), prompt(lab, 1), prompt(lab, 1)
    for begin in (first, second):
        tokens = [*begin, *same, *same]
        lab.expect(
            chain(lab, [tokens], size).keys,
            [keys_of(tokens, size)],
            f"PrefixChain({size}).extend() of a prompt whose last two blocks are equal",
            "a key names the whole prefix, not the block alone",
        )


def test_a_chain_continues_after_the_last_key_of_a_prompt(lab: Judge) -> None:
    size = lab.size.page_tokens
    tokens = prompt(lab, 5)
    before = key_of_prefix(tokens[: 2 * size], size, b"tenant")
    seen = chain(lab, in_pieces(lab, tokens[2 * size :]), size, last_key=before)
    lab.expect(
        [key for keys in seen.keys for key in keys or ()],
        keys_of(tokens, size, b"tenant")[2:],
        f"PrefixChain({size}, last_key={before}).extend({3 * size} tokens, in pieces)",
        "a chain that is given the key before it goes on from there, and the salt no longer matters",
    )


def test_a_last_key_of_0_is_a_key_like_others(lab: Judge) -> None:
    size = lab.size.page_tokens
    tokens = prompt(lab, 2)
    local = [
        xxh3_64_intdigest(struct.pack(f"<{size}I", *tokens[begin : begin + size])) for begin in (0, size)
    ]
    first = xxh3_64_intdigest(struct.pack("<QQ", 0, local[0]))
    lab.expect(
        chain(lab, [tokens], size, last_key=0).keys,
        [[first, xxh3_64_intdigest(struct.pack("<QQ", first, local[1]))]],
        f"PrefixChain({size}, last_key=0).extend({len(tokens)} tokens)",
        "last_key is None before the first block; 0 is a key, although it is false in Python",
    )


def test_a_piece_that_is_refused_appends_nothing(lab: Judge) -> None:
    size = lab.size.page_tokens
    tokens = prompt(lab, 2, more=2)
    pieces = [tokens[:2], [*tokens[:size], -1], tokens[2:]]
    keys = own_keys(lab, tokens, size)
    seen = chain(lab, pieces, size)
    lab.expect(
        (seen.keys[1:], seen.pending, seen.last_key),
        ([None, keys], tokens[2 * size :], keys[-1]),
        f"extend(2 tokens), extend({size} tokens and -1), extend({len(tokens) - 2} tokens)",
        "TokenError leaves the chain as it was: nothing is appended, and the next piece goes on from there",
    )


def test_each_token_is_hashed_once(lab: Judge) -> None:
    size = lab.size.page_tokens * lab.size.block_pages
    tokens = [lab.random.randrange(50_000) for _ in range(lab.size.prompt_tokens)]
    whole = own_keys(lab, tokens, size)
    seen = chain(lab, in_pieces(lab, tokens), size)
    blocks = len(tokens) // size
    lab.cost(seen.hashed, 4 * blocks * size + 16 * (blocks - 1))
    limit = 4 * blocks * size + 16 * blocks
    called = f"extend() of {len(tokens)} tokens in pieces of {lab.size.pieces}, blocks of {size}"
    lab.at_most(seen.hashed, limit, f"{called} (bytes hashed)", "each token is hashed once, with its block")
    keys = [key for keys in seen.keys for key in keys or ()]
    lab.expect(
        next((n for n, pair in enumerate(zip(keys, whole)) if pair[0] != pair[1]), None),
        None,
        f"{called} (first block whose key differs from that of the whole prompt)",
        "pieces have the keys of the whole",
    )
    lab.expect(len(keys), blocks, f"{called} (keys)", "each full block has one key")
