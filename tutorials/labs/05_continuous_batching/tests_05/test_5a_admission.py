"""5a: waiting jobs begin first come, first served, while sequences, prompts and pages allow it."""

from __future__ import annotations

from typing import Any

import msgspec

from mooncake_lite.labs.judging import Judge

from .ranks import SEQUENCES, Rank, kept, names, pages_of


class Admitted(msgspec.Struct):
    """One admission."""

    job: str
    pages: list[int]
    shared: int
    loads: bool
    by_layers: bool


class Seen(msgspec.Struct):
    """The admissions, pages that the draft can still give, jobs that were looked at, changes of the books."""

    admissions: list[Admitted]
    available: int
    looked: int
    changed: bool


def admit(lab: Judge, rank: Rank, called: str) -> Seen:
    """Ask for the admissions. Whatever begins has pages of its own for all of its tokens."""
    seen = lab.ask("admissions", rank.inputs(), Seen, called)
    waiting = {job["name"]: job for job in rank.stages["waiting"]}
    began = {each.job: each for each in seen.admissions}
    rows = []
    for name, job in waiting.items():
        pages = pages_of(job["tokens"], rank.page_tokens)
        needed = f"{pages} pages; sequences: {job['branches']}; duty: {job['duty']}"
        how = f"begins with {len(began[name].pages)} pages" if name in began else "waits"
        rows.append([name, needed, how])
    running = len(rank.stages["running"])
    title = f"the line of a rank with {len(rank.free)} free pages and {running} running sequences"
    lab.trace({"kind": "table", "title": title, "columns": ["job", "needs", "came back"], "rows": rows})
    for each in seen.admissions:
        if each.pages or waiting[each.job]["duty"] != "prefetch":
            lab.expect(
                len(each.pages),
                pages_of(waiting[each.job]["tokens"], rank.page_tokens),
                f"{called} (pages of {each.job}, which has {waiting[each.job]['tokens']} tokens)",
                "a job begins with pages for all of its tokens",
            )
    taken = [page for each in seen.admissions for page in each.pages[each.shared :]]
    lab.expect(
        (len(set(taken)), sorted(set(taken) - set(rank.free))),
        (len(taken), []),
        f"{called} (different pages that are taken, and those that were not free)",
        "each page that is taken was free, and one job alone gets it",
    )
    return seen


def begun(seen: Seen) -> list[str]:
    """Names of the jobs that begin."""
    return [each.job for each in seen.admissions]


def test_it_chooses_and_changes_nothing(lab: Judge) -> None:
    rank = Rank(lab, 12)
    for name in names(lab, 4):
        rank.add("waiting", name, 4 * rank.page_tokens)
    called = "next_admissions(): 12 free pages, four jobs need 4 each"
    kept(lab, admit(lab, rank, called).changed, called)


def test_jobs_begin_in_the_order_of_their_arrival(lab: Judge) -> None:
    rank = Rank(lab, 400)
    line = names(lab, 5)
    for name in line:
        rank.add("waiting", name, lab.random.randint(1, 8 * rank.page_tokens))
    called = f"next_admissions() of {len(line)} jobs, with pages for all"
    lab.expect(begun(admit(lab, rank, called)), line, called, "first come, first served")
    lab.expect(begun(admit(lab, Rank(lab, 9), "")), [], "next_admissions() of an empty line", "nothing waits")


def test_no_job_passes_one_that_waits_for_pages(lab: Judge) -> None:
    rank = Rank(lab, 12)
    first, large, small = names(lab, 3)
    rank.add("waiting", first, 4 * rank.page_tokens)
    rank.add("waiting", large, 9 * rank.page_tokens)
    rank.add("waiting", small, rank.page_tokens)
    called = f"next_admissions(): 12 free pages; {first} needs 4, {large} 9 and {small} 1"
    lab.expect(
        begun(admit(lab, rank, called)),
        [first],
        called,
        f"{small} has come after {large}: if small jobs passed it, {large} might never begin",
    )


def test_the_next_pages_of_the_running_batch_remain(lab: Judge) -> None:
    tight, batch = lab.random.randint(2, 4), lab.random.randint(3, 5)
    wanted = lab.random.randint(3, 6)
    for spare in (0, -1):
        rank = Rank(lab, 2 * (tight + batch) + tight + wanted + spare)
        for number in range(tight):
            rank.add("running", f"tight{number}", rank.full(2))
        for number in range(batch):
            rank.add("running", f"roomy{number}", rank.roomy(2))
        rank.add("waiting", "new", wanted * rank.page_tokens)
        free = len(rank.free)
        called = (
            f"next_admissions(): {free} free pages, {tight} of {tight + batch} running sequences need a page"
        )
        lab.expect(
            begun(admit(lab, rank, f"{called}, and new needs {wanted}")),
            ["new"] if not spare else [],
            f"{called}, and new needs {wanted}",
            "a job begins if besides its own pages there remain those of the batch's next tokens",
        )


def test_the_next_pages_of_the_batch_remain_also_after_the_first_job(lab: Judge) -> None:
    tight, wanted = lab.random.randint(2, 4), lab.random.randint(3, 6)
    for spare in (0, -1):
        rank = Rank(lab, 2 * tight + tight + 2 * wanted + spare)
        for number in range(tight):
            rank.add("running", f"tight{number}", rank.full(2))
        line = names(lab, 2)
        for name in line:
            rank.add("waiting", name, wanted * rank.page_tokens)
        called = f"next_admissions(): {len(rank.free)} free pages, the batch needs {tight}, each job {wanted}"
        lab.expect(
            begun(admit(lab, rank, called)),
            line[: 2 + spare],
            called,
            "the pages of the batch's next tokens remain, however many jobs begin",
        )


def test_at_most_so_many_prompts_are_in_progress(lab: Judge) -> None:
    most = lab.random.randint(3, 5)
    rank = Rank(lab, 400, prefills=most)
    rank.add("prefilling", "old", 5 * rank.page_tokens)
    line = names(lab, most + 2)
    for name in line:
        rank.add("waiting", name, 20)
    rank.stages["waiting"].insert(1, rank.stages["waiting"].pop())
    rank.stages["waiting"][1] |= {"duty": "decode", "tokens": 9}
    order = [job["name"] for job in rank.stages["waiting"]]
    called = (
        f"next_admissions(): prefills={most}, one prompt is in progress, {order[1]} of the line only decodes"
    )
    lab.expect(
        begun(admit(lab, rank, called)),
        order[:most],
        called,
        f"{most - 1} more prompts may begin; a job without PREFILL among its duties has no prompt to compute",
    )


def test_at_most_so_many_sequences_are_active(lab: Judge) -> None:
    branches = lab.random.randint(2, 4)
    rank = Rank(lab, 400, sequences=2 * branches + 2)
    rank.add("running", "old", rank.roomy(3))
    rank.add("prefilling", "prompt", 20, branches=branches)
    first, second, third = names(lab, 3)
    for name, count in ((first, 1), (second, branches), (third, 1)):
        rank.add("waiting", name, 20, branches=count)
    active = branches + 1
    called = (
        f"next_admissions(): sequences={2 * branches + 2}, {active} active; 1, {branches} and 1 more wait"
    )
    expected = [first, second]
    lab.expect(
        begun(admit(lab, rank, called)), expected, called, "each answer of a job is a sequence of its own"
    )
    rank.limits["sequences"] -= 1
    called = called.replace(f"={2 * branches + 2}", f"={2 * branches + 1}")
    expected = [first]
    lab.expect(
        begun(admit(lab, rank, called)),
        expected,
        called,
        f"{second} would make one too many, and {third} may not pass it",
    )


def test_a_rank_without_sequences_takes_the_next_job_however_many_it_has(lab: Judge) -> None:
    branches = lab.random.randint(3, 6)
    rank = Rank(lab, 400, sequences=branches - 1)
    first, second = names(lab, 2)
    rank.add("waiting", first, 20, branches=branches)
    rank.add("waiting", second, 20)
    called = f"next_admissions(): sequences={branches - 1}, none is active; the first job has {branches}"
    lab.expect(begun(admit(lab, rank, called)), [first], called, "otherwise it would wait forever")


def test_pages_that_hold_its_leading_tokens_are_shared(lab: Judge) -> None:
    size = lab.size
    rank = Rank(lab, 3 * size.block_pages + 4)
    begins = rank.cache(3)
    shared = pages_of(begins, rank.page_tokens)
    rank.add("waiting", "new", begins + 4 * rank.page_tokens, begins=begins)
    called = f"next_admissions(): {shared} pages hold first tokens of new, which needs {shared + 4}; free: 4"
    seen = admit(lab, rank, called)
    lab.expect(begun(seen), ["new"], called, "shared pages need not be free")
    (new,) = seen.admissions
    lab.expect(
        (new.pages[: new.shared], new.loads),
        (rank.cached["pages"], False),
        f"{called} (pages that it shares, and whether it loads)",
        "the pages of the match come first, in their order",
    )


def test_one_job_at_a_time_loads_blocks_from_the_pool(lab: Judge) -> None:
    block = lab.size.block_pages * lab.size.page_tokens
    rank = Rank(lab, 400)
    first, second, third = names(lab, 3)
    rank.add("waiting", first, 2 * block, load=2, reads=False)
    rank.add("waiting", second, 3 * block, load=2)
    rank.add("waiting", third, 3 * block, load=2)
    called = f"next_admissions(): {second} and {third} have 2 blocks each to load; {first} computes its own"
    seen = admit(lab, rank, called)
    lab.expect(
        [(each.job, each.loads) for each in seen.admissions],
        [(first, False), (second, True)],
        f"{called} (job, whether it loads)",
        "one job loads at a time, so the next one that would load waits",
    )
    rank.add("loading", "old", block, load=1)
    lab.expect(
        begun(admit(lab, rank, called)),
        [first],
        f"{called}, and another job loads",
        "one job loads at a time",
    )


def test_a_prefetch_waits_for_a_job_that_loads(lab: Judge) -> None:
    block = lab.size.block_pages * lab.size.page_tokens
    for duty, stage in (("prefetch", "loading"), ("both", "waiting")):
        rank = Rank(lab, 400)
        old, ahead, new = names(lab, 3)
        rank.add(stage, old, 2 * block, load=2, duty=duty)
        rank.add("waiting", ahead, 2 * block, load=2, duty="prefetch")
        rank.add("waiting", new, block)
        called = f"next_admissions(): {old} loads blocks, or begins to in this step; {ahead} is a prefetch"
        lab.expect(
            begun(admit(lab, rank, called)),
            [old] if stage == "waiting" else [],
            called,
            f"one job loads at a time, prefetches too; {new} may not pass {ahead}",
        )


def test_jobs_whose_blocks_come_in_by_layers_do_not_hold_up_one_that_loads(lab: Judge) -> None:
    block = lab.size.block_pages * lab.size.page_tokens
    rank = Rank(lab, 400, layers=4, least=2)
    rank.duty = "prefill"
    line = names(lab, 4)
    for name, blocks in zip(line, (2, 3, 1, 2)):
        rank.add("waiting", name, (blocks + 1) * block, load=blocks, duty="prefill")
    called = (
        f"next_admissions() of a rank without DECODE: {', '.join(line)} have 2, 3, 1 and 2 blocks to load; "
        "2 and more come in by layers"
    )
    lab.expect(
        [(each.job, each.loads, each.by_layers) for each in admit(lab, rank, called).admissions],
        [(line[0], True, True), (line[1], True, True), (line[2], True, False)],
        f"{called} (job, whether it loads, whether by layers)",
        f"a job that loads by layers holds up none; {line[2]} does not, and holds up {line[3]}",
    )


def test_a_job_that_does_not_begin_takes_no_pages(lab: Judge) -> None:
    block = lab.size.block_pages * lab.size.page_tokens
    for why, limits, stage in (
        ("a sequence is active, and sequences=1", {"sequences": 1}, "running"),
        ("a prompt is in progress, and prefills=1", {"prefills": 1}, "prefilling"),
        ("another job loads, and new has blocks to load too", {}, "loading"),
    ):
        rank = Rank(lab, 60, **limits)
        rank.add(stage, "old", 2 * block, load=int(stage == "loading"))
        rank.add("waiting", "new", 3 * block, load=2)
        called = f"next_admissions(): {why}"
        seen = admit(lab, rank, called)
        lab.expect(
            (begun(seen), seen.available),
            ([], len(rank.free)),
            f"{called} (jobs that begin, pages that the draft can still give)",
            "what the draft gives is taken when the step begins: it is asked last, for a job that may begin",
        )


def test_a_prefetch_never_holds_up_others(lab: Judge) -> None:
    block = lab.size.block_pages * lab.size.page_tokens
    rank = Rank(lab, 2 * lab.size.block_pages, sequences=2)
    rank.add("running", "old", rank.roomy(lab.size.block_pages))
    rank.add("waiting", "ahead", 2 * block, load=2, duty="prefetch")
    rank.add("waiting", "new", block, load=1)
    called = "next_admissions(): a prefetch that needs more pages than there are, and a job that loads"
    seen = admit(lab, rank, called)
    lab.expect(
        [(each.job, len(each.pages), each.loads) for each in seen.admissions],
        [("ahead", 0, False), ("new", lab.size.block_pages, True)],
        f"{called} (job, pages, whether it loads)",
        "a prefetch without pages begins without and loads nothing; it has no sequence of its own",
    )


def test_a_prefetch_leaves_the_next_pages_of_the_running_batch(lab: Judge) -> None:
    blocks, tight = lab.random.randint(2, 3), lab.random.randint(2, 4)
    wanted = blocks * lab.size.block_pages
    for spare in (0, -1):
        rank = Rank(lab, 3 * tight + wanted + spare)
        for number in range(tight):
            rank.add("running", f"tight{number}", rank.full(2))
        rank.add("waiting", "ahead", wanted * rank.page_tokens, load=blocks, duty="prefetch")
        called = (
            f"next_admissions(): {len(rank.free)} free pages, the batch needs {tight}, a prefetch {wanted}"
        )
        lab.expect(
            [(each.job, len(each.pages)) for each in admit(lab, rank, called).admissions],
            [("ahead", 0 if spare else wanted)],
            f"{called} (job, pages)",
            "the pages of the batch's next tokens remain; a prefetch without pages begins without",
        )


def modelled(rank: Rank) -> list[str]:
    """Who begins, for jobs that share nothing and load whole prefixes at once."""
    running, prompts = rank.stages["running"], rank.stages["prefilling"]
    loading = rank.stages["loading"]
    free = len(rank.free) - sum((job["tokens"] - 1) % rank.page_tokens == 0 for job in running)
    active = len(running) + sum(sequences(job) for job in (*prompts, *loading))
    prefills, found = len(prompts) + sum(computes(job) for job in loading), []
    busy = bool(loading)
    for job in rank.stages["waiting"]:
        many = active > 0 and active + sequences(job) > rank.limits["sequences"]
        if many or (computes(job) and prefills >= rank.limits["prefills"]) or (job["load"] and busy):
            break
        pages = pages_of(job["tokens"], rank.page_tokens)
        if pages > free and job["duty"] != "prefetch":
            break
        found.append(job["name"])
        active, prefills = active + sequences(job), prefills + computes(job)
        if pages <= free:
            free, busy = free - pages, busy or job["load"] > 0
    return found


def sequences(job: dict[str, Any]) -> int:
    """Sequences that a job brings into the batch."""
    return 0 if job["duty"] == "prefetch" else int(job["branches"])


def computes(job: dict[str, Any]) -> bool:
    """Whether a job has a prompt to compute."""
    return job["duty"] in ("both", "prefill")


def random_job(lab: Judge, rank: Rank, stage: str, name: str, most_pages: int) -> None:
    """Add a job of any duty that loads some blocks of its prompt, or none. A prefetch loads always."""
    block = lab.size.block_pages * rank.page_tokens
    duty = lab.random.choice(["both", "both", "decode", "prefetch"])
    load = (
        lab.random.choice([1, 2])
        if duty == "prefetch" or stage == "loading"
        else lab.random.choice([0, 0, 1])
    )
    tokens = max(load * block, lab.random.randint(1, most_pages * rank.page_tokens)) + (duty != "prefetch")
    branches = 1 if duty == "prefetch" else lab.random.choice([1, 1, 2, 3])
    rank.add(stage, name, tokens, branches=branches, duty=duty, load=load)


def test_random_lines_begin_as_the_rules_say(lab: Judge) -> None:
    for _ in range(40):
        limits = {"sequences": lab.random.choice([4, 6, SEQUENCES]), "prefills": lab.random.choice([1, 2, 9])}
        rank = Rank(lab, 50, **limits)
        for number in range(lab.random.choice([0, 0, 2, 4])):
            pages = lab.random.randint(1, 4)
            rank.add("running", f"old{number}", lab.random.choice([rank.full, rank.roomy])(pages))
        for number in range(lab.random.choice([0, 0, 1, 2])):
            rank.add("prefilling", f"prompt{number}", 9, branches=lab.random.randint(1, 3))
        if lab.random.random() < 0.3:
            random_job(lab, rank, "loading", "loads", 3)
        for name in names(lab, 6):
            random_job(lab, rank, "waiting", name, lab.random.choice([3, 14, 60]))
        line = [
            (job["name"], job["tokens"], job["branches"], job["duty"], job["load"])
            for job in rank.stages["waiting"]
        ]
        active = [job["name"] for stage in list(rank.stages)[:3] for job in rank.stages[stage]]
        called = (
            f"next_admissions(): {len(rank.free)} free pages, {limits}, active: {', '.join(active)}, "
            f"line (job, tokens, answers, duty, blocks to load): {line}"
        )
        lab.expect(
            begun(admit(lab, rank, called)), modelled(rank), called, "the rules of the docstring, in turn"
        )


def test_those_that_must_wait_anyway_are_not_looked_at(lab: Judge) -> None:
    size = lab.size
    rank = Rank(lab, size.free_tokens // size.page_tokens + 3 * size.answers)
    for number in range(size.answers):
        rank.add("running", f"old{number}", rank.full(3))
    for name in names(lab, size.line):
        rank.add("waiting", name, size.prompt_tokens)
    called = (
        f"next_admissions(): {size.line} jobs of {size.prompt_tokens} tokens, {len(rank.free)} free pages"
    )
    seen = admit(lab, rank, called)
    expected = modelled(rank)
    lab.cost(seen.looked, 2 * len(expected) + 2, needed=len(expected) + 1)
    lab.expect(begun(seen), expected, called, "the first ones for which there are pages begin")
