"""2c: the longest leading run of cached blocks; a key alone proves nothing."""

from __future__ import annotations

from typing import Any

import msgspec

from mooncake_lite.labs.judging import Judge


class Found(msgspec.Struct):
    """The pages of one match, and the look-ups that it took."""

    pages: list[int]
    look_ups: int


class Seen(msgspec.Struct):
    """The pages of each inserted prompt, and the matches."""

    inserted: list[list[int]]
    found: list[Found]


SALT = b"model".hex()


def prompt(
    lab: Judge, blocks: int, salt: str | None = SALT, begin: dict[str, Any] | None = None
) -> dict[str, Any]:
    """A prompt of whole blocks with made-up keys, perhaps one that begins as another does."""
    size = lab.size.page_tokens * lab.size.block_pages
    keys = list(begin["keys"]) if begin else []
    tokens = list(begin["tokens"]) if begin else []
    while len(keys) < blocks:
        keys.append(lab.random.randrange(2**64))
        tokens += [lab.random.randrange(50_000) for _ in range(size)]
    return {"salt": salt, "keys": keys, "tokens": tokens}


def leading(of: dict[str, Any], blocks: int) -> dict[str, Any]:
    """The first blocks of a prompt."""
    size = len(of["tokens"]) // len(of["keys"])
    return {**of, "keys": of["keys"][:blocks], "tokens": of["tokens"][: blocks * size]}


def asked(of: dict[str, Any], most_tokens: int | None = None, known: int = 0) -> dict[str, Any]:
    most = len(of["tokens"]) if most_tokens is None else most_tokens
    return {**of, "most_tokens": most, "known_blocks": known, "from": 0}


def match(lab: Judge, cached: list[dict[str, Any]], wanted: list[dict[str, Any]]) -> Seen:
    pages = lab.size.block_pages * sum(len(each["keys"]) for each in cached)
    inputs = {
        "num_pages": pages + 1,
        "page_tokens": lab.size.page_tokens,
        "block_tokens": lab.size.page_tokens * lab.size.block_pages,
        "cached": cached,
        "asked": wanted,
    }
    seen = lab.ask("match", inputs, Seen)
    lab.trace(drawn(lab, cached, wanted, seen))
    return seen


def drawn(
    lab: Judge, cached: list[dict[str, Any]], wanted: list[dict[str, Any]], seen: Seen
) -> dict[str, Any]:
    """A table for `labs show`: the cached block under each key of a prompt, and the blocks that came back."""
    of_key: dict[int, str] = {}
    of_page: dict[int, str] = {}
    size = lab.size.block_pages
    for letter, prompt, pages in zip("ABC", cached, seen.inserted):
        for block, key in enumerate(prompt["keys"]):
            name = of_key.setdefault(key, f"{letter}{block}")
            of_page.update(dict.fromkeys(pages[block * size : (block + 1) * size], name))
    rows = []
    for number, (each, found) in enumerate(zip(wanted, seen.found), 1):
        under = " ".join(of_key.get(key, "--") for key in each["keys"])
        back = " ".join(of_page.get(page, "??") for page in found.pages[::size]) or "nothing"
        rows += [[str(number), "lies under its keys", under], ["", "came back", back]]
    title = "A0 is the first block of the first cached prompt; -- is a key that is not cached"
    return {"kind": "table", "title": title, "columns": ["match", "", "blocks"], "rows": rows}


def test_the_longest_leading_run_of_cached_blocks_is_found(lab: Judge) -> None:
    size = lab.size.block_pages
    whole = prompt(lab, 6)
    other = prompt(lab, 8, begin=leading(whole, 3))
    seen = match(
        lab, [whole, other], [asked(whole), asked(other), asked(prompt(lab, 7, begin=leading(whole, 4)))]
    )
    for found, pages, blocks in zip(seen.found, (*seen.inserted, seen.inserted[0]), (6, 8, 4)):
        lab.expect(
            found.pages,
            pages[: blocks * size],
            f"match() of a prompt whose first {blocks} blocks are cached",
            f"each cached block has {size} pages; they are found from the front, in order",
        )


def test_a_match_ends_at_the_first_block_that_is_not_cached(lab: Judge) -> None:
    whole = prompt(lab, 6)
    stranger = {**whole, "keys": list(whole["keys"])}
    stranger["keys"][2] = lab.random.randrange(2**64)
    seen = match(lab, [whole], [asked(stranger)])
    lab.expect(
        seen.found[0].pages,
        seen.inserted[0][: 2 * lab.size.block_pages],
        "match() of keys of which the third is not cached, and the fourth is",
        "a later block is of no use without the ones before it",
    )


def test_a_key_that_belongs_to_other_tokens_is_no_hit(lab: Judge) -> None:
    whole = prompt(lab, 5)
    block = len(whole["tokens"]) // 5
    place = 3 * block + lab.random.randrange(block)
    forged = {**whole, "tokens": [*whole["tokens"][:place], 60_000, *whole["tokens"][place + 1 :]]}
    seen = match(lab, [whole], [asked(forged)])
    lab.expect(
        seen.found[0].pages,
        seen.inserted[0][: 3 * lab.size.block_pages],
        f"match() of the keys of a cached prompt whose token {place} differs",
        "64 bits can collide or be forged: the tokens of a block must be equal too",
    )


def test_an_equal_block_after_another_prefix_is_no_hit(lab: Judge) -> None:
    first, second = prompt(lab, 3), prompt(lab, 3)
    block = len(first["tokens"]) // 3
    mixed = {
        "salt": SALT,
        "keys": [second["keys"][0], *first["keys"][1:]],
        "tokens": [*second["tokens"][:block], *first["tokens"][block:]],
    }
    seen = match(lab, [first, second], [asked(mixed)])
    lab.expect(
        seen.found[0].pages,
        seen.inserted[1][: lab.size.block_pages],
        "match() of the first block of one prompt, and then the key and tokens of another's second block",
        "a cached block holds KV for the block that it was computed after, and for no other",
    )


def test_the_first_block_follows_the_salt(lab: Judge) -> None:
    whole = prompt(lab, 4)
    tenant = {**whole, "salt": b"another".hex()}
    seen = match(lab, [whole], [asked(tenant), asked(whole)])
    lab.expect(
        [found.pages for found in seen.found],
        [[], seen.inserted[0]],
        "match() of equal keys and tokens, with another salt and with the same one",
        "the first block follows the salt; another salt means other KV",
    )


def test_without_a_salt_nothing_is_shared(lab: Judge) -> None:
    whole = prompt(lab, 4)
    seen = match(lab, [whole], [asked({**whole, "salt": None}), asked(whole)])
    lab.expect(
        [found.pages for found in seen.found],
        [[], seen.inserted[0]],
        "match() of a cached prompt, without a salt and with its own",
        "a chain without a salt shares nothing",
    )


def test_a_match_is_never_longer_than_it_may_be(lab: Judge) -> None:
    whole = prompt(lab, 5)
    block = len(whole["tokens"]) // 5
    most = [block * blocks + more for blocks, more in ((3, 0), (3, block - 1), (0, block - 1), (4, 1))]
    seen = match(lab, [whole], [asked(whole, limit) for limit in most])
    for found, limit in zip(seen.found, most):
        lab.expect(
            found.pages,
            seen.inserted[0][: limit // block * lab.size.block_pages],
            f"match(most_tokens={limit}) of a prompt that is cached whole, blocks of {block} tokens",
            "only whole blocks within most_tokens are matched",
        )


def test_a_match_goes_on_after_the_pages_that_are_known(lab: Judge) -> None:
    whole = prompt(lab, 6)
    longer = prompt(lab, 9, begin=whole)
    seen = match(lab, [whole], [asked(longer, known=known) for known in (2, 6)])
    for found, known in zip(seen.found, (2, 6)):
        lab.expect(
            found.pages,
            seen.inserted[0],
            f"match(known={known} blocks) of 6 cached blocks",
            "the pages of `known` stand in front of those that are found after them",
        )


def test_the_keys_of_known_pages_are_not_looked_up_again(lab: Judge) -> None:
    whole = prompt(lab, 6)
    longer = prompt(lab, 9, begin=whole)
    seen = match(lab, [whole], [asked(longer, known=known) for known in (2, 6)])
    for found, known in zip(seen.found, (2, 6)):
        lab.expect(
            found.pages[-1:], seen.inserted[0][-1:], f"match(known={known} blocks)", "the match is whole"
        )
        lab.at_most(
            found.look_ups,
            6 - known + 2,
            f"match(known={known} blocks) of 6 cached blocks (look-ups)",
            "each key after `known` is looked up once, up to the first one that does not continue the run; "
            "the last page of `known` may be looked up too",
        )


def test_each_key_is_looked_up_once(lab: Judge) -> None:
    size = lab.size.page_tokens * lab.size.block_pages
    whole = prompt(lab, lab.size.prompt_tokens // size)
    seen = match(lab, [whole], [asked(whole)])
    lab.cost(seen.found[0].look_ups, len(whole["keys"]))
    lab.expect(
        seen.found[0].pages,
        seen.inserted[0],
        f"match() of {len(whole['keys'])} blocks that are all cached",
        "all blocks are found",
    )
