"""3b: a tier gets each block once; until it is saved, it stays in DRAM."""

from __future__ import annotations

from mooncake_lite.labs.judging import Judge

from .puts import Segments, Step, called, keys_of, play, words


def test_a_block_stays_in_dram_until_its_tier_has_it(lab: Judge) -> None:
    a, b, c = keys_of(lab, 3)
    steps: list[Step] = [
        ("put", "r0", 0, None),
        ("put", "r1", 0, a),
        ("put", "r1", 0, b),
        ("end", 1),
        ("end", 2),
        ("put", "r2", 0, c),
        ("saved", 0, b),
        ("put", "r2", 0, c),
        ("find", a),
        ("find", b),
    ]
    seen = play(lab, [(0, 3, 0)], steps, share=1.0)
    lab.expect(
        [after.waiting for after in seen[3:7]],
        [[1], [1, 2], [1, 2], [1]],
        "put_end() of two blocks, another put_start(), and saved() of the second block (unsaved puts)",
        "a block waits for its save from the moment it is visible until its tier reports it",
    )
    lab.expect(
        [after.said for after in seen[5:]],
        ["full", "", "allocated", "dram of rank 0", "not found"],
        f"3 places, one private and two unsaved; {'; '.join(map(words, steps[5:]))}",
        "an unsaved block is not evicted: its bytes are nowhere else. After saved() it may go",
    )


def test_a_segment_without_a_saver_saves_nothing(lab: Judge) -> None:
    a, b = keys_of(lab, 2)
    steps: list[Step] = [("put", "r1", 0, a), ("end", 0), ("take",), ("put", "r2", 0, b), ("end", 3)]
    seen = play(lab, [(0, 1, None), (1, 1, 1)], steps, share=0.5)
    lab.expect(
        (seen[1].waiting, seen[1].skipped, seen[2].said),
        ([], 0, ""),
        called(steps, 1, "unsaved puts, saves_skipped, what take_saves() then returns"),
        "no tier saves the blocks of a segment whose saver is None, so none waits, and no save is skipped"
        " either",
    )
    lab.expect(
        (seen[3].said, seen[4].visible),
        ("allocated", {str(b): 3}),
        f"one place; {'; '.join(map(words, steps))} (results)",
        "a block that no tier has to save can be evicted at once",
    )


def test_a_key_that_a_tier_knows_is_not_saved_again(lab: Judge) -> None:
    a, b = keys_of(lab, 2)
    steps: list[Step] = [
        ("put", "r1", 0, a),
        ("end", 0),
        ("take",),
        ("durable", 0, a),
        ("put", "r2", 0, b),
        ("put", "r2", 0, b + 1000),
        ("find", a),
        ("put", "r2", 1, a),
        ("end", 7),
        ("take",),
    ]
    seen = play(lab, [(0, 2, 0), (1, 2, 1)], steps, share=1.0)
    lab.expect(
        (seen[2].said, seen[6].said),
        (f"rank 0: [{a}]", "ssd of rank 0"),
        "a block is put and saved, and then evicted from DRAM (take_saves(), lookup())",
        "a visible block is handed to its tier once",
    )
    lab.expect(
        (seen[8].said, seen[8].waiting, seen[9].said),
        ("visible", [], ""),
        f"{called(steps, 8, 'result, unsaved puts, what take_saves() then returns')}; rank 0 has it on SSD",
        "a block that any tier knows becomes visible and is not written again",
    )


def test_a_key_that_a_tier_knows_is_no_skipped_save(lab: Judge) -> None:
    a, b = keys_of(lab, 2)
    steps: list[Step] = [
        ("put", "r1", 0, a),
        ("end", 0),
        ("take",),
        ("durable", 0, a),
        ("put", "r2", 0, None),
        ("put", "r2", 0, None),
        ("put", "r2", 1, b),
        ("end", 6),
        ("put", "r2", 1, a),
        ("end", 8),
    ]
    seen = play(lab, [(0, 2, 0), (1, 3, 1)], steps, share=0.6)
    lab.expect(
        (seen[9].said, seen[9].waiting, seen[9].skipped),
        ("visible", [6], 0),
        f"{called(steps, 9, 'result, unsaved puts, saves_skipped')}; rank 0 has {a} on SSD, and the share of"
        " rank 1 is used up",
        "the share is asked only for a block that has to be saved: one that a tier knows is not counted as"
        " skipped",
    )


def test_a_block_that_another_rank_saves_comes_to_the_ssd_of_that_rank(lab: Judge) -> None:
    (a,) = keys_of(lab, 1)
    segments: Segments = [(0, 8, 0), (1, 8, 0)]
    steps: list[Step] = [("put", "r1", 1, a), ("end", 0), ("take",), ("saved", 0, a), ("durable", 0, a)]
    seen = play(lab, segments, steps)
    lab.expect(
        (seen[1].waiting, seen[4].events),
        ([0], [f"BlockStored {a} ssd of rank 0"]),
        f"{called(steps, 4, 'unsaved puts after put_end(), and events now')}; rank 0 is the saver of rank 1",
        "the save is started for the saver of the segment, which may be another rank: its report ends it",
    )


def test_saves_are_taken_in_order_by_the_tier_that_keeps_the_segment(lab: Judge) -> None:
    keys = keys_of(lab, 5)
    segments: Segments = [(0, 8, 0), (1, 8, 0), (2, 8, 2), (3, 8, None)]
    ranks = [0, 1, 2, 3, 1]
    steps: list[Step] = [("put", "r1", rank, key) for rank, key in zip(ranks, keys)]
    order = lab.random.sample(range(5), 5)
    steps += [("end", number) for number in order]
    steps += [("take",), ("take",)]
    seen = play(lab, segments, steps)
    of_saver: dict[int, list[int]] = {}
    for number in order:
        if (saver := segments[ranks[number]][2]) is not None:
            of_saver.setdefault(saver, []).append(keys[number])
    lab.expect(
        [after.said for after in seen[10:]],
        ["; ".join(f"rank {saver}: {saves}" for saver, saves in of_saver.items()), ""],
        f"put_end() of {[keys[n] for n in order]}, on ranks {[ranks[n] for n in order]}; take_saves() twice",
        "a rank's saver saves its blocks in the order in which they became visible. Rank 0 saves for 0, 1"
        " too, and nothing saves those of rank 3",
    )
    lab.expect(
        seen[9].waiting,
        sorted(n for n in range(5) if ranks[n] != 3),
        "put_end() of five blocks (unsaved puts)",
        "a block waits for its save, and one that no tier saves does not",
    )


def test_at_most_its_share_of_a_segment_waits(lab: Judge) -> None:
    for places, share in (
        lab.random.choice([(5, 0.4), (6, 0.5), (8, 0.25)]),
        (lab.random.choice([5, 7, 9]), 0.5),
    ):
        most = int(places * share)
        keys = keys_of(lab, places)
        steps: list[Step] = [("put", "r1", 0, key) for key in keys]
        steps += [("end", number) for number in range(places)]
        seen = play(lab, [(0, places, 0)], [*steps, ("take",)], share=share)
        for number, after in enumerate(seen[places:-1]):
            lab.expect(
                (after.said, len(after.waiting), after.skipped),
                ("visible", min(number + 1, most), max(0, number + 1 - most)),
                f"put_end() of #{number + 1}; share {share} of {places} blocks (result, waiting, skipped)",
                f"at most {share} x {places} blocks wait for a slow disk, this one included: one that just"
                " reaches the share waits, and one beyond it is counted",
            )
        lab.expect(
            seen[-1].said,
            f"rank 0: {keys[:most]}",
            f"take_saves() after {places} blocks became visible, share {share}",
            "a save that was skipped is not handed to the tier",
        )


def test_a_block_counts_in_the_share_with_its_own_bytes(lab: Judge) -> None:
    keys = keys_of(lab, 3)
    steps: list[Step] = [("put", "r1", 0, key) for key in keys]
    steps += [("end", number) for number in range(3)]
    seen = play(lab, [(0, 4, 0)], steps, share=0.48, head_dim=7)
    lab.expect(
        [(after.waiting, after.skipped) for after in seen[3:]],
        [([0], 0), ([0, 1], 0), ([0, 1], 1)],
        "put_end() of three blocks of 224 bytes in ranges of 256; share 0.48 of 1,024 bytes, which is 491"
        " (unsaved puts, saves_skipped)",
        "a block is added with its nbytes to what is unsaved: 256 + 224 bytes are within the share",
    )


def test_each_block_is_written_once(lab: Judge) -> None:
    size = lab.size
    steps: list[Step] = []
    fresh, per_turn = 1000, size.turn_blocks
    talks = [list(range(10 * talk, 10 * talk + 4)) for talk in range(size.talks)]
    for turn in range(4):
        for number, talk in enumerate(talks):
            if turn:
                talk += range(fresh, fresh + per_turn)
                fresh += per_turn
            begin = len(steps)
            steps += [("put", f"r{turn}-{number}", 0, key) for key in talk]
            steps += [("end", begin + place) for place in range(len(talk))]
            steps += [("release", f"r{turn}-{number}"), ("take",)]
            steps += [("durable", 0, key) for key in talk]
    blocks = len({key for talk in talks for key in talk})
    taken = play(lab, [(0, 3 * (4 + 3 * per_turn), 0)], steps, only="take")
    written = sum(len(after.said.split(",")) for after in taken if after.said)
    lab.cost(written, blocks)
    lab.expect(
        written,
        blocks,
        f"{size.talks} conversations of 4 turns in a small pool (blocks handed to the tier)",
        "a block that comes back after it was evicted is on SSD already, and is not written again",
    )
