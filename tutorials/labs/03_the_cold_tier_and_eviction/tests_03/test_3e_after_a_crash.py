"""3e: a whole file is opened, and one that a crash tore or a disk damaged is refused, or costs one block."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from mooncake_lite.labs.judging import Judge

from .files import HEADER, TABLES, Made, mixed_file, plain_file


class Opened(msgspec.Struct):
    """What open_sealed returned or raised, the bytes that it read, and the files that it left open.

    returned   the type of what came back, or None
    named      whether path and number are those that were given
    bad_rows   rows whose block read_block refuses
    """

    raised: str
    message: str
    left_open: int
    read: int
    returned: str = ""
    named: list[bool] = []
    keys: list[int] = []
    digests: list[int] = []
    offsets: list[int] = []
    checksums: list[list[int]] = []
    same_kind: bool = False
    blocks: int = 0
    bad_rows: list[int] = []

    @property
    def came_to(self) -> str:
        """The exception, or what came back in place of a SealedFile."""
        return self.raised or (WHOLE if self.returned == "SealedFile" else f"returned {self.returned}")


REFUSED = "SegmentFileError"
WHOLE = "no exception"


def layout_of(lab: Judge) -> tuple[int, ...]:
    """A small layout of the variant's layers."""
    return (lab.size.layers, 1, 4, 8, 4)


def opened(lab: Judge, cases: dict[str, dict[str, Any]]) -> list[Opened]:
    """Open files; `cases` says what each is."""
    seen = lab.ask(
        "opened", list(cases.values()), list[Opened], called=f"open_sealed() of {'; '.join(cases)}"
    )
    rows = [
        [what, f"{after.blocks} blocks", str(after.same_kind), ""]
        if after.came_to == WHOLE
        else [what, after.came_to, "", after.message[-60:]]
        for what, after in zip(cases, seen)
    ]
    title, columns = "each file, and what open_sealed came to", ["file", "came to", "same_kind", "message"]
    lab.trace({"kind": "table", "title": title, "columns": columns, "rows": rows})
    return seen


def expect_refused(lab: Judge, cases: dict[str, dict[str, Any]], breaks: str) -> None:
    """Each of these files must be refused."""
    for row, (what, after) in enumerate(zip(cases, opened(lab, cases))):
        lab.compares(row)
        lab.expect(after.came_to, REFUSED, f"open_sealed() of {what} (exception)", breaks)
        name, _, reason = after.message.partition(": ")
        lab.expect(
            (name, reason not in ("", "None")),
            (f".../seg-{row:08}.h5", True),
            f"open_sealed() of {what} (file that the message begins with, whether a reason follows)",
            "a SegmentFileError has the path and a reason, in this order: an operator looks for that file",
        )


def flips(lab: Judge, of: Made, places: Sequence[tuple[str, int, int]]) -> dict[str, dict[str, Any]]:
    """Cases of a flipped bit in each of these (what, begin, end)."""
    cases = {}
    for what, begin, end in places:
        byte, bit = lab.random.randrange(begin, end), lab.random.randrange(8)
        cases[f"a file with bit {bit} of byte {byte} flipped, {what}"] = of.asked(["flip", byte, bit])
    return cases


def test_a_whole_file_is_opened_with_all_its_tables(lab: Judge) -> None:
    for blocks in (1, lab.random.randint(2, 5), lab.random.randint(6, 12)):
        of = plain_file(lab.random, layout_of(lab), blocks)
        what = f"a whole file of {blocks} blocks"
        (after,) = opened(lab, {what: of.asked(reads=True)})
        expect_whole(lab, of, what, after)


def expect_whole(lab: Judge, of: Made, what: str, after: Opened) -> None:
    """A file must be opened, and what is in it must be found."""
    message = f" {after.message}" if after.raised else ""
    lab.expect(after.came_to + message, WHOLE, f"open_sealed() of {what}", "a whole file is opened")
    for table in TABLES:
        found, written = getattr(after, table), getattr(of, table)
        lab.expect(
            (len(found), found[:2]),
            (len(written), written[:2]),
            f"open_sealed() of {what} ({table}: rows, the first two)",
            "one offset, key and digest for each block, and one checksum for each layer of each block",
        )
        lab.expect(
            found == written, True, f"open_sealed() of {what} (all rows of {table} are right)", "as above"
        )
    lab.expect(
        (after.named, after.blocks, after.bad_rows),
        ([True, True], len(of.keys), []),
        f"open_sealed() of {what} (path and number as given, blocks of the header, rows that cannot be read)",
        "the SealedFile has path, number and header, and its blocks can be read",
    )


def test_blocks_and_tables_may_lie_anywhere(lab: Judge) -> None:
    for _ in range(6):
        of = mixed_file(lab.random, layout_of(lab), lab.random.randint(2, 6))
        what = f"a file with tables at {sorted(of.at.values())} and blocks at {sorted(of.offsets)}"
        (after,) = opened(lab, {what: of.asked(reads=True)})
        expect_whole(lab, of, what, after)


def test_a_flipped_bit_in_the_header_is_noticed(lab: Judge) -> None:
    of = plain_file(lab.random, layout_of(lab), 3)
    fields = {
        "in the magic": (0, 8),
        "in the version": (8, 12),
        "in the number of blocks": (24, 32),
        "in the places of the tables": (40, 72),
        "in the layout": (72, 96),
        "in the fingerprint": (100, 116),
        "among the zeros of the header": (164, 4080),
        "in the hash of the metadata": (4080, 4088),
        "in the hash of the header": (4088, 4096),
    }
    cases = flips(lab, of, [(what, *place) for what, place in fields.items()])
    expect_refused(
        lab, cases, "a header has a hash of its own, and nothing in it is believed if that differs"
    )


def test_a_flipped_bit_in_the_metadata_is_noticed(lab: Judge) -> None:
    of = plain_file(lab.random, layout_of(lab), lab.random.randint(3, 6))
    mixed = mixed_file(lab.random, layout_of(lab), 5)
    rows = len(of.keys)
    places = [("in the page of HDF5", HEADER, HEADER + 4096)]
    for name in TABLES:
        nbytes = 8 * rows * (lab.size.layers if name == "checksums" else 1)
        places += [(f"in the table of {name}", of.at[name], of.at[name] + nbytes)] * 2
    cases = flips(lab, of, places)
    cases |= flips(
        lab, mixed, [(f"in the gap from {begin} to {end}", begin, end) for begin, end in mixed.gaps]
    )
    expect_refused(
        lab, cases, "metadata_hash covers every byte after the header that belongs to no block, in order"
    )


def test_a_flipped_bit_in_a_block_costs_that_block_alone(lab: Judge) -> None:
    of = plain_file(lab.random, layout_of(lab), 5)
    row = lab.random.randrange(5)
    place = of.offsets[row] + lab.random.randrange(of.block_nbytes)
    what = f"a file with a flipped bit in byte {place}, in block {row} of 5"
    (after,) = opened(lab, {what: of.asked(["flip", place, 3], reads=True)})
    lab.expect(
        (after.came_to, after.keys, after.checksums),
        (WHOLE, of.keys, of.checksums),
        f"open_sealed() of {what} (exception, keys, checksums)",
        "blocks are not read when a file is opened, so the others can still be used",
    )
    lab.expect(
        after.bad_rows,
        [row],
        f"read_block() of all blocks of {what} (rows that are refused)",
        "the checksum of a layer is compared when its block is read",
    )


def test_a_file_that_is_cut_short_or_grown_is_refused(lab: Judge) -> None:
    of = plain_file(lab.random, layout_of(lab), 4)
    size = len(of.data)
    lengths = [0, 1, HEADER - 1, HEADER, size - 1, *(lab.random.randrange(HEADER, size) for _ in range(5))]
    cases = {f"the first {length} of {size} bytes of a file": of.asked(["cut", length]) for length in lengths}
    cases[f"a file of {size} bytes and 512 zeros after them"] = of.asked(["grow", 512])
    expect_refused(lab, cases, "a sealed file has exactly the bytes that its header names")


def test_a_file_whose_pages_never_reached_the_disk_is_refused(lab: Judge) -> None:
    of = plain_file(lab.random, layout_of(lab), 4)
    size, tables_at = len(of.data), of.at["offsets"]
    parts = {
        "the header": (0, HEADER),
        "the page of HDF5": (HEADER, HEADER + 4096),
        "all tables": (tables_at, size),
        "the last table": (of.at["checksums"], size),
        "everything": (0, size),
    }
    cases = {f"a file in which {what} is zeros": of.asked(["zero", *place]) for what, place in parts.items()}
    expect_refused(
        lab, cases, "a crash can leave a file with its full size and zeros for what was not written"
    )
    torn = of.asked(["zero", of.offsets[3], tables_at], reads=True)
    (after,) = opened(lab, {"a file whose last block is zeros": torn})
    lab.expect(
        (after.came_to, after.bad_rows),
        (WHOLE, [3]),
        "open_sealed() of a file whose last block is zeros, and read_block() of all (exception, bad rows)",
        "zeros in a block cost that block",
    )


def test_blocks_that_overlap_or_lie_outside_are_refused(lab: Judge) -> None:
    layout = layout_of(lab)
    cases = {}
    for what in ("overlap", "lie in the header", "lie behind the end", "lie far behind the end"):
        of = plain_file(lab.random, layout, 4)
        wrong = list(of.offsets)
        row = lab.random.randrange(1, 4)
        wrong[row] = {
            "overlap": wrong[row - 1] + of.block_nbytes - 8,
            "lie in the header": HEADER - 8,
            "lie behind the end": len(of.data) - of.block_nbytes + 8,
            "lie far behind the end": 2**63,
        }[what]
        of.fill(wrong)
        of.seal(blocks_at=wrong)
        cases[f"a file with right hashes whose blocks {what} (row {row} at {wrong[row]})"] = of.asked()
    for name in TABLES:
        of = plain_file(lab.random, layout, 4)
        of.seal(**{f"{name}_at": len(of.data) - 16})
        cases[f"a file with right hashes whose table of {name} ends behind the file"] = of.asked()
    expect_refused(lab, cases, "places in a file are used only if they lie in it, and blocks lie apart")


def test_offsets_are_checked_before_a_gap_is_read(lab: Judge) -> None:
    of = plain_file(lab.random, (lab.size.layers, 1, 16, 16, 4), 12)
    cases = {"a whole file": of.asked()}
    wrong = [of.offsets[0]] * 12
    of.fill(wrong)
    of.seal(blocks_at=wrong)
    what = f"a file of {len(of.data):,} bytes with right hashes, whose 12 offsets are all {wrong[0]}"
    whole, after = opened(lab, cases | {what: of.asked()})
    lab.expect(after.came_to, REFUSED, f"open_sealed() of {what} (exception)", "blocks lie apart")
    lab.at_most(
        after.read,
        whole.read,
        f"open_sealed() of {what} (bytes read; at most as many as for the file with the right offsets)",
        "_check_offsets comes before a gap is read: gaps between wrong offsets may be nearly the whole file",
    )


def test_a_refused_file_is_closed(lab: Judge) -> None:
    of = plain_file(lab.random, layout_of(lab), 4)
    cases = {
        "a whole file": of.asked(),
        "a file cut in the header": of.asked(["cut", 100]),
        "a file with a flipped bit in a table": of.asked(["flip", of.at["keys"] + 3, 1]),
        "a file that is not there": of.asked(kind="missing"),
        "a link to a whole file": of.asked(kind="link"),
    }
    seen = opened(lab, cases)
    lab.expect(
        [after.came_to for after in seen],
        [WHOLE, REFUSED, REFUSED, "FileNotFoundError", "OSError"],
        f"open_sealed() of {'; '.join(cases)} (exceptions)",
        "files are opened by _Source, which follows no link; what it raises is not changed",
    )
    lab.expect(
        [after.left_open for after in seen],
        [0] * 5,
        f"open_sealed() of {'; '.join(cases)} (files that are still open)",
        "the file is closed in every case: a start that refuses thousands of files must not run out of them",
    )


def test_a_file_of_another_model_is_kept_apart(lab: Judge) -> None:
    layout = layout_of(lab)
    of = plain_file(lab.random, layout, 2)
    mine = of.fingerprint.hex()
    other = (*layout[:3], 2 * layout[3], *layout[4:])
    asks = {
        "the same layout and fingerprint": (layout, mine, True),
        "another fingerprint": (layout, lab.random.randbytes(16).hex(), False),
        "another layout": (other, mine, False),
        "no layout": (None, mine, True),
        "no layout and another fingerprint": (None, "00", True),
    }
    cases = {
        f"a file, for {what}": of.asked() | {"layout": a, "fingerprint": b}
        for what, (a, b, _) in asks.items()
    }
    for (what, after), (asked, _, same) in zip(zip(cases, opened(lab, cases)), asks.values()):
        lab.expect(
            (after.came_to, after.keys),
            (WHOLE, of.keys),
            f"open_sealed() of {what} (exception, keys)",
            "a whole file is opened, also that of another model: it is no error",
        )
        rules = {True: "it is True only if layout and fingerprint are both those of the header"}
        rules[False] = "without a layout it is True for every file, and the fingerprint is not compared"
        lab.expect(
            after.same_kind,
            same,
            f"open_sealed() of {what} (same_kind)",
            f"same_kind says whether this model may be served from the file: {rules[asked is not None]}",
        )


def test_opening_reads_no_blocks(lab: Judge) -> None:
    layout = (lab.size.layers, 1, 16, 16, 4)
    of = plain_file(lab.random, layout, lab.size.file_blocks)
    tables_nbytes = 8 * len(of.keys) * (3 + layout[0])
    needed = HEADER + 4096 + 2 * tables_nbytes
    what = f"a file of {len(of.keys)} blocks of {of.block_nbytes:,} bytes"
    (after,) = opened(lab, {what: of.asked()})
    lab.cost(after.read, 2 * needed, needed=needed)
    expect_whole(lab, of, what, after)
