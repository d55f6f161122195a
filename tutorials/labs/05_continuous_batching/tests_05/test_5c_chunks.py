"""5c: a token budget is shared among prompts by max-min fairness."""

from __future__ import annotations

from math import ceil, log2

import msgspec

from mooncake_lite.labs.counting import CountedNumber
from mooncake_lite.labs.judging import Judge


class Seen(msgspec.Struct):
    """The sizes, whether `wanted` was changed, and how often numbers of tokens were compared."""

    sizes: list[int]
    changed: bool
    compared: int


def share(lab: Judge, *cases: tuple[int, list[int]]) -> list[Seen]:
    """Share budgets. The last case becomes the picture."""
    asked = [{"budget": budget, "wanted": wanted} for budget, wanted in cases]
    called = ", then ".join(said(*case) for case in cases)
    seen = lab.ask("share", asked, list[Seen], called)
    draw(lab, *cases[0], seen[0].sizes)
    for (budget, wanted), each in zip(cases, seen):
        lab.expect(
            len(each.sizes), len(wanted), said(budget, wanted) + " (sizes)", "each prompt has one size"
        )
    return seen


def draw(lab: Judge, budget: int, wanted: list[int], sizes: list[int]) -> None:
    """Note a table of prompts, what they want and what they get."""
    pairs = list(zip(wanted, sizes))[:24]
    rows = [[str(number), f"{want:,}", f"{size:,}"] for number, (want, size) in enumerate(pairs)]
    title = f"a budget of {budget:,} tokens, of which {sum(sizes):,} are used"
    lab.trace({"kind": "table", "title": title, "columns": ["prompt", "wants", "gets"], "rows": rows})


def said(budget: int, wanted: list[int]) -> str:
    """The call as a student would write it."""
    return f"chunk_sizes({budget}, {wanted})"


def drawn(lab: Judge, count: int = 30) -> list[tuple[int, list[int]]]:
    """Random budgets and prompts, some of them equal, some budgets very small."""
    cases = []
    for _ in range(count):
        wanted = [
            lab.random.choice([1, 7, 40, lab.random.randint(1, 300)]) for _ in range(lab.random.randint(1, 9))
        ]
        cases.append((lab.random.choice([1, 5, lab.size.budget, lab.random.randint(1, 900)]), wanted))
    return cases


def test_the_whole_budget_is_used_and_no_prompt_gets_more_than_it_needs(lab: Judge) -> None:
    for budget, wanted in drawn(lab):
        (seen,) = share(lab, (budget, wanted))
        over = [number for number, size in enumerate(seen.sizes) if not 0 <= size <= wanted[number]]
        lab.expect(
            (sum(seen.sizes), over),
            (min(budget, sum(wanted)), []),
            f"{said(budget, wanted)} = {seen.sizes} (sum, prompts with more than they need)",
            "a token of the budget that no prompt gets is wasted while a prompt needs it",
        )


def test_prompts_that_all_need_more_get_equally_much(lab: Judge) -> None:
    count, each = lab.random.randint(2, 7), lab.random.randint(5, 60)
    wanted = [each + lab.random.randint(1, 500) for _ in range(count)]
    (seen,) = share(lab, (count * each, wanted))
    lab.expect(
        seen.sizes, [each] * count, said(count * each, wanted), f"each of {count} gets a part of equal size"
    )


def test_what_a_short_prompt_leaves_goes_to_the_longer_ones(lab: Judge) -> None:
    part, short = lab.random.randint(20, 60), lab.random.randint(1, 9)
    wanted, expected = [900, short, 700, 800], [part, short, part, part]
    for _ in range(4):
        order = lab.random.sample(range(4), 4)
        budget, mixed = 3 * part + short, [wanted[place] for place in order]
        (seen,) = share(lab, (budget, mixed))
        lab.expect(
            seen.sizes,
            [expected[place] for place in order],
            said(budget, mixed),
            f"the short prompt gets its {short}, the others share the rest; sizes have the order of `wanted`",
        )


def test_prompts_with_less_than_they_need_differ_by_at_most_one_token(lab: Judge) -> None:
    for budget, wanted in drawn(lab):
        (seen,) = share(lab, (budget, wanted))
        least = min((size for size, want in zip(seen.sizes, wanted) if size < want), default=max(seen.sizes))
        lab.at_most(
            max(seen.sizes) - least,
            1,
            f"{said(budget, wanted)} = {seen.sizes} (largest share, less the smallest unsatisfied one)",
            "max-min fairness: no prompt gets more while another one that has less still needs tokens",
        )


def test_each_prompt_gets_at_least_its_part_of_the_budget(lab: Judge) -> None:
    for budget, wanted in drawn(lab):
        (seen,) = share(lab, (budget, wanted))
        part = budget // len(wanted)
        short = [n for n, size in enumerate(seen.sizes) if size < min(part, wanted[n])]
        lab.expect(
            short,
            [],
            f"{said(budget, wanted)} = {seen.sizes} (prompts with less than {part} that need more)",
            "each of n prompts gets budget // n tokens, or all that it needs",
        )


def test_a_short_prompt_never_waits_for_all_of_a_long_one(lab: Judge) -> None:
    budget, others = lab.size.budget, lab.random.randint(1, 3)
    short = lab.random.randint(budget // 2, budget)
    wanted = [20 * budget] * others + [short]
    most = ceil(short / (budget // (others + 1)))
    called = f"chunk_sizes({budget}, ...) pass after pass, for prompts of {wanted} tokens"
    seen = lab.ask("rounds", {"budget": budget, "wanted": wanted, "most": most}, list[list[int]], called)
    left = short - sum(sizes[-1] for sizes in seen)
    rows = [[str(number + 1), *map(str, sizes)] for number, sizes in enumerate(seen)]
    columns = ["pass", *(f"prompt of {tokens}" for tokens in wanted)]
    lab.trace(
        {"kind": "table", "title": "tokens of each prompt in each pass", "columns": columns, "rows": rows}
    )
    lab.expect(
        left,
        0,
        f"{called} (tokens that the last prompt lacks after {most} passes)",
        f"with budget // {others + 1} tokens a pass it needs {most} passes, however long the others are",
    )


def test_few_or_no_prompts_are_shared_among_too(lab: Judge) -> None:
    budget = lab.random.randint(2, 5)
    seen = share(lab, (budget, [9] * 12), (budget, []), (budget, [budget]), (budget, [500]))
    lab.expect(
        [(sorted(each.sizes), each.changed) for each in seen],
        [([0] * (12 - budget) + [1] * budget, False), ([], False), ([budget], False), ([budget], False)],
        f"chunk_sizes({budget}, ...) of 12 prompts, none, a short and a long one (sizes, wanted changed)",
        "a small budget reaches some prompts; `wanted` stays as it is",
    )


def comparisons(wanted: list[int]) -> int:
    """How often tokens are compared if prompts are sorted, and each one's need is compared with its share."""
    CountedNumber.count = 0
    sorted(map(CountedNumber, wanted))
    return CountedNumber.count + len(wanted)


def test_a_share_is_cheap(lab: Judge) -> None:
    count, budget = lab.size.prompts, lab.size.large_budget
    wanted = [lab.random.randint(1, 2 * budget // count) for _ in range(count)]
    (seen,) = share(lab, (budget, wanted))
    lab.cost(seen.compared, 4 * count * ceil(log2(count) + 1), needed=comparisons(wanted))
    lab.expect(
        sum(seen.sizes),
        min(budget, sum(wanted)),
        f"chunk_sizes({budget}, ...) of {count} prompts (sum)",
        "the whole budget is used",
    )
