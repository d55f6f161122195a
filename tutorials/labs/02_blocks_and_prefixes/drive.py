"""The child's side of lab 2: calls the regions with what the tests send, and tells what was seen.

It runs beside a student's code, so it knows no expected value. Each call reaches the region of one task.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from typing import Any

import scheduler.instance.pages
import store.keys
import store.policies.sieve
from mooncake_lite.labs.counting import CountedLookUps, CountedNumber, counting, going_on
from scheduler.instance.pages import PageDraft, Pages
from scheduler.instance.prefix import Chain
from scheduler.instance.prefix_hash import HashPrefix
from store.errors import TokenError
from store.keys import PrefixChain
from store.policies.contract import BlockFacts
from store.policies.sieve import SIEVE

MOST_DRAWN = 16
"""Items of a pool that `labs show` draws."""

# ------------------------------------------------------------------------------------------- 2a


def books(inputs: dict[str, Any]) -> list[dict[str, Any]]:
    """Play a history of sequences on one set of pages, and tell the books after each step.

    Steps: ["start", name, tokens], ["fork", name, new name], ["write", name], ["end", name]. A step
    after which a sequence holds a page that is not used is the last one: nothing sensible can follow.
    """
    pages = Pages(inputs["num_pages"], inputs["page_tokens"])
    held: dict[str, list[int]] = {}
    tokens: dict[str, int] = {}
    seen = []
    for verb, name, *more in inputs["steps"]:
        new: list[int] = []
        copied = None
        if verb == "start":
            tokens[name] = more[0]
            held[name] = new = list(itertools.islice(reversed(pages.free), pages.needed(more[0])))
            pages.take(new)
        elif verb == "fork":
            pages.share(held[name])
            held[more[0]], tokens[more[0]] = list(held[name]), tokens[name]
        elif verb == "write":
            tokens[name] += 1
            needs = pages.needed(tokens[name]) - len(held[name]) or int(pages.used[held[name][-1]] > 1)
            new = list(itertools.islice(reversed(pages.free), needs))
            copied = pages.grow(held[name], tokens[name], tuple(new))
        else:
            pages.give_back(held.pop(name))
        seen.append(
            {
                "new": new,
                "copied": copied,
                "held": {name: list(numbers) for name, numbers in held.items()},
                "used": [[page, users] for page, users in pages.used.items()],
                "free": list(pages.free),
            }
        )
        if any(page not in pages.used for numbers in held.values() for page in numbers):
            break
    return seen


# ------------------------------------------------------------------------------------------- 2b


def chain(inputs: dict[str, Any]) -> dict[str, Any]:
    """Feed a chain with pieces; a piece that is refused answers None in place of its keys."""
    hashed = 0
    real = store.keys.xxh3_64_intdigest

    def counting(data: Any, *seed: int) -> int:
        nonlocal hashed
        hashed += memoryview(data).nbytes
        return real(data, *seed)

    grown = PrefixChain(inputs["block_tokens"], bytes.fromhex(inputs["salt"]), last_key=inputs["last_key"])
    keys: list[Any] = []
    store.keys.xxh3_64_intdigest = counting
    try:
        for piece in inputs["pieces"]:
            try:
                keys.append(grown.extend(piece))
            except TokenError:
                keys.append(None)
    finally:
        store.keys.xxh3_64_intdigest = real
    return {"keys": keys, "pending": list(grown.pending), "last_key": grown.last_key, "hashed": hashed}


# ------------------------------------------------------------------------------------------- 2c


def match(inputs: dict[str, Any]) -> dict[str, Any]:
    """Insert computed prompts, then match others. Tells the pages of both, and the look-ups of each match."""
    prefix = HashPrefix(Pages(inputs["num_pages"], inputs["page_tokens"]), inputs["block_tokens"])
    inserted = []
    for prompt in inputs["cached"]:
        tokens = prompt["tokens"]
        pages = list(PageDraft(prefix.pages, prefix).take(prefix.pages.needed(len(tokens))) or ())
        prefix.pages.take(pages)
        prefix.insert(chain_of(prompt), tokens, pages, len(tokens))
        inserted.append(pages)
    prefix._blocks = blocks = CountedLookUps(prefix._blocks)
    prefix._by_end = ends = CountedLookUps(prefix._by_end)
    found = []
    for asked in inputs["asked"]:
        before = blocks._asked + ends._asked
        size = inputs["block_tokens"] // inputs["page_tokens"]
        known = inserted[asked["from"]][: asked["known_blocks"] * size]
        pages_found = prefix.match(chain_of(asked), asked["tokens"], asked["most_tokens"], known)
        found.append({"pages": list(pages_found), "look_ups": blocks._asked + ends._asked - before})
    return {"inserted": inserted, "found": found}


def chain_of(prompt: dict[str, Any]) -> Chain:
    """What the cache must know of a sequence: its salt, None for none, and its keys."""
    salt = prompt["salt"]
    return Chain(None if salt is None else bytes.fromhex(salt), prompt["keys"])


# ------------------------------------------------------------------------------------------- 2d


class CountedPage(CountedNumber):
    """A page number that counts how often it is compared or hashed."""

    __hash__ = counting("__hash__")
    real = property(going_on("__pos__"))
    numerator = property(going_on("__pos__"))


for _name in ("mul", "floordiv", "mod", "pow", "lshift", "rshift", "and", "or", "xor"):
    for _reverse in ("", "r"):
        setattr(CountedPage, f"__{_reverse}{_name}__", going_on(f"__{_reverse}{_name}__"))
for _name in ("__abs__", "__round__", "conjugate"):
    setattr(CountedPage, _name, going_on(_name))


class KeepsPages(type):
    """The type of `int` in the file of `Pages`: every integer is an instance."""

    def __instancecheck__(cls, value: Any) -> bool:
        return isinstance(value, int)


class CountedInt(metaclass=KeepsPages):
    """`int` in the file of `Pages`: int(page) goes on counting."""

    def __new__(cls, value: Any = 0, *base: Any) -> Any:
        """Return the integer."""
        return value if isinstance(value, CountedPage) else int(value, *base)


def check(inputs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Check books as they are given. Tells what `check` raised, whether it changed them, and what it cost."""
    vars(scheduler.instance.pages)["int"] = CountedInt
    seen = []
    for given in inputs:
        pages = Pages(given["num_pages"], given["page_tokens"])
        pages.free = deque(map(CountedPage, given["free"]))
        pages.used = {CountedPage(page): users for page, users in given["used"]}
        pages.idle = OrderedDict.fromkeys(map(CountedPage, given["idle"]))
        pages.cached = {CountedPage(page): number for number, page in enumerate(given["cached"])}
        pages.num_cached = len(given["cached"])
        before = repr(pages)
        raised = ""
        CountedPage.count = 0
        try:
            pages.check()
        except Exception as error:
            raised = type(error).__name__
        seen.append({"raised": raised, "changed": repr(pages) != before, "comparisons": CountedPage.count})
    return seen


# ------------------------------------------------------------------------------------------- 2e


class SeenRing(SIEVE):
    """A policy whose region is watched: what it reads is counted while it runs, and nothing else.

    _bits, _links   reads of `visited`, and of `newer` and `older`
    _walked         look-ups in `_nodes`, and entries that are walked over
    """

    def __init__(self, capacity: int) -> None:
        self._bits = self._links = self._walked = 0
        self._is_running = False
        super().__init__(capacity)
        self._nodes = CountedLookUps()

    @property
    def steps(self) -> int:
        """Return the largest of the counts: each of them is 1 for an item that the hand looks at."""
        return max(self._bits, self._links, self._walked)

    def offered(self) -> Iterator[int]:
        """Yield what the region yields."""
        items = self.victims(0.0)
        while True:
            before, self._is_running = self._nodes._asked, True
            try:
                item = next(items)
            except StopIteration:
                return
            finally:
                self._is_running = False
                self._walked += self._nodes._asked - before
            yield item

    def drawn(self) -> str:
        """Return the items from old to new: * was hit, > is where the hand stands."""
        said, node = [">()" if self._hand is self._end else "()"], self._end._newer
        while node is not self._end and len(said) <= len(self):
            said.append(f"{'>' * (node is self._hand)}{node.item}{'*' * node._visited}")
            node = node._newer
        return " ".join(said)


def watched_nodes(policy: Callable[[], SeenRing | None]) -> type:
    """Return a class of nodes that tell the policy what its region reads of them."""

    class Node(store.policies.sieve._Node):  # type: ignore[name-defined]
        __slots__ = ("_newer", "_older", "_visited")

    def watched(name: str, count: str) -> property:
        def read(node: Any) -> Any:
            if (ring := policy()) is not None and ring._is_running:
                setattr(ring, count, getattr(ring, count) + 1)
            return getattr(node, f"_{name}")

        return property(read, lambda node, value: setattr(node, f"_{name}", value))

    for name, count in (("visited", "_bits"), ("newer", "_links"), ("older", "_links")):
        setattr(Node, name, watched(name, count))
    return Node


def replay(inputs: dict[str, Any]) -> dict[str, Any]:
    """Play references to items against SIEVE. Tells the victims in order, the hits, and the hand's steps.

    insert_first   a new item comes in before another is evicted, as in `simulate cache`
    leased         items that may not be evicted
    asks           how often victims() is asked for a first item before one is evicted
    """
    policy: SeenRing | None = None
    real = store.policies.sieve._Node
    store.policies.sieve._Node = watched_nodes(lambda: policy)  # type: ignore[misc]
    try:
        policy = SeenRing(inputs["capacity"])
        return _replay(policy, inputs)
    finally:
        store.policies.sieve._Node = real  # type: ignore[misc]


def _replay(policy: SeenRing, inputs: dict[str, Any]) -> dict[str, Any]:
    present: set[int] = set()
    victims: list[int] = []
    rings: list[tuple[str, str]] = []
    hits = 0
    leased = set(inputs["leased"])
    is_small = inputs["capacity"] <= MOST_DRAWN

    def evict() -> None:
        ring = policy.drawn() if is_small else ""
        for _ in range(inputs["asks"] - 1):
            next(policy.offered(), None)
        for item in policy.offered():
            if item not in leased:
                policy.on_remove(item, evicted=True)
                present.remove(item)
                victims.append(item)
                rings.append((ring, str(item)))
                return
        rings.append((ring, "none"))

    for item in inputs["references"]:
        if item in present:
            hits += 1
            policy.on_access(item, 0.0)
            continue
        if not inputs["insert_first"] and len(present) >= inputs["capacity"]:
            evict()
        policy.on_insert(item, BlockFacts(), 0.0)
        present.add(item)
        if inputs["insert_first"] and len(present) > inputs["capacity"]:
            evict()
    steps, ring = policy.steps, policy.drawn() if is_small else ""
    offered = list(itertools.islice(policy.offered(), 2 * len(present) + 2))
    rings.append((ring, f"then offered: {' '.join(map(str, offered))}"))
    shown = rings if is_small else []
    return {"victims": victims, "hits": hits, "steps": steps, "offered": offered, "rings": shown}


CALLS = {"books": books, "chain": chain, "match": match, "check": check, "replay": replay}
