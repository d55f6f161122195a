"""8a: which silence is a death. The tests move the clock: the monitor checks four times per second."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import msgspec

from mooncake_lite.labs.judging import Judge

PER_S = 4
"""Checks of the monitor in a second."""
STUCK = 3
"""A process that is watched and runs gets so many times dead_s."""
EARLY = 0.5
"""Checks from a beat to the next check. Limits are whole checks, so no silence is exactly as long as one."""


class Peer(msgspec.Struct):
    """A rank as drive.py plays it; times are numbers of checks. here: its process is watched."""

    name: str
    here: bool
    beats: list[int]
    suspended: list[tuple[int, int]] = []
    ends: int | None = None


class Seen(msgspec.Struct):
    """What the monitor did: (check, name) of kills, (check, name, whether its end was seen) of losses."""

    killed: list[tuple[int, str]]
    reported: list[tuple[int, str, bool]]
    asked: int


def watch(
    lab: Judge,
    peers: list[Peer],
    ticks: int,
    late: list[tuple[int, int]] | None = None,
    early: float = EARLY,
    begin: float = 400,
) -> Seen:
    inputs = {
        "peers": msgspec.to_builtins(peers),
        "ticks": ticks,
        "tick_s": 1 / PER_S,
        "dead_s": lab.size.dead_s,
        "first_s": lab.size.first_s,
        "late": late or [],
        "early_s": early / PER_S,
        "begin_s": begin / PER_S,
    }
    seen = lab.ask(
        "watch", inputs, Seen, called=f"_silence() of {len(peers)} peers at each of {ticks} checks"
    )
    lab.trace(drawn(peers, seen, early))
    return seen


def drawn(peers: list[Peer], seen: Seen, early: float) -> dict[str, Any]:
    """A table for `labs show`: each rank, its last beat, and what the monitor did, in seconds."""
    rows = []
    for peer in peers:
        what = ", ".join(f"{begin / PER_S:g} to {end / PER_S:g} s" for begin, end in peer.suspended)
        did = [f"killed at {tick / PER_S:g} s" for tick, name in seen.killed if name == peer.name]
        did += [
            f"lost at {tick / PER_S:g} s, end {'seen' if ended else 'not seen'}"
            for tick, name, ended in seen.reported
            if name == peer.name
        ]
        rows.append(
            [
                peer.name,
                "watched" if peer.here else "other host",
                heard(peer, early),
                what or "-",
                "; ".join(did) or "-",
            ]
        )
    columns = ["rank", "process", "beats", "suspended", "the monitor"]
    return {"kind": "table", "title": "ranks, and what the monitor did", "columns": columns, "rows": rows}


def expected_of(lab: Judge, peer: Peer, ticks: int, early: float) -> tuple[list[int], list[tuple[int, bool]]]:
    """The model: the checks at which a rank is killed, and those at which its loss is reported."""
    killed: list[int] = []
    ends = peer.ends
    for tick in range(1, ticks + 1):
        heard = [beat for beat in peer.beats if beat <= tick]
        is_suspended = any(begin <= tick < end for begin, end in peer.suspended)
        if not heard:
            silent, limit_s = tick + early, lab.size.first_s
        else:
            runs = peer.here and not is_suspended
            silent, limit_s = tick - max(heard) + early, lab.size.dead_s * (STUCK if runs else 1)
        if silent > PER_S * limit_s and not killed:
            if not peer.here:
                return killed, [(tick, False)]
            killed.append(tick)
            ends = tick + 1
        if ends is not None and ends <= tick:
            return killed, [(tick, True)]
    return killed, []


def expect_as_modelled(
    lab: Judge, peers: list[Peer], ticks: int, seen: Seen, rule: str, early: float = EARLY
) -> None:
    for peer in peers:
        killed, reported = expected_of(lab, peer, ticks, early)
        lab.expect(
            (
                [tick / PER_S for tick, name in seen.killed if name == peer.name],
                [(tick / PER_S, ended) for tick, name, ended in seen.reported if name == peer.name],
            ),
            ([tick / PER_S for tick in killed], [(tick / PER_S, ended) for tick, ended in reported]),
            f"{peer.name}, {told(peer, early)} (seconds of kills, (second of its loss, end seen))",
            f"{rule}; dead_s is {lab.size.dead_s} s, first_s is {lab.size.first_s} s",
        )


def told(peer: Peer, early: float) -> str:
    return f"{'watched' if peer.here else 'on another host'}, beats: {heard(peer, early)}"


def heard(peer: Peer, early: float) -> str:
    """When its first and last beat came, and the longest time between two."""
    if not peer.beats:
        return "none"
    begin, end = ((beat - early) / PER_S for beat in (peer.beats[0], peer.beats[-1]))
    gap = max((after - before for before, after in pairwise(peer.beats)), default=0)
    return f"{begin:g} to {end:g} s, longest gap {gap / PER_S:g} s"


def beats(lab: Judge, until: int, most: int = 4) -> list[int]:
    """Checks at which a rank is heard: the first one, then after at most `most`, and the last one `until`."""
    found = [1]
    while found[-1] < until:
        found.append(min(until, found[-1] + lab.random.randint(1, most)))
    return found


def test_a_rank_that_beats_in_time_is_never_lost(lab: Judge) -> None:
    dead, ticks = PER_S * lab.size.dead_s, 200
    peers = [
        Peer("far", False, beats(lab, ticks, 4)),
        Peer("far and slow", False, list(range(1, ticks, dead))),
        Peer("here", True, beats(lab, ticks, dead)),
    ]
    seen = watch(lab, peers, ticks)
    expect_as_modelled(lab, peers, ticks, seen, "a silence of less than dead_s is no loss")


def test_a_silence_of_exactly_the_limit_is_no_loss(lab: Judge) -> None:
    last, dead, first = lab.random.randint(5, 20), PER_S * lab.size.dead_s, PER_S * lab.size.first_s
    ticks = max(last + STUCK * dead, first) + 1

    def silent_for(checks: int) -> list[int]:
        return [*range(1, last + 1), *range(last + checks + 1, ticks + 1)]

    peers = [
        Peer("far", False, silent_for(dead)),
        Peer("suspended", True, silent_for(dead), [(last + 1, 10**6)]),
        Peer("stuck", True, silent_for(STUCK * dead)),
        Peer("late to begin", False, list(range(first + 1, ticks + 1))),
    ]
    seen = watch(lab, peers, ticks, early=0)
    rule = "a silence of exactly dead_s, 3 * dead_s or first_s is no loss: only a longer one is"
    expect_as_modelled(lab, peers, ticks, seen, rule, early=0)


def test_a_beat_at_the_zero_of_the_clock_is_a_beat(lab: Judge) -> None:
    last, dead = lab.random.randint(5, 20), PER_S * lab.size.dead_s
    ticks = last + 2 * dead
    peers = [Peer("far", False, [last]), Peer("suspended", True, [last], [(last + 1, 10**6)])]
    seen = watch(lab, peers, ticks, begin=EARLY - last)
    rule = "a rank whose heard_s is 0.0 was heard at the time 0.0: only None means that it never beat"
    expect_as_modelled(lab, peers, ticks, seen, rule)


def test_a_silent_rank_of_another_host_is_lost_after_dead_s(lab: Judge) -> None:
    last = lab.random.randint(5, 40)
    ticks = last + 2 * PER_S * lab.size.dead_s
    peers = [Peer("far", False, beats(lab, last)), Peer("well", False, beats(lab, ticks))]
    seen = watch(lab, peers, ticks)
    expect_as_modelled(
        lab,
        peers,
        ticks,
        seen,
        "silence of another host is all there is, so dead_s decides; its end is not seen",
    )


def test_a_suspended_process_is_killed_after_dead_s(lab: Judge) -> None:
    last = lab.random.randint(5, 40)
    ticks = last + 4 * PER_S * lab.size.dead_s
    peers = [Peer("suspended", True, beats(lab, last), [(last + 1, 10**6)])]
    seen = watch(lab, peers, ticks)
    expect_as_modelled(
        lab, peers, ticks, seen, "a suspended process does not come back by itself: it gets dead_s"
    )


def test_a_process_that_runs_gets_three_times_as_long(lab: Judge) -> None:
    last, dead = lab.random.randint(5, 40), PER_S * lab.size.dead_s
    ticks = last + 4 * dead
    back = last + 3 * dead
    peers = [
        Peer("stuck", True, beats(lab, last)),
        Peer("slow", True, [*beats(lab, last), *range(back, ticks + 1)]),
    ]
    seen = watch(lab, peers, ticks)
    expect_as_modelled(
        lab,
        peers,
        ticks,
        seen,
        "the kernel would report a death at once, so a process that runs gets 3 * dead_s",
    )


def test_before_its_first_beat_a_rank_has_first_s(lab: Judge) -> None:
    first = PER_S * lab.size.first_s
    ticks = first + 20
    peers = [
        Peer("far, never", False, []),
        Peer("here, never", True, []),
        Peer("suspended, never", True, [], [(1, 10**6)]),
        Peer("just in time", False, list(range(first, ticks + 1))),
    ]
    seen = watch(lab, peers, ticks)
    expect_as_modelled(
        lab, peers, ticks, seen, "before the first beat only first_s counts: a rank may start slowly"
    )


def test_a_process_that_is_suspended_for_a_while_lives(lab: Judge) -> None:
    last, dead = lab.random.randint(5, 20), PER_S * lab.size.dead_s
    ticks = last + 5 * dead
    for_a_while = Peer(
        "resumed", True, [*beats(lab, last), *range(last + dead, ticks)], [(last + 1, last + dead)]
    )
    later = Peer("suspended later", True, beats(lab, last), [(last + 2 * dead, 10**6)])
    seen = watch(lab, [for_a_while, later], ticks)
    expect_as_modelled(
        lab,
        [for_a_while, later],
        ticks,
        seen,
        "what counts is whether the process is suspended at this check",
    )


def test_time_in_which_the_monitor_did_not_run_is_no_silence(lab: Judge) -> None:
    last, dead = lab.random.randint(5, 20), PER_S * lab.size.dead_s
    ticks = last + 4 * dead
    peers = [
        Peer("far", False, beats(lab, last)),
        Peer("well", False, beats(lab, ticks, dead)),
        Peer("never", False, []),
    ]
    late = [(last - 2, 3 * dead), (last + 2, PER_S * lab.size.first_s + 1)]
    seen = watch(lab, peers, ticks, late)
    expect_as_modelled(
        lab, peers, ticks, seen,
        "silence lasts from heard_s, or expected_s, to now: the monitor moves both when it was late",
    )  # fmt: skip


def random_peers(lab: Judge, ticks: int) -> list[Peer]:
    """One rank of each kind, at random times, and some more."""
    dead, peers = PER_S * lab.size.dead_s, []
    for number in range(lab.size.ranks):
        last = lab.random.randint(5, ticks // 2)
        here, name = lab.random.random() < 0.6, f"rank {number + 1}"
        kind = lab.random.choice(["well", "silent", "suspended", "ends", "slow", "never"])
        if kind == "never":
            peers.append(Peer(name, here, []))
        elif kind == "well":
            peers.append(Peer(name, here, beats(lab, ticks, dead)))
        elif kind == "slow":
            again = last + lab.random.randint(dead - 2, 3 * dead)
            peers.append(Peer(name, True, [*beats(lab, last), *range(again, ticks)]))
        elif kind == "suspended":
            begin = last + lab.random.randint(1, 2 * dead)
            peers.append(
                Peer(name, True, beats(lab, last), [(begin, begin + lab.random.randint(1, 3 * dead))])
            )
        else:
            peers.append(
                Peer(name, here, beats(lab, last), ends=last + 1 if kind == "ends" and here else None)
            )
    return peers


def test_every_rank_is_judged_by_its_own_silence(lab: Judge) -> None:
    for _ in range(3):
        ticks = 160
        peers = random_peers(lab, ticks)
        seen = watch(lab, peers, ticks)
        expect_as_modelled(lab, peers, ticks, seen, "each rank has its own limit, and is lost once")


def test_the_kernel_is_asked_only_where_its_answer_matters(lab: Judge) -> None:
    last, dead = 8, PER_S * lab.size.dead_s
    ticks = last + STUCK * dead
    peers = [Peer(f"well {number}", True, list(range(1, ticks + 1))) for number in range(lab.size.ranks)]
    peers += [Peer("stuck", True, list(range(1, last + 1))), Peer("never", True, []), Peer("far", False, [1])]
    seen = watch(lab, peers, ticks, early=0)
    lab.cost(seen.asked, (STUCK - 1) * dead)
    lab.expect(
        [name for _, name, _ in seen.reported],
        ["far"],
        f"{len(peers)} ranks, of which one is stuck for exactly 3 * dead_s (losses)",
        "a watched process that runs is lost only after more than 3 * dead_s",
    )
