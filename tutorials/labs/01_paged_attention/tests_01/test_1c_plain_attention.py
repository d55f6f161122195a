"""1c: attention of one row over the tokens of one sequence, found through its block table."""

from __future__ import annotations

import msgspec

from mooncake_lite.labs.judging import Judge

from .cases import NO_PAGE, Paged, decoded, eighths, encoded, expect_near, softmax_mean


class Attended(msgspec.Struct):
    """The row that came back, and how many cells on both sides of `scores` were written."""

    out: list[float | None]
    outside: int


class Row:
    """One row, and the pages that it looks at. Scale: 0.5 unless told.

    spare   cells that `scores` has more than there are tokens
    """

    def __init__(self, lab: Judge, tokens: int, *, scale: float = 0.5) -> None:
        self.paged = Paged(lab.random, [tokens], lab.size.page_tokens, 1, lab.size.head_dim)
        self.query, self.scale, self.dtype = eighths(lab.random, lab.size.head_dim), scale, "float32"
        self.first, self.end, self.spare = 0, tokens, 0

    def inputs(self) -> dict[str, object]:
        return {
            "query": encoded(self.query, self.dtype),
            "keys": encoded(self.paged.caches[0][:, 0], self.dtype),
            "values": encoded(self.paged.caches[1][:, 0], self.dtype),
            "table": self.paged.tables[0].tolist(),
            **{"first": self.first, "end": self.end, "scale": self.scale, "dtype": self.dtype},
            "spare": self.spare,
        }

    def attended(self, lab: Judge, rule: str) -> None:
        """Attend, and expect the right row."""
        seen = slice(self.first, self.end)
        scores = self.paged.keys[0][seen, 0] @ self.query * self.scale
        wanted = softmax_mean(scores, self.paged.values[0][seen, 0])
        called = f"attend to tokens {self.first} .. {self.end - 1}, pages of {self.paged.page_tokens}"
        called += f", {self.dtype}"
        found = lab.ask("attend", self.inputs(), Attended, called)
        cells = self.end - self.first + self.spare
        needed = f"scores has {cells} cells here, and only the tokens first .. end - 1 need one each"
        lab.expect(found.outside, 0, f"{called} (cells written before or behind `scores`)", needed)
        out = decoded(found.out, self.dtype)
        expect_near(lab, out, wanted, f"{called} (out[channel])", rule, self.dtype)


def test_a_row_is_the_mean_of_values_under_the_softmax_of_its_scores(lab: Judge) -> None:
    Row(lab, lab.size.page_tokens).attended(lab, "out = softmax(query . keys * scale) . values")


def test_tokens_are_found_through_the_table(lab: Judge) -> None:
    rule = "token t lies in page table[t // page_size]; slots of the last page from `end` on hold no token"
    Row(lab, 4 * lab.size.page_tokens + 3).attended(lab, rule)


def test_only_tokens_from_first_to_end_count(lab: Judge) -> None:
    page = lab.size.page_tokens
    row = Row(lab, 5 * page)
    row.first, row.end = 2 * page + 1, 4 * page - 1
    row.paged.tables[0, [0, 1, 4, 5]] = NO_PAGE
    row.spare = 3
    row.attended(lab, "tokens before first and from end on are not looked at, nor are their pages")


def test_one_token_gives_its_value(lab: Judge) -> None:
    Row(lab, 1).attended(lab, "the softmax of one score is 1")


def test_no_tokens_give_zeros(lab: Judge) -> None:
    row = Row(lab, lab.size.page_tokens)
    row.first = row.end
    row.attended(lab, "without tokens the row is 0")


def test_large_scores_do_not_overflow(lab: Judge) -> None:
    row = Row(lab, 4 * lab.size.page_tokens, scale=50.0)
    row.first = 2 * lab.size.page_tokens - 1
    row.attended(lab, "the highest score of these tokens is subtracted first")


def test_elements_of_16_bits_are_widened_and_stored(lab: Judge) -> None:
    row = Row(lab, 2 * lab.size.page_tokens)
    row.attended(lab, "out = softmax(query . keys * scale) . values, of float32 first")
    row.dtype = "bfloat16"
    row.attended(lab, "elements are read through widen and written through store")


def test_each_key_and_value_is_read_once(lab: Judge) -> None:
    row = Row(lab, lab.size.context)
    row.attended(lab, "a row looks at a whole context")
    lab.cost(lab.ask("cells", row.inputs(), int), 2 * lab.size.context * lab.size.head_dim)
