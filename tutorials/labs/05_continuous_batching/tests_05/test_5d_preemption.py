"""5d: when pages run out, the youngest jobs of the running batch give up theirs, and no more than must."""

from __future__ import annotations

from collections import Counter
from typing import Any

import msgspec

from mooncake_lite.labs.judging import Judge

from .ranks import Rank, kept


class Seen(msgspec.Struct):
    """Names of the preempted in order, how many jobs were looked at, whether the books were changed."""

    names: list[str]
    looked: int
    changed: bool


def preempt(lab: Judge, rank: Rank, called: str, num_free: int | None = None) -> Seen:
    """Ask who is preempted."""
    num_free = len(rank.free) if num_free is None else num_free
    seen = lab.ask("preempted", rank.inputs(num_free=num_free), Seen, called)
    rows = []
    for stage in ("swapping", "running", "loading"):
        for job in rank.stages[stage]:
            how = (
                f"preempted as number {seen.names.index(job['name']) + 1}"
                if job["name"] in seen.names
                else "stays"
            )
            rows.append([job["name"], stage, " ".join(map(str, job["pages"])), last_page(rank, job), how])
    title = f"a batch with {num_free} free pages, from the oldest job to the youngest"
    columns = ["job", "stage", "its pages", "last page", "came back"]
    lab.trace({"kind": "table", "title": title, "columns": columns, "rows": rows})
    return seen


def need(rank: Rank, job: dict[str, Any]) -> int:
    """Pages that a job needs for its last token, if nothing is shared."""
    return int((job["tokens"] - 1) % rank.page_tokens == 0)


def last_page(rank: Rank, job: dict[str, Any]) -> str:
    """Whether the next token of a job has a place in its last page."""
    return "full" if need(rank, job) else "has space"


def expect(
    lab: Judge, rank: Rank, expected: list[str], called: str, breaks: str, num_free: int | None = None
) -> Seen:
    """Ask who is preempted, and in which order. Another answer is told which rule it breaks."""
    seen = preempt(lab, rank, called, num_free)
    rule = broken_rule(rank, seen.names, expected)
    lab.expect(seen.names, expected, f"{called} (preempted, in order)", f"{rule}; {breaks}")
    return seen


def broken_rule(rank: Rank, names: list[str], expected: list[str]) -> str:
    """The first rule that the names break, if they are not the expected ones."""
    running = [job["name"] for job in rank.stages["running"]]
    if not expected:
        return "no job has to be preempted"
    if not {*expected} <= {*running}:
        return "a prefetch that is loading is preempted before all others, and then alone"
    if not {*names} <= {*running}:
        return "a job is preempted that is not in the running batch"
    if len({*names}) < len(names):
        return "a job is preempted twice"
    if {*names} != {*running[len(running) - len(names) :]}:
        return "a younger job stays than one that is preempted"
    if len(names) > len(expected):
        return "more jobs are preempted than must be"
    if len(names) < len(expected):
        return "too few jobs are preempted: those that stay do not all have a page for their next token"
    return "the right jobs are preempted in the wrong order: the youngest comes first"


def batch(rank: Rank, *kinds: tuple[str, int]) -> list[str]:
    """Add running jobs, full or roomy, with so many pages each. Returns their names, the oldest first."""
    for number, (kind, pages) in enumerate(kinds):
        tokens = rank.full(pages) if kind == "full" else rank.roomy(pages)
        rank.add("running", f"{kind}{number}", tokens)
    return [job["name"] for job in rank.stages["running"]]


def test_it_chooses_and_changes_nothing(lab: Judge) -> None:
    count = lab.random.randint(3, 5)
    rank = Rank(lab, 2 * count)
    batch(rank, *[("full", 2)] * count)
    called = f"to_preempt(): {count} jobs need a page, and none is free"
    kept(lab, preempt(lab, rank, called).changed, called)


def test_no_job_is_preempted_while_there_are_pages_enough(lab: Judge) -> None:
    full, roomy = lab.random.randint(1, 3), lab.random.randint(3, 5)
    rank = Rank(lab, 2 * (full + roomy) + full)
    kinds = [("full", 2)] * full + [("roomy", 2)] * roomy
    lab.random.shuffle(kinds)
    names = batch(rank, *kinds)
    called = f"to_preempt(): {full} of {len(names)} jobs need a page, and {full} are free"
    expect(lab, rank, [], called, "a job with space in its last page needs no page")
    called = f"to_preempt(): {full} of {len(names)} jobs need a page, and {full - 1} are free"
    expect(lab, rank, names[-1:], called, "now one page is missing", full - 1)


def test_the_youngest_job_is_preempted_first(lab: Judge) -> None:
    count = lab.random.randint(4, 6)
    rank = Rank(lab, 2 * count)
    names = batch(rank, *[("full", 2)] * count)
    victims = -(-count // 3)
    called = f"to_preempt(): {count} jobs with 2 pages need one each, none is free"
    expect(
        lab,
        rank,
        names[::-1][:victims],
        called,
        f"{victims} jobs give 2 pages each to the {count - victims} others; the youngest loses the least",
    )


def test_a_job_that_needs_no_page_itself_is_preempted_when_it_is_the_youngest(lab: Judge) -> None:
    rank = Rank(lab, 2 + 2 + 3)
    names = batch(rank, ("full", 2), ("full", 2), ("roomy", 3))
    called = f"to_preempt(): {names[0]} and {names[1]} need a page, {names[2]} does not, and none is free"
    expect(lab, rank, names[2:], called, "the youngest job leaves, also when older ones need the pages")


def test_pages_that_others_use_too_do_not_become_free(lab: Judge) -> None:
    shared = lab.random.randint(2, 4)
    rank = Rank(lab, 2 + shared + 2 + 2)
    (old,) = batch(rank, ("full", 2))
    prompt = rank.take(shared)
    for name in ("twin1", "twin2"):
        rank.add("running", name, shared * rank.page_tokens + 2, pages=[*prompt, *rank.take(1)])
    called = f"to_preempt(): {old} needs a page; the two youngest share {shared} of their {shared + 1} pages"
    expect(lab, rank, ["twin2"], called, "its own last page is enough for one", 0)
    rank.stages["running"].insert(0, {**rank.stages["running"][0], "name": "older", "pages": rank.take(2)})
    called = called.replace("needs a page", "and older need a page each")
    expect(
        lab,
        rank,
        ["twin2", "twin1"],
        called,
        "twin2 gives only 1 page, because twin1 still uses the shared ones",
        0,
    )


def test_a_writer_into_a_shared_page_needs_one_and_its_last_user_does_not(lab: Judge) -> None:
    count = lab.random.randint(3, 5)
    for missing in (0, 1):
        rank = Rank(lab, 2 + count)
        first = rank.add("running", "twin0", rank.roomy(2))
        for number in range(1, count):
            rank.add("running", f"twin{number}", first["tokens"], pages=first["pages"])
        free = count - 1 - missing
        called = (
            f"to_preempt(): {count} jobs share all pages and write into the last one, {free} pages are free"
        )
        expect(
            lab,
            rank,
            [f"twin{count - 1}"][:missing],
            called,
            f"{count - 1} copies are needed: the last user keeps the page, and a job that leaves is no user",
            free,
        )


def test_pages_of_jobs_that_are_swapped_out_are_as_good_as_free(lab: Judge) -> None:
    count = lab.random.randint(2, 4)
    rank = Rank(lab, count + 2 * count + 1)
    rank.add("swapping", "leaves", rank.roomy(count))
    names = batch(rank, *[("full", 2)] * count)
    called = (
        f"to_preempt(): {count} jobs need a page, none is free, and a job with {count} pages is swapped out"
    )
    expect(lab, rank, [], called, "the batch waits for these pages", 0)
    rank.add("running", "youngest", rank.full(1))
    called = f"to_preempt(): {count + 1} jobs need a page, and the job that is swapped out has {count} pages"
    expect(lab, rank, ["youngest"], called, f"the {count} pages are for {names}", 0)


def test_a_page_that_a_job_of_the_batch_uses_too_does_not_come_free_by_a_swap(lab: Judge) -> None:
    shared = lab.random.randint(2, 4)
    rank = Rank(lab, 2 + shared + 1 + 1)
    (old,) = batch(rank, ("full", 2))
    prompt = rank.take(shared)
    rank.add("swapping", "leaves", rank.full(shared), pages=prompt)
    rank.add("running", "twin", rank.full(shared) + 1, pages=[*prompt, *rank.take(1)])
    rank.add("running", "youngest", rank.roomy(1))
    called = (
        f"to_preempt(): {old} needs a page, none is free, and a job is swapped out with {shared} pages, "
        "all of which twin uses too"
    )
    expect(lab, rank, ["youngest"], called, "no page comes free by the swap, and `_leave` says so")


def test_a_job_that_runs_alone_gives_way_to_one_that_is_loading(lab: Judge) -> None:
    rank = Rank(lab, 3 + 5)
    (alone,) = batch(rank, ("full", 3))
    rank.add("loading", "loads", 5 * rank.page_tokens, load=1)
    called = f"to_preempt(): {alone} runs alone and needs a page, and a job that loads holds all others"
    expect(lab, rank, [alone], called, "otherwise neither could go on")


def test_a_prefetch_gives_way_before_all_others(lab: Judge) -> None:
    rank = Rank(lab, 4 + 5)
    names = batch(rank, ("full", 2), ("full", 2))
    rank.add("loading", "ahead", 5 * rank.page_tokens, load=1, duty="prefetch")
    called = f"to_preempt(): {names[0]} and {names[1]} need a page, none is free, and a prefetch is loading"
    expect(lab, rank, ["ahead"], called, "no job waits for a prefetch: it leaves, alone")
    called = f"to_preempt(): {names[0]} and {names[1]} need a page, 2 are free, and a prefetch is loading"
    expect(lab, rank, [], called, "it stays while there are pages enough", 2)
    rank = Rank(lab, 6 + 1)
    first, *others = batch(rank, ("full", 2), ("roomy", 2), ("roomy", 2))
    rank.add("loading", "ahead", rank.page_tokens, load=1, duty="prefetch")
    called = f"to_preempt(): of {first}, {' and '.join(others)} only {first} needs a page, 1 is free"
    expect(lab, rank, [], f"{called}, and a prefetch is loading", "it stays while there are pages enough", 1)
    rank = Rank(lab, 6 + 1)
    names = batch(rank, ("full", 2), ("full", 2), ("full", 2))
    rank.add("loading", "ahead", rank.page_tokens, load=1, duty="prefetch")
    called = f"to_preempt(): {', '.join(names)} need a page, none is free, and a prefetch has 1 page"
    expect(lab, rank, ["ahead"], called, "it leaves alone, even if its pages do not suffice")


def modelled(rank: Rank, num_free: int) -> list[str]:
    """The fewest of the youngest jobs after whose leaving the others have their pages."""
    running, swapping = rank.stages["running"], rank.stages["swapping"]
    everyone = [*running, *swapping, *rank.stages["prefilling"], *rank.stages["loading"]]
    used = {page for job in everyone for page in job["pages"]}
    for count in range(len(running) + 1):
        stay, leave = running[: len(running) - count], running[len(running) - count :]
        users = Counter(
            page for job in everyone if job not in leave and job not in swapping for page in job["pages"]
        )
        free = num_free + len(used - set(users))
        for job in stay:
            copies = not need(rank, job) and users[job["pages"][-1]] > 1
            users[job["pages"][-1]] -= copies
            free -= need(rank, job) + copies
        if free >= 0:
            return [job["name"] for job in reversed(leave)]
    raise AssertionError("an empty batch needs no page")


def add_twin(rank: Rank, stage: str, name: str) -> None:
    """Add a branch of a running job. It shares all of that job's pages, or has a last page of its own."""
    twin = rank.lab.random.choice(rank.stages["running"])
    own = rank.take(rank.lab.random.choice([0, 0, 1]))
    pages = [*twin["pages"][: len(twin["pages"]) - len(own)], *own]
    rank.add(stage, name, twin["tokens"], pages=pages)


def test_random_batches_lose_the_fewest_of_their_youngest_jobs(lab: Judge) -> None:
    for _ in range(25):
        rank = Rank(lab, 60)
        for number in range(lab.random.randint(3, 9)):
            running = rank.stages["running"]
            if running and lab.random.random() < 0.4:
                add_twin(rank, "running", f"r{number}")
            else:
                grown = lab.random.choice([rank.full, rank.roomy])
                rank.add("running", f"r{number}", grown(lab.random.randint(1, 3)))
        if lab.random.random() < 0.4:
            add_twin(rank, "swapping", "leaves")
        free = lab.random.randint(0, 3)
        told = [(job["name"], job["pages"], last_page(rank, job)) for job in rank.stages["running"]]
        leaves = [job["pages"] for job in rank.stages["swapping"]]
        called = (
            f"to_preempt(): {free} free pages, swapped out {leaves}, running (job, pages, last page): {told}"
        )
        expect(
            lab,
            rank,
            modelled(rank, free),
            called,
            "a writer into a page that others use too needs a page, unless all others have left it",
            free,
        )


def test_each_job_is_looked_at_a_few_times(lab: Judge) -> None:
    size = lab.size
    rank = Rank(lab, size.batch * size.held)
    batch(rank, *[("full", size.held)] * size.batch)
    called = f"to_preempt(): {size.batch} jobs with {size.held} pages need one each, {size.spare} are free"
    lab.cost(preempt(lab, rank, called, size.spare).looked, 6 * size.batch, needed=size.batch)
    expect(lab, rank, modelled(rank, size.spare), called, "the fewest of the youngest jobs", size.spare)
