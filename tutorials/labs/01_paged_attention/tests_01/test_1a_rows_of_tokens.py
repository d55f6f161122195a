"""1a: a block table says in which page a token lies, and its row in the page follows from its number."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from mooncake_lite.labs.judging import Judge

from .cases import NO_PAGE, Paged, decoded, encoded, expect_near


class Rows(msgspec.Struct):
    """The rows that came back, and how many elements of the cache were read for them."""

    shape: list[int]
    dtype: str
    rows: list[float | None]
    read: int


def paged_context(lab: Judge, tokens: int, kv_heads: int = 1) -> Paged:
    return Paged(lab.random, [tokens], lab.size.page_tokens, kv_heads, lab.size.head_dim)


def gathered(
    lab: Judge, paged: Paged, first: int, end: int, rule: str, *, dtype: str = "float32", table: Any = None
) -> Rows:
    """Gather, and expect the right rows."""
    table = paged.tables[0] if table is None else table
    cache = encoded(paged.caches[0], dtype)
    inputs = {"cache": cache, "table": table.tolist(), "first": first, "end": end, "dtype": dtype}
    called = f"gathered(cache, {table.tolist()}, {first}, {end}), pages of {paged.page_tokens} tokens"
    seen = lab.ask("gathered", inputs, Rows, called)
    wanted = paged.keys[0][first:end]
    lab.expect(
        tuple(seen.shape), wanted.shape, f"{called} (shape)", "a row for each token, kv head and channel"
    )
    stored = "uint16" if dtype == "bfloat16" else dtype
    lab.expect(seen.dtype, stored, f"{called} (dtype)", "rows keep the element type of the cache")
    expect_near(lab, decoded(seen.rows, dtype), wanted, f"{called} (rows[token, head, channel])", rule)
    return seen


def test_every_token_comes_from_its_page_and_row(lab: Judge) -> None:
    tokens = 3 * lab.size.page_tokens + 2
    rule = "token t lies in page table[t // page_size], at row t % page_size"
    gathered(lab, paged_context(lab, tokens), 0, tokens, rule)


def test_a_run_begins_and_ends_within_pages(lab: Judge) -> None:
    tokens = 4 * lab.size.page_tokens
    rule = "the rows are those of tokens first .. end - 1, in order"
    gathered(lab, paged_context(lab, tokens), lab.size.page_tokens + 1, tokens - 2, rule)


def test_every_kv_head_has_its_own_rows(lab: Judge) -> None:
    tokens = 2 * lab.size.page_tokens + 1
    rule = "rows[i, h] belongs to kv head h of token first + i"
    gathered(lab, paged_context(lab, tokens, lab.size.kv_heads), 0, tokens, rule)


def test_entries_of_other_pages_are_not_used(lab: Judge) -> None:
    page = lab.size.page_tokens
    paged = paged_context(lab, 5 * page)
    table = np.where(np.isin(np.arange(paged.tables.shape[1]), (2, 3)), paged.tables[0], NO_PAGE)
    rule = "entries of pages without any of these tokens may hold any number"
    gathered(lab, paged, 2 * page + 1, 4 * page, rule, table=table)


def test_a_run_without_tokens_has_no_rows(lab: Judge) -> None:
    rule = "no token, no row"
    gathered(lab, paged_context(lab, lab.size.page_tokens), 2, 2, rule)


def test_elements_are_copied_as_they_are(lab: Judge) -> None:
    tokens = lab.size.page_tokens + 3
    rule = "16-bit floats are stored as their bits, and a copy does not change them"
    gathered(lab, paged_context(lab, tokens), 0, tokens, rule, dtype="bfloat16")


def test_only_the_rows_of_these_tokens_are_read(lab: Judge) -> None:
    tokens, kv_heads = lab.size.context, lab.size.kv_heads
    paged, first = paged_context(lab, tokens, kv_heads), lab.size.context // 2
    seen = gathered(lab, paged, first, tokens, "the second half of a context is gathered")
    lab.cost(seen.read, (tokens - first) * kv_heads * lab.size.head_dim)
