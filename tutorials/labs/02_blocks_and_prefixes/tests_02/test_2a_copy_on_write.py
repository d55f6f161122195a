"""2a: sequences share pages, and each page counts its users. A writer copies a page that others use too."""

from __future__ import annotations

from collections import Counter

import msgspec

from mooncake_lite.labs.judging import Judge

Step = list[str | int]


class Books(msgspec.Struct):
    """The books after one step, as drive.py tells them."""

    new: list[int]
    copied: int | None
    held: dict[str, list[int]]
    used: list[tuple[int, int]]
    free: list[int]


def books(lab: Judge, steps: list[Step], page_tokens: int, num_pages: int = 400) -> list[Books]:
    inputs = {"num_pages": num_pages, "page_tokens": page_tokens, "steps": steps}
    seen = lab.ask("books", inputs, list[Books])
    lab.trace({"kind": "pages", "steps": steps[: len(seen)], "held": [after.held for after in seen]})
    last = seen[-1]
    lab.expect(
        {page: name for name, pages in last.held.items() for page in pages if page not in dict(last.used)},
        {},
        f"{told(steps, len(seen) - 1)} (pages that a sequence holds and that nobody uses)",
        "a sequence uses each page that it holds: grow() changes `held` in place, and counts the users",
    )
    return seen


def told(steps: list[Step], number: int) -> str:
    """The step as a message names it."""
    return f"step {number + 1} of {len(steps)}: {' '.join(map(str, steps[number]))}"


def random_history(lab: Judge) -> list[Step]:
    """Sequences that start, fork, write and end, drawn by the seed; long enough to fill pages of any size."""
    live, steps, named = [], [], 0
    for _ in range(40 + 10 * lab.size.page_tokens):
        verb = lab.random.choice(["start", "fork", "write", "write", "write", "end"])
        if not live or (verb == "start" and len(live) < 4):
            named += 1
            steps.append(["start", f"s{named}", lab.random.randint(1, 3 * lab.size.page_tokens)])
            live.append(f"s{named}")
        elif verb == "fork" and len(live) < 6:
            named += 1
            steps.append(["fork", lab.random.choice(live), f"s{named}"])
            live.append(f"s{named}")
        elif verb == "end" and len(live) > 1:
            steps.append(["end", live.pop(lab.random.randrange(len(live)))])
        else:
            steps.append(["write", lab.random.choice(live)])
    return [*steps, *[["write", name] for name in live]]


def branches(lab: Judge, prompt_tokens: int, answer_tokens: int) -> list[Step]:
    """A prompt whose branches write their answers, one token each in turn."""
    names = [f"branch {number}" for number in range(lab.size.branches)]
    steps: list[Step] = [["start", names[0], prompt_tokens]]
    steps += [["fork", names[0], name] for name in names[1:]]
    return steps + [["write", name] for _ in range(answer_tokens) for name in names]


def test_a_sole_writer_gets_a_page_at_a_page_boundary_and_copies_nothing(lab: Judge) -> None:
    size, begin = lab.size.page_tokens, lab.random.randint(1, 40)
    steps: list[Step] = [["start", "a", begin], *[["write", "a"]] * (2 * size + 1)]
    for number, after in enumerate(books(lab, steps, size)):
        pages = -(-(begin + number) // size)
        lab.expect(
            (len(after.held["a"]), len(set(after.held["a"])), after.copied),
            (pages, pages, None),
            f"{told(steps, number)} (pages held, distinct pages, page copied)",
            f"{begin + number} tokens lie in {pages} pages of {size}, and a sole user copies nothing",
        )


def test_the_first_writer_of_a_shared_page_gets_a_copy_of_it(lab: Judge) -> None:
    size = lab.size.page_tokens
    tokens = size * lab.random.randint(1, 5) + lab.random.randint(1, size - 1)
    steps: list[Step] = [["start", "a", tokens], ["fork", "a", "b"], ["write", "b"]]
    _, before, after = books(lab, steps, size)
    shared = before.held["a"][-1]
    lab.expect(
        (after.copied, after.held["b"], after.held["a"]),
        (shared, [*before.held["b"][:-1], *after.new], before.held["a"]),
        f"{told(steps, 2)} (page copied, pages of the writer, pages of the other)",
        "the new page takes the place of the shared one in `held`, which is changed in place",
    )
    lab.expect(
        [dict(after.used).get(page, 0) for page in (shared, *after.new)],
        [1, 1],
        f"{told(steps, 2)} (users of the old page and of the new one)",
        "the writer stops using the shared page, and is the only user of its copy",
    )


def test_the_last_user_of_a_page_keeps_it(lab: Judge) -> None:
    size, count = lab.size.page_tokens, lab.size.branches
    steps = branches(lab, size * lab.random.randint(1, 5) + lab.random.randint(1, size - 1), 1)
    seen = books(lab, steps, size)
    shared = seen[count - 1].held["branch 0"][-1]
    lab.expect(
        [after.copied for after in seen[count:]],
        [shared] * (count - 1) + [None],
        f"{count} branches write one token each (page copied by each)",
        "every writer but the last one copies the page; then it has one user left, who keeps it",
    )
    lab.expect(
        (seen[-1].held[f"branch {count - 1}"][-1], dict(seen[-1].used).get(shared)),
        (shared, 1),
        told(steps, len(steps) - 1) + " (last page of the last writer, its users)",
        "the last user of a page keeps it",
    )


def test_a_page_that_is_full_is_never_copied(lab: Judge) -> None:
    size = lab.size.page_tokens
    steps = branches(lab, size * lab.random.randint(1, 5), 1)
    seen = books(lab, steps, size)
    prompt = seen[0].held["branch 0"]
    for number in range(lab.size.branches, len(steps)):
        name = str(steps[number][1])
        lab.expect(
            (seen[number].copied, seen[number].held[name]),
            (None, [*prompt, *seen[number].new]),
            f"{told(steps, number)} (page copied, pages of the writer)",
            "the token begins a page, so nothing is written into the full page that the branches share",
        )


def test_a_writer_changes_only_the_end_of_its_own_pages(lab: Judge) -> None:
    steps = random_history(lab)
    seen = books(lab, steps, lab.size.page_tokens)
    for number in range(1, len(steps)):
        if steps[number][0] != "write":
            continue
        before, after, name = seen[number - 1].held, seen[number].held, str(steps[number][1])
        lab.expect(
            {other: pages for other, pages in after.items() if other != name},
            {other: pages for other, pages in before.items() if other != name},
            f"{told(steps, number)} (pages of the other sequences)",
            "only the writer's pages change",
        )
        kept = len(before[name]) - (seen[number].copied is not None)
        lab.expect(
            after[name],
            [*before[name][:kept], *seen[number].new],
            f"{told(steps, number)} (pages of the writer)",
            "a new page follows the others, or takes the place of the last one",
        )


def test_the_users_of_each_page_are_the_sequences_that_hold_it(lab: Judge) -> None:
    steps = random_history(lab)
    for number, after in enumerate(books(lab, steps, lab.size.page_tokens)):
        holders = Counter(page for pages in after.held.values() for page in pages)
        lab.expect(
            dict(after.used),
            dict(holders),
            f"{told(steps, number)} (page: users)",
            "a page counts the sequences that hold it, no more and no fewer",
        )


def test_every_page_is_free_again_when_all_sequences_have_ended(lab: Judge) -> None:
    steps = random_history(lab)
    live = {str(step[-1] if step[0] == "fork" else step[1]) for step in steps if step[0] in ("start", "fork")}
    live -= {str(step[1]) for step in steps if step[0] == "end"}
    writes = [step for step in steps if step[0] == "write"]
    seen = books(lab, [*steps, *(["end", name] for name in sorted(live))], lab.size.page_tokens)
    times = Counter(seen[-1].free)
    lab.expect(
        ([page for page in range(400) if times[page] != 1], seen[-1].used),
        ([], []),
        f"{len(writes)} writes, and then every sequence ends (pages that are not free once, used pages)",
        "no page is lost, and none is free twice",
    )


def test_only_shared_pages_are_copied_and_each_once_less_than_it_has_users(lab: Judge) -> None:
    size, count = lab.size, lab.size.branches
    steps = branches(lab, size.prompt_tokens, size.answer_tokens)
    seen = books(lab, steps, size.page_tokens)
    copies = sum(after.copied is not None for after in seen)
    lab.cost(copies, count - 1 if size.prompt_tokens % size.page_tokens else 0)
    tokens = size.prompt_tokens + size.answer_tokens
    lab.expect(
        [len(set(pages)) for pages in seen[-1].held.values()],
        [-(-tokens // size.page_tokens)] * count,
        f"{count} branches of {size.prompt_tokens} tokens write {size.answer_tokens} each (their pages)",
        "every branch ends with the pages that its tokens need",
    )
