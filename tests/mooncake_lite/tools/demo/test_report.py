"""The demo's judgement about its rows: shares, speedups, warnings, and whether tokens are identical."""

import io
from dataclasses import replace

import pytest
from rich.console import Console

from mooncake_lite.tools.client import StreamedAnswer
from mooncake_lite.tools.demo.report import Row, differences, speedups, table, warnings

pytestmark = pytest.mark.quick

GOOD = [  # question, cluster, TTFT, prompt tokens, cached, and the prefill rank if it is not rank 1
    ("a", "first", 4.0, 1631, {"dram": 0, "ssd": 0}),
    ("b", "first", 0.2, 1632, {"dram": 1600, "ssd": 0}),
    ("c", "first", 0.2, 1760, {"dram": 1728, "ssd": 0}),
    ("a", "restarted", 0.4, 1631, {"dram": 0, "ssd": 1600}),
    ("b", "restarted", 0.2, 1632, {"dram": 1600, "ssd": 0}),
    ("c", "restarted", 0.3, 1760, {"dram": 1600, "ssd": 128}),
    ("a", "2 prefill", 3.0, 1631, {"dram": 0, "ssd": 0}),
    ("b", "2 prefill", 0.2, 1632, {"dram": 1600, "ssd": 0}, 2),
    ("b", "2 prefill", 0.1, 1632, {"pages": 1600, "dram": 0, "ssd": 0}),
    ("a", "reuse off", 4.0, 1631, {"dram": 0, "ssd": 0}),
    ("b", "reuse off", 4.0, 1632, {"dram": 0, "ssd": 0}),
    ("c", "reuse off", 4.2, 1760, {"dram": 0, "ssd": 0}),
]


def row(
    question: str, cluster: str, ttft_s: float, prompt: int, cached: dict[str, int], rank: int = 1
) -> Row:
    names = ("stage", "rank", "seconds", "nbytes", "count")
    spans = [
        ("decide", 0, 0.001, 0, 0),
        ("promote", 4, 0.05, 40_000_000, 14),
        ("load", rank, 0.05, 40_000_000, 14),
        ("compute", rank, 0.1, 0, 32),
        ("store", rank, 0.1, 100_000_000, 2),
        ("load", 3, 0.2, 220_000_000, 28),
    ]
    answer = StreamedAnswer(
        text=f"answer {question}",
        finish="length",
        usage={"prompt_tokens": prompt, "completion_tokens": 11},
        trace={"cached_tokens": cached, "spans": [dict(zip(names, span)) for span in spans]},
        ttft_s=ttft_s,
        answer_s=ttft_s + 1.0,
    )
    return Row(question=question, cluster=cluster, answer=answer)


def rows() -> list[Row]:
    return [row(*values) for values in GOOD]


def changed(index: int, **changes: object) -> list[Row]:
    """The good rows with one answer changed."""
    result = rows()
    result[index] = replace(result[index], answer=replace(result[index].answer, **changes))
    return result


def test_a_good_demo_has_no_warnings_and_no_differences() -> None:
    assert warnings(rows()) == []
    assert differences(rows()) == []


def test_only_what_is_fetched_before_the_first_token_counts_as_its_transfer() -> None:
    first_b = rows()[1]

    assert first_b.transfer_s == pytest.approx(0.1)


def test_all_that_moves_counts_as_moved() -> None:
    assert rows()[0].moved_bytes == 400_000_000
    assert rows()[0].moved_gb_per_s == pytest.approx(1.0)


def test_speedups_are_the_median_of_what_is_cold_over_warm() -> None:
    expected = {"dram": 20.0, "hdf5": 10.0, "other_rank": 20.0, "own_pages": 40.0}
    assert speedups(rows()) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("index", "changes", "says"),
    [
        (1, {"ttft_s": 0.5}, "TTFT from DRAM is 8.0x shorter than cold; 10x is expected"),
        (3, {"ttft_s": 1.0}, "TTFT from HDF5 is 4.0x shorter than cold; 8x is expected"),
        (0, {"trace": {"cached_tokens": {"dram": 64}}}, "the first question was not cold"),
        (1, {"trace": {"cached_tokens": {"ssd": 64}}}, "took nothing from DRAM"),
        (2, {"trace": {"cached_tokens": {"dram": 1600}}}, "did not reuse the answer's own KV"),
        (3, {"trace": {"cached_tokens": {"dram": 1600}}}, "nothing came from HDF5"),
        (7, {"trace": {"cached_tokens": {"pages": 1600}}}, "gave nothing to the other prefill rank"),
        (8, {"trace": {"cached_tokens": {"dram": 1600}}}, "did not find it in its own pages"),
        (11, {"trace": {"cached_tokens": {"dram": 64}}}, "although reuse is off"),
    ],
)
def test_what_did_not_go_as_told_is_a_warning(index: int, changes: dict[str, object], says: str) -> None:
    [warning] = warnings(changed(index, **changes))

    assert says in warning


def test_questions_of_one_prefill_rank_show_no_reuse_between_ranks() -> None:
    good = rows()
    good[7] = row(*GOOD[7][:5])  # type: ignore[arg-type]

    assert warnings(good) == ["the pool gave nothing to the other prefill rank"]


@pytest.mark.parametrize(
    "changes", [{"text": "answer x"}, {"usage": {"completion_tokens": 12}}, {"finish": "stop"}]
)
def test_other_text_other_length_or_another_end_is_a_difference(changes: dict[str, object]) -> None:
    [difference] = differences(changed(9, **changes))

    assert "question a: reuse off differs from first" in difference


def test_a_difference_names_the_character_where_it_begins() -> None:
    assert differences(changed(4, text="answer B")) == [
        "question b: restarted differs from first at character 7"
    ]


def test_the_table_fits_into_a_terminal_of_80_columns_and_names_the_tiers() -> None:
    console = Console(width=80, file=io.StringIO(), record=True)
    console.print(table(rows()))
    text = console.export_text()

    assert "1,600 DRAM + 128 HDF5" in text
    assert "1,600 own pages" in text
    assert "..." not in text
    assert "…" not in text
    assert max(len(line.rstrip()) for line in text.split("\n")) <= 80
