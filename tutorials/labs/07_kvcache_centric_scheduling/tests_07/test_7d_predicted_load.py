"""7d: how many sequences will decode at a time, from when they begin and how long answers are."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import msgspec

from mooncake_lite.labs.judging import Judge

SEARCHES = 4
"""Binary searches that a good solution needs: two in each list."""


class Seen(msgspec.Struct):
    """What sequences() returned, and how many times of the lists it has read."""

    sequences: int
    reads: int


@dataclass
class Case:
    """The books and a question. Times are multiples of 1/8 s, so that sums are exact in any order.

    expected, begun   ascending times: predicted beginnings, and beginnings of those that decode now
    tokens, excess    mean length of answers, and mean excess of long ones; None: not measured
    """

    expected: list[float]
    begun: list[float]
    at: float
    now: float = 100.0
    tokens: float | None = 80.0
    excess: float | None = 40.0
    tbt_s: float = 0.125

    def __post_init__(self) -> None:
        self.expected.sort()
        self.begun.sort()

    def told(self) -> str:
        t_d = "unknown" if self.tokens is None else f"{self.tokens:g} tokens x {self.tbt_s:g} s"
        more = "unknown" if self.excess is None else f"{self.excess:g} tokens x {self.tbt_s:g} s"
        return (
            f"sequences(at={self.at:g}, now={self.now:g}, tbt_s={self.tbt_s:g}); t_d {t_d}, excess {more}; "
            f"expected {times(self.expected)}; begun {times(self.begun)}"
        )

    def ends(self) -> list[tuple[str, float, float]]:
        """Return (list, beginning, end) of each sequence, one after the other."""
        if self.tokens is None:
            never = float("inf")
            return [("expected", t, never) for t in self.expected] + [("begun", t, never) for t in self.begun]
        t_d, more_s = self.tokens * self.tbt_s, (self.excess or 0.0) * self.tbt_s
        of = []
        for planned in self.expected:
            begins = max(planned, self.now)
            of.append(("expected", begins, begins + t_d))
        for began in self.begun:
            is_late = began + t_d <= self.now
            of.append(("begun", began, self.now + more_s if is_late else began + t_d))
        return of

    def model(self) -> int:
        return sum(begins <= self.at < ends for _, begins, ends in self.ends())


def times(values: list[float]) -> str:
    """Times as a message names them."""
    return (
        " ".join(f"{value:g}" for value in values[:12]) + f" ... ({len(values)})" * (len(values) > 12)
        or "none"
    )


def load(lab: Judge, cases: list[Case], breaks: str) -> list[Seen]:
    """Ask for the predictions of some cases, and expect those of the model."""
    inputs = [asdict(case) for case in cases]
    seen = lab.ask("load", inputs, list[Seen], cases[0].told())
    for case, after in zip(cases, seen):
        rows = [[of, f"{begins:g}", f"{ends:g}"] for of, begins, ends in case.ends()[:24]]
        title = f"at {case.at:g} s (now is {case.now:g} s), {after.sequences} sequences came back"
        columns = ["list", "begins", "ends, as the rules say"]
        lab.trace({"kind": "table", "title": title, "columns": columns, "rows": rows})
        lab.expect(after.sequences, case.model(), case.told(), breaks)
    return seen


def later(lab: Judge, most: int = 60) -> float:
    """A time after the present."""
    return 100.0 + lab.random.randint(1, most) / 8


def test_before_the_first_answer_no_sequence_ends(lab: Judge) -> None:
    expected = [later(lab) for _ in range(6)]
    cases = [
        Case(expected, [20.0, 90.0, 99.0], at, tokens=None, excess=None)
        for at in (100.0, max(expected), 500.0)
    ]
    load(lab, cases, "without a mean length of answers t_d is unknown: all that begin by then decode then")


def test_a_sequence_counts_from_its_beginning_on(lab: Judge) -> None:
    begins = later(lab)
    cases = [Case([begins], [], begins + by) for by in (-0.125, 0.0, 0.125) if begins + by >= 100]
    load(lab, cases, "a sequence that begins by the asked time decodes then, also if it begins just then")


def test_a_sequence_that_decodes_now_ends_t_d_after_it_began(lab: Judge) -> None:
    began = 100.0 - lab.random.randint(1, 70) / 8  # t_d is 10 s
    cases = [Case([], [began], began + 10 + by) for by in (-0.125, 0.0, 0.125)]
    load(lab, cases, "a sequence ends t_d after it began; at that time it decodes no more")


def test_a_sequence_that_is_expected_may_end_by_then_too(lab: Judge) -> None:
    begins = later(lab)
    cases = [Case([begins], [], begins + 10 + by) for by in (-0.125, 0.0, 0.125)]
    load(lab, cases, "a sequence that begins later ends t_d after that; at that time it decodes no more")


def test_a_sequence_that_should_have_begun_begins_now(lab: Judge) -> None:
    planned = [100.0 - lab.random.randint(1, 200) / 8 for _ in range(3)]
    cases = [Case(planned, [], at) for at in (100.0, 109.875, 110.0)]
    load(
        lab,
        cases,
        "a sequence that should have begun by now begins now, so it ends t_d after now; at the time when it "
        "ends, it decodes no more",
    )


def test_a_sequence_that_should_have_ended_goes_on_for_the_mean_excess(lab: Judge) -> None:
    began = [90.0 - lab.random.randint(0, 200) / 8, 90.0]  # both should have ended by now, 100 s
    cases = [Case([], began, at) for at in (100.0, 104.875, 105.0, 105.125)]
    load(
        lab,
        cases,
        "one that should have ended by now ends after excess x tbt_s, counted from now; at the time "
        "when it ends, it decodes no more",
    )
    cases = [Case([], began, at, excess=None) for at in (100.0, 101.0)]
    load(lab, cases, "before an excess is measured, one that should have ended by now ends now")


def test_t_d_grows_with_the_time_between_tokens(lab: Judge) -> None:
    expected, begun = [later(lab) for _ in range(8)], [later(lab) - 10 for _ in range(8)]
    cases = [
        Case(expected, [one for one in begun if one <= 100], 106.0, tbt_s=s) for s in (0.03125, 0.0625, 0.25)
    ]
    load(lab, cases, "t_d and the excess are numbers of tokens times tbt_s")


def random_case(lab: Judge, expected: int, begun: int) -> Case:
    tokens = lab.random.choice([16.0, 40.0, 80.0, 120.0])
    return Case(
        expected=[100 + lab.random.randint(-40, 200) / 8 for _ in range(expected)],
        begun=[100 - lab.random.randint(0, 300) / 8 for _ in range(begun)],
        at=100 + lab.random.randint(0, 240) / 8 + 1 / 16,  # nothing begins or ends just then
        tokens=tokens,
        excess=lab.random.choice([None, 8.0, 24.0, 160.0]),
        tbt_s=lab.random.choice([0.0625, 0.125]),
    )


def test_random_books_give_the_load_that_one_sequence_after_the_other_gives(lab: Judge) -> None:
    cases = [random_case(lab, lab.random.randint(0, 12), lab.random.randint(0, 12)) for _ in range(150)]
    cases += [random_case(lab, lab.random.randint(100, 300), lab.random.randint(100, 300)) for _ in range(5)]
    load(lab, cases, "the load is the number of sequences that begin by then and do not end by then")


def test_ascending_times_are_searched_and_not_counted_one_by_one(lab: Judge) -> None:
    case = random_case(lab, lab.size.expected, lab.size.begun)
    # A short answer with a long excess: sequences of both lists end by then, and late ones go on.
    case.at, case.tokens, case.excess, case.tbt_s = 105.0, 32.0, 80.0, 0.125
    (seen,) = lab.ask("load", [asdict(case)], list[Seen], case.told())
    needed = SEARCHES // 2 * (lab.size.expected.bit_length() + lab.size.begun.bit_length())
    lab.cost(seen.reads, 4 * needed, needed=needed)
    most = lab.size.expected + lab.size.begun
    lab.at_most(seen.sequences, most, case.told(), f"there are {most} sequences in both lists")
