"""5b: a pass has a token of every running sequence, and prompts share what is left of the token budget."""

from __future__ import annotations

from math import ceil

import msgspec

from mooncake_lite.labs.judging import Judge

from .ranks import Rank, kept, pages_of


class Grown(msgspec.Struct):
    """Pages that a running sequence gets."""

    job: str
    pages: list[int]
    copies: int | None


class Part(msgspec.Struct):
    """A chunk. draws: next tokens that are drawn after it; prompt: it is a part of one."""

    job: str
    start: int
    tokens: int
    pages: list[int]
    draws: int
    prompt: bool


class Seen(msgspec.Struct):
    """One pass, and whether the books were changed."""

    grow: list[Grown]
    chunks: list[Part]
    changed: bool

    @property
    def sizes(self) -> list[tuple[str, int]]:
        """(job, tokens) of each chunk, in order."""
        return [(chunk.job, chunk.tokens) for chunk in self.chunks]


PLAIN = "here chunk_sizes is a plain function: the first prompt gets all that it needs, then the next one"


def batch(lab: Judge, rank: Rank, called: str, ahead: str | None = None) -> Seen:
    """Compose one pass. ahead: the prompt whose prefix has come in."""
    seen = lab.ask("batch", rank.inputs(ahead=ahead), Seen, called)
    sizes, grown = dict(seen.sizes), {each.job: each.pages for each in seen.grow}
    rows = []
    for stage in ("running", "swapping", "prefilling"):
        for job in rank.stages[stage]:
            tokens = f"{job['tokens'] - job['computed']:,}"
            pages = " ".join(map(str, grown.get(job["name"], ()))) or "none"
            rows.append([job["name"], stage, tokens, str(sizes.get(job["name"], "none")), pages])
    title = f"a pass with a budget of {rank.limits['tokens']} tokens, {len(rank.free)} pages are free"
    columns = ["job", "stage", "tokens to compute", "in the pass", "numbers of its new pages"]
    lab.trace({"kind": "table", "title": title, "columns": columns, "rows": rows})
    return seen


def answers(rank: Rank, count: int) -> list[tuple[str, int]]:
    """Add running sequences with space in their last pages. Returns what a pass holds of them."""
    for number in range(count):
        rank.add("running", f"answer{number}", rank.roomy(rank.lab.random.randint(1, 3)))
    return [(job["name"], 1) for job in rank.stages["running"]]


def test_it_chooses_and_changes_nothing(lab: Judge) -> None:
    rank = Rank(lab, 60)
    answers(rank, lab.size.answers)
    rank.add("running", "full", rank.full(3))
    rank.add("prefilling", "prompt", 30)
    called = "next_batch() of running sequences, one of which needs a page, and a prompt"
    kept(lab, batch(lab, rank, called).changed, called)


def test_every_running_sequence_has_one_token_in_the_pass(lab: Judge) -> None:
    rank = Rank(lab, 90)
    expected = answers(rank, lab.size.answers)
    called = f"next_batch() of {lab.size.answers} running sequences and no prompt"
    seen = batch(lab, rank, called)
    lab.expect(seen.sizes, expected, f"{called} (job, tokens)", "one token each, the oldest sequence first")
    lab.expect(
        [(chunk.start, chunk.draws, chunk.prompt) for chunk in seen.chunks],
        [(job["tokens"] - 1, 1, False) for job in rank.stages["running"]],
        f"{called} (first token of each chunk, tokens drawn after it, whether it is of a prompt)",
        "the last token of an answer is computed, and gives the next one",
    )


def test_prompts_get_what_the_running_batch_leaves(lab: Judge) -> None:
    rank = Rank(lab, 400)
    expected = answers(rank, lab.size.answers)
    left = rank.limits["tokens"] - lab.size.answers
    first = lab.random.randint(2, left - 2)
    rank.add("prefilling", "short", first + 5, computed=5)
    rank.add("prefilling", "long", lab.size.prompt_tokens)
    rank.add("prefilling", "last", lab.size.prompt_tokens)
    called = (
        f"next_batch(): budget {rank.limits['tokens']}, {lab.size.answers} running; short needs {first} more"
    )
    seen = batch(lab, rank, called)
    lab.expect(
        seen.sizes,
        [*expected, ("short", first), ("long", left - first)],
        f"{called} (job, tokens)",
        f"{left} tokens are left for prompts, and one whose share is 0 has no chunk; {PLAIN}",
    )
    lab.expect(
        [(chunk.job, chunk.start, chunk.draws, chunk.prompt) for chunk in seen.chunks[len(expected) :]],
        [("short", 5, 1, True), ("long", 0, 0, True)],
        f"{called} (prompt, first token of its chunk, tokens drawn, whether it is of a prompt)",
        "a chunk begins where the computed tokens end; only the last one gives a token",
    )


def test_a_prompt_makes_progress_beside_a_batch_as_large_as_the_budget(lab: Judge) -> None:
    for budget in (lab.size.answers, lab.size.answers - 2):
        rank = Rank(lab, 400, tokens=budget)
        expected = answers(rank, lab.size.answers)
        rank.add("prefilling", "prompt", 30)
        called = f"next_batch(): budget {budget}, {lab.size.answers} running sequences, and a prompt"
        lab.expect(
            batch(lab, rank, called).sizes,
            [*expected, ("prompt", 1)],
            f"{called} (job, tokens)",
            "at least 1 token is left for prompts, so that none is starved",
        )


def test_a_sequence_whose_last_page_is_full_gets_a_new_one(lab: Judge) -> None:
    rank = Rank(lab, 60)
    full = rank.add("running", "full", rank.full(3))
    roomy = rank.add("running", "roomy", rank.roomy(3))
    also = rank.add("running", "also", rank.full(1))
    called = "next_batch(): the pages of full and also have no place for their next tokens"
    seen = batch(lab, rank, called)
    new = {each.job: each.pages for each in seen.grow}
    lab.expect(
        [(each.job, len(each.pages), each.copies) for each in seen.grow],
        [("full", 1, None), ("also", 1, None)],
        f"{called} (growths: job, new pages, page copied)",
        "a sequence gets pages when it needs them, and no others do",
    )
    lab.expect(
        sorted({*new["full"], *new["also"]} - {*rank.free}),
        [],
        f"{called} (new pages that were not free)",
        "the draft chooses free pages",
    )
    lab.expect(
        [chunk.pages for chunk in seen.chunks],
        [[*full["pages"], *new["full"]], roomy["pages"], [*also["pages"], *new["also"]]],
        f"{called} (pages of each chunk)",
        "a chunk names the pages of its sequence as they are after the growth",
    )


def test_the_last_user_of_a_shared_page_needs_no_copy(lab: Judge) -> None:
    rank = Rank(lab, 60)
    count = lab.random.randint(3, 5)
    twins = [rank.add("running", "twin0", rank.roomy(2))]
    for number in range(1, count):
        twins.append(rank.add("running", f"twin{number}", twins[0]["tokens"], pages=twins[0]["pages"]))
    last = twins[0]["pages"][-1]
    called = f"next_batch(): {count} sequences share their pages, and each writes into the last one"
    seen = batch(lab, rank, called)
    lab.expect(
        [(each.job, len(each.pages), each.copies) for each in seen.grow],
        [(twin["name"], 1, last) for twin in twins[:-1]],
        f"{called} (growths: job, new pages, page copied)",
        "each writer leaves the page; `left` tells the next one, and the last user keeps it",
    )
    ends = [chunk.pages[-1] for chunk in seen.chunks]
    lab.expect(
        (len(set(ends)), ends[-1]),
        (count, last),
        f"{called} (different last pages of the chunks, that of the last one)",
        "no two sequences write into one page",
    )


def test_while_others_are_swapped_out_a_sequence_without_a_page_waits(lab: Judge) -> None:
    for chunked in (True, False):
        rank = Rank(lab, 11, chunked=chunked)
        rank.add("swapping", "leaves", rank.roomy(2))
        rank.add("running", "first", rank.full(3))
        rank.add("running", "second", rank.full(3))
        rank.add("running", "third", rank.roomy(2))
        called = (
            "next_batch(): 1 free page; first and second need one, third does not, and another job leaves"
        )
        called += f"; chunked={chunked}"
        seen = batch(lab, rank, called)
        lab.expect(
            (seen.sizes, [each.job for each in seen.grow]),
            ([("first", 1), ("third", 1)], ["first"]),
            f"{called} (job and tokens; growths)",
            "second is left out of this pass, and those after it go on",
        )


def test_a_sequence_that_is_left_out_still_uses_its_pages(lab: Judge) -> None:
    rank = Rank(lab, 2 + 2)
    rank.add("swapping", "leaves", rank.roomy(2))
    first = rank.add("running", "twin0", rank.roomy(2))
    rank.add("running", "twin1", first["tokens"], pages=first["pages"])
    called = (
        "next_batch(): twin0 and twin1 write into a page that they share, no page is free, another job leaves"
    )
    seen = batch(lab, rank, called)
    lab.expect(
        (seen.sizes, [each.job for each in seen.grow]),
        ([], []),
        f"{called} (job and tokens; growths)",
        "twin0 is left out of this pass, so it has not left the page, and twin1 may not write into it",
    )


def test_a_sequence_that_is_left_out_uses_none_of_the_budget(lab: Judge) -> None:
    budget = lab.size.budget
    rank = Rank(lab, 10 + pages_of(budget, lab.size.page_tokens))
    rank.add("swapping", "leaves", rank.roomy(2))
    rank.add("running", "first", rank.full(3))
    rank.add("running", "second", rank.full(3))
    rank.add("running", "third", rank.roomy(1))
    rank.add("prefilling", "prompt", budget)
    called = (
        f"next_batch(): budget {budget}, 1 free page; first and second need one, third does not; a prompt"
    )
    lab.expect(
        batch(lab, rank, called).sizes,
        [("first", 1), ("third", 1), ("prompt", budget - 2)],
        f"{called} (job, tokens)",
        "two running sequences have a chunk, and the prompt gets the rest of the budget",
    )


def test_the_budget_of_prompts_shrinks_with_their_context(lab: Judge) -> None:
    context = lab.random.randint(40, 200)
    rank = Rank(lab, 400, even=context)
    expected = answers(rank, lab.size.answers)
    rank.add("prefilling", "prompt", context + lab.size.prompt_tokens, computed=context)
    left = rank.limits["tokens"] - lab.size.answers
    called = (
        f"next_batch(): even={context}, {left} tokens are left for a prompt of which {context} are computed"
    )
    lab.expect(
        batch(lab, rank, called).sizes,
        [*expected, ("prompt", left // 2)],
        f"{called} (job, tokens)",
        "`_level` halves what the running batch leaves: after `even` tokens, each token takes twice as long",
    )


def test_without_chunks_a_prompt_is_computed_whole(lab: Judge) -> None:
    rank = Rank(lab, 400, chunked=False)
    expected = answers(rank, lab.size.answers)
    rank.add("prefilling", "prompt", lab.size.prompt_tokens)
    called = (
        f"next_batch(): chunked=False, budget {rank.limits['tokens']}, a prompt of {lab.size.prompt_tokens}"
    )
    lab.expect(
        batch(lab, rank, called).sizes,
        [*expected, ("prompt", lab.size.prompt_tokens)],
        f"{called} (job, tokens)",
        "whole_prompts decides where chunked is false, and takes at least one prompt whole",
    )


def test_prompts_that_may_not_be_computed_have_no_chunk(lab: Judge) -> None:
    rank = Rank(lab, 400)
    expected = answers(rank, 2)
    rank.add("prefilling", "failed", 40, problem="a transfer failed")
    rank.add("prefilling", "good", 10)
    called = "next_batch(): the first prompt has failed"
    lab.expect(
        batch(lab, rank, called).sizes, [*expected, ("good", 10)], called, "_prompts lists those that may"
    )
    rank.limits["overlaps"] = False
    rank.add("storing", "stores", 10)
    called += ", and prompts must wait while blocks are stored"
    lab.expect(batch(lab, rank, called).sizes, expected, called, "then _prompts lists none")


def test_a_prompt_that_comes_in_by_layers_is_computed_when_it_is_ahead(lab: Judge) -> None:
    for ahead in (None, "second"):
        rank = Rank(lab, 400)
        expected = answers(rank, 2)
        for name in ("first", "second"):
            rank.add("prefilling", name, 10, by_layers=True)
        rank.add("prefilling", "third", 5)
        called = f"next_batch(ahead={ahead}): the prefixes of first and second come in by layers"
        lab.expect(
            batch(lab, rank, called, ahead=ahead).sizes,
            [*expected, *([("second", 10)] if ahead else []), ("third", 5)],
            f"{called} (job, tokens)",
            "of the prompts that come in by layers, `_prompts` lists only the one that is `ahead`",
        )


def test_a_prompt_ends_in_time_and_every_answer_gets_a_token_from_each_pass(lab: Judge) -> None:
    size = lab.size
    rank = Rank(lab, 900)
    running = answers(rank, size.answers)
    rank.add("prefilling", "prompt", size.prompt_tokens)
    needed = ceil(size.prompt_tokens / (size.budget - size.answers))
    inputs = rank.inputs(most=2 * needed)
    called = (
        f"next_batch() until the prompt of {size.prompt_tokens} is computed, beside {size.answers} answers"
    )
    seen = lab.ask("passes", inputs, list[dict[str, int]], called)
    rows = [
        [str(number + 1), str(sum(each.values())), str(each.get("prompt", 0))]
        for number, each in enumerate(seen)
    ]
    title = f"passes with a budget of {size.budget} tokens"
    lab.trace({"kind": "table", "title": title, "columns": ["pass", "tokens", "of the prompt"], "rows": rows})
    lab.cost(len(seen), needed)
    lab.expect(len(seen), needed, f"{called} (passes)", "each pass but the last one uses the whole budget")
    for number, each in enumerate(seen):
        lab.at_most(
            sum(each.values()), size.budget, f"{called} (tokens of pass {number + 1})", "the token budget"
        )
        lab.expect(
            {name: tokens for name, tokens in each.items() if name != "prompt"},
            dict(running),
            f"{called} (tokens of the answers in pass {number + 1})",
            "no answer waits for a prompt: the gap between its tokens is one pass",
        )
