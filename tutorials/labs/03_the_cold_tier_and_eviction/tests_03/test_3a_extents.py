"""3a: an object gets one range, or else the fewest holes that together hold it, largest first."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from mooncake_lite.labs.judging import Judge

UNIT = 256
"""The alignment, in bytes."""

Step = tuple[str, int]
Range = tuple[int, int]


class After(msgspec.Struct):
    """What one step got, and the free ranges after it.

    read     entries of the books of free ranges that were read
    raised   what a step said that could not be done
    """

    got: list[Range] | None
    holes: list[Range]
    read: int
    raised: str


def play(lab: Judge, steps: Sequence[Step], capacity: int, last: int = 2) -> list[After]:
    """Play steps, and return what was seen after the last ones."""
    inputs = {"capacity": capacity, "alignment": UNIT, "steps": steps, "last": last}
    told_last = " and ".join(map(told, steps[-2:]))
    seen = lab.ask("extents", inputs, list[After], called=f"{len(steps)} steps, the last ones {told_last}")
    rows, before = list[list[str]](), [(0, capacity)]
    for step, after in zip(steps[len(steps) - last :], seen):
        if step[0] == "extents":
            got = (
                "None" if after.got is None else " ".join(f"{at // UNIT}+{size:,}B" for at, size in after.got)
            )
            rows.append([told(step), drawn(before), got, drawn(after.holes)])
        before = after.holes
    title = (
        f"holes as offset+size, in units of {UNIT} bytes; what came back as offset in units + size in bytes"
    )
    columns = ["call", "holes before", "came back", "holes after"]
    lab.trace({"kind": "table", "title": title, "columns": columns, "rows": rows})
    lab.expect(
        [extent for after in seen for extent in after.got or () if extent[0] < 0 or extent[1] < 1],
        [],
        f"{told_last} (extents without bytes, or with the offset -1, which stands for None)",
        "an extent is a range that was taken, for 1 byte or more. allocate() returns None if no hole fits",
    )
    lab.expect(
        seen[-1].raised or "no error",
        "no error",
        f"free() of each extent that a call returned, {len(steps)} steps",
        "each extent is freed by itself, so its offset must be that of a range that was taken",
    )
    return seen


def told(step: Step) -> str:
    """The step as a message names it."""
    return f"free what step {step[1]} got" if step[0] == "free" else f"{step[0]}({step[1]})"


def drawn(ranges: Sequence[Range]) -> str:
    """Ranges in units, as a table shows them."""
    shown = [f"{offset // UNIT}+{size / UNIT:.3g}" for offset, size in ranges[:12]]
    return " ".join(shown) + " ..." * (len(ranges) > len(shown)) or "none"


def holes_of(sizes: Sequence[int]) -> tuple[list[Step], int]:
    """Return (steps, capacity) of a segment whose free ranges have these sizes, in units, in this order.

    A range of one unit stays taken between each two of them, and at the end.
    """
    steps: list[Step] = []
    for size in sizes:
        steps += [("fill", size * UNIT), ("fill", UNIT)]
    return [*steps, *(("free", 2 * place) for place in range(len(sizes)))], UNIT * sum(
        size + 1 for size in sizes
    )


def padded(nbytes: int) -> int:
    """The bytes of a range, rounded up to whole units."""
    return -(-nbytes // UNIT) * UNIT


def in_units(got: Sequence[Range] | None) -> list[int]:
    """The bytes that extents take, each rounded up."""
    return [padded(size) for _, size in got or ()]


def expected_units(nbytes: int, holes: Sequence[Range]) -> list[int] | None:
    """The bytes that the extents take by the rule of the docstring, each rounded up."""
    sizes, left = sorted(size for _, size in holes), padded(nbytes)
    if left > sum(sizes):
        return None
    found = []
    while left > sizes[-1]:
        found.append(sizes.pop())
        left -= found[-1]
    return [*found, left]


def expect_sum(lab: Judge, nbytes: int, before: Sequence[Range], after: After) -> None:
    """The sizes must be those of the object, and not those of its ranges."""
    if after.got is not None:
        lab.expect(
            sum(size for _, size in after.got),
            nbytes,
            f"allocate_extents({nbytes:,}) with holes of {[size for _, size in before]} bytes (sum of the"
            f" sizes of the extents {after.got})",
            "the sizes of the extents add up to nbytes: only the range of the last one is rounded up",
        )


def left_of(holes: Sequence[Range], extents: Sequence[Range]) -> list[Range]:
    """The free ranges that are left when extents were taken out of these holes."""
    found = []
    for begin, size in holes:
        end = begin + size
        for offset, nbytes in sorted(extents):
            if begin <= offset < end:
                found.append((begin, offset - begin))
                begin = offset + padded(nbytes)
        found.append((begin, end - begin))
    return [(begin, size) for begin, size in found if size]


def expect_rule(lab: Judge, nbytes: int, before: Sequence[Range], after: After) -> None:
    """Compare one call of the region with the rule. The order of the extents is not compared."""
    called = f"allocate_extents({nbytes:,}) with holes of {[size for _, size in before]} bytes"
    expected = expected_units(nbytes, before)
    if after.got is None or expected is None:
        lab.expect(
            after.got,
            expected and "extents",
            f"{called}, {sum(size for _, size in before):,} in all",
            "None is returned only when fewer than padded(nbytes) bytes are free",
        )
        lab.expect(
            after.holes,
            before,
            f"{called} (holes after None came back)",
            "what does not fit takes nothing: when None is returned, all holes are still free",
        )
        return
    lab.expect(
        sorted(in_units(after.got)),
        sorted(expected),
        f"{called} (bytes that each extent takes, rounded up to {UNIT}, sorted)",
        "a whole largest hole is taken while nothing holds what is left, and then a range for the rest",
    )
    extents = after.got
    lab.expect(
        after.holes,
        left_of(before, extents),
        f"{called} (holes after it; the extents are {extents})",
        "exactly the extents that are returned are taken, each from a hole of its own",
    )


def test_an_object_that_fits_into_a_hole_gets_one_range(lab: Judge) -> None:
    sizes = lab.random.sample(range(2, 30), 6)
    steps, capacity = holes_of(sizes)
    most = sorted(sizes)[-2]  # two holes hold it, so that not every choice is the best fit
    nbytes = lab.random.randint(1, most) * UNIT - lab.random.randrange(UNIT)
    before, after = play(lab, [*steps, ("extents", nbytes)], capacity)[-2:]
    expect_rule(lab, nbytes, before.holes, after)
    fits = min(size for size in sizes if size * UNIT >= nbytes) * UNIT
    ((offset, _),) = after.got or [(-1, 0)]
    lab.expect(
        dict(before.holes).get(offset),
        fits,
        f"allocate_extents({nbytes}) with holes of {[size * UNIT for size in sizes]} B (size of its hole)",
        "best fit: the smallest hole that holds it, so that large holes stay whole",
    )


def test_a_hole_that_fits_exactly_is_taken_whole(lab: Judge) -> None:
    sizes = lab.random.sample(range(4, 40), 5)
    steps, capacity = holes_of(sizes)
    largest, second, middle = sorted((size * UNIT for size in sizes), reverse=True)[:3]
    for nbytes in (middle, largest, largest + second, capacity - 5 * UNIT):
        before, after = play(lab, [*steps, ("extents", nbytes)], capacity)[-2:]
        expect_rule(lab, nbytes, before.holes, after)
        expect_sum(lab, nbytes, before.holes, after)


def test_extents_come_largest_first_and_the_rest_last(lab: Judge) -> None:
    sizes = lab.random.sample(range(4, 40), 6)
    steps, capacity = holes_of(sizes)
    largest = sorted((size * UNIT for size in sizes), reverse=True)
    nbytes = sum(largest[:3]) + 2 * UNIT - lab.random.randrange(UNIT)
    (after,) = play(lab, [*steps, ("extents", nbytes)], capacity, last=1)
    lab.expect(
        in_units(after.got),
        [*largest[:3], 2 * UNIT],
        f"allocate_extents({nbytes:,}) with holes of {[size * UNIT for size in sizes]} bytes (bytes that each"
        " extent takes, rounded up)",
        "extents come in the order of the object's bytes: whole holes, the largest first, and then the rest",
    )


def test_an_object_that_fits_nowhere_gets_the_fewest_holes(lab: Judge) -> None:
    sizes = lab.random.sample(range(4, 40), 8)
    steps, capacity = holes_of(sizes)
    largest = sorted(sizes, reverse=True)
    nbytes = UNIT * sum(largest[:3]) - lab.random.randrange(1, UNIT)
    before, after = play(lab, [*steps, ("extents", nbytes)], capacity)[-2:]
    expect_rule(lab, nbytes, before.holes, after)
    lab.expect(
        len(after.got or []),
        3,
        f"allocate_extents({nbytes}) with holes of {[size * UNIT for size in sizes]} B (number of extents)",
        "no other choice of holes needs fewer extents than the largest holes",
    )


def test_the_rest_is_a_best_fit_again(lab: Judge) -> None:
    small, middle, large = sorted(lab.random.sample(range(3, 9), 3))
    sizes = [middle, large, small]
    lab.random.shuffle(sizes)
    steps, capacity = holes_of(sizes)
    nbytes = UNIT * (large + small - 1) - lab.random.randrange(UNIT)
    before, after = play(lab, [*steps, ("extents", nbytes)], capacity)[-2:]
    expect_rule(lab, nbytes, before.holes, after)
    lab.expect(
        sorted(dict(before.holes).get(offset, 0) for offset, _ in after.got or []),
        [UNIT * small, UNIT * large],
        f"allocate_extents({nbytes}) with holes of {[size * UNIT for size in sizes]} B (sizes of its holes,"
        " sorted)",
        "the rest goes to the smallest hole that holds it, and not to the next largest",
    )


def test_only_one_extent_is_not_a_whole_number_of_units(lab: Judge) -> None:
    sizes = lab.random.sample(range(1, 12), 5)
    steps, capacity = holes_of(sizes)
    nbytes = UNIT * sum(sizes) - lab.random.randrange(1, UNIT)
    before, after = play(lab, [*steps, ("extents", nbytes)], capacity)[-2:]
    expect_rule(lab, nbytes, before.holes, after)
    expect_sum(lab, nbytes, before.holes, after)
    lab.expect(
        sorted(size % UNIT for _, size in after.got or []),
        [0] * 4 + [nbytes % UNIT],
        f"allocate_extents({nbytes}) of {UNIT * sum(sizes)} free bytes (bytes beyond whole units, sorted)",
        "all extents but the last are whole units long, so that each can be freed by itself",
    )


def test_none_is_returned_only_when_too_few_bytes_are_free(lab: Judge) -> None:
    sizes = lab.random.sample(range(1, 9), 4)
    steps, capacity = holes_of(sizes)
    free = UNIT * sum(sizes)
    for nbytes in (free, free - UNIT + 1, free + 1, free + 10 * UNIT):
        before, after = play(lab, [*steps, ("extents", nbytes)], capacity)[-2:]
        expect_rule(lab, nbytes, before.holes, after)


def test_each_extent_is_freed_by_itself(lab: Judge) -> None:
    sizes = lab.random.sample(range(1, 12), 6)
    steps, capacity = holes_of(sizes)
    nbytes = UNIT * sum(sizes) - lab.random.randrange(3 * UNIT)
    steps.append(("extents", nbytes))
    seen = play(lab, [*steps, ("free", len(steps) - 1)], capacity, last=3)
    expect_rule(lab, nbytes, seen[-3].holes, seen[-2])
    lab.expect(
        seen[-1].holes,
        seen[-3].holes,
        f"allocate_extents({nbytes}), and then free() of each of its extents (holes)",
        "afterwards the holes are those that were there before",
    )
    steps += [("free", len(steps) - 1), *(("free", 2 * place + 1) for place in range(len(sizes)))]
    lab.expect(
        play(lab, steps, capacity, last=1)[-1].holes,
        [(0, capacity)],
        f"allocate_extents({nbytes}), free() of its extents, and then of the ranges between them (holes)",
        "only the extents that are returned are taken, so all other ranges are freed as they were",
    )


def test_a_random_history_follows_the_rule(lab: Judge) -> None:
    capacity = 60 * UNIT
    steps: list[Step] = []
    alive: list[int] = []
    free = capacity
    sizes: dict[int, int] = {}
    for number in range(60):
        if alive and (lab.random.random() < 0.45 or free < 4 * UNIT):
            gone = alive.pop(lab.random.randrange(len(alive)))
            steps.append(("free", gone))
            free += sizes[gone]
            continue
        nbytes = lab.random.randint(1, 10 * UNIT)
        if (size := padded(nbytes)) <= free:
            alive.append(number)
            sizes[number] = size
            free -= size
        steps.append(("extents", nbytes))
    before, row = [(0, capacity)], 0
    for step, after in zip(steps, play(lab, steps, capacity, last=len(steps))):
        if step[0] == "extents":
            lab.compares(row)
            row += 1
            expect_rule(lab, step[1], before, after)
            expect_sum(lab, step[1], before, after)
        before = after.holes


def test_no_call_reads_all_holes(lab: Judge) -> None:
    count, most = lab.size.holes, lab.size.extents
    sizes = list(range(1, count + 1))
    lab.random.shuffle(sizes)
    steps, capacity = holes_of(sizes)
    nbytes = UNIT * sum(range(count - most + 2, count + 1)) + UNIT * (count // 2) - 100
    before, after = play(lab, [*steps, ("extents", nbytes)], capacity)[-2:]
    # Two binary searches for each extent: for a hole that holds what is left, and to forget the size taken.
    needed = 2 * most * count.bit_length() + 1
    lab.cost(after.read, 2 * needed, needed=needed)
    lab.expect(
        sorted(in_units(after.got)),
        sorted(expected_units(nbytes, before.holes) or ()),
        f"allocate_extents({nbytes:,}) with {count} holes of different sizes (bytes of extents, rounded up,"
        " sorted)",
        "the whole of a largest hole is taken while nothing holds what is left, also among many holes",
    )
