"""Prefix sharing by radix tree: pages, found by the token ids that lead to them.

One of the forms of prefix.PrefixCache. The idea is RadixAttention (SGLang, Zheng et al. 2024, section 3): a
tree whose paths are token sequences. It finds pages without keys, and shares up to the page instead of up to
the block. Keys only tell the Conductor which blocks the tree holds.
Explained in docs/explain/prefix-sharing.md.

    root of a salt --[t0..t47: pages 7 2 9]--+--[t48..t79: pages 1 3]
                                             `--[u48..u63: page 8]        u48..u63 differ from t48..t63

A node is the edge that leads to it: a run of pages, and the token ids of each. Edges are split between pages,
where two sequences part.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from scheduler.instance.pages import Pages
from scheduler.instance.prefix import Chain, PrefixCache, units_of

PageTokens = tuple[int, ...]
"""The token ids of one page."""


@dataclass(slots=True)
class Node:
    """A run of pages after those of its parent.

        salt       of its tree
        start      pages before this run
        parent     None for a root, which has no pages
        tokens     (len(pages),) token ids of each page
        pages      where their KV lies
        children   runs that follow the last page, by the token ids of their first page

    Invariant: a node that is no root has at least one page.
    """

    salt: bytes
    start: int
    parent: Node | None = field(compare=False, repr=False)
    tokens: list[PageTokens] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)
    children: dict[PageTokens, Node] = field(default_factory=dict)


@dataclass(slots=True)
class RadixPrefix(PrefixCache):
    """One tree per salt.

        pages          of the rank; the cache marks those that it holds
        block_tokens   tokens per block, a multiple of the page: the keys of whole blocks are reported

    Invariant: each cached page is in exactly one node, and a root has children. A block is in the tree if its
    last page is, because the end of a prefix is evicted first.
    """

    pages: Pages
    block_tokens: int
    _roots: dict[bytes, Node] = field(init=False, default_factory=dict)
    _node_of: dict[int, Node] = field(init=False, default_factory=dict, compare=False)  # by page
    _key_of: dict[int, int] = field(init=False, default_factory=dict)  # of the block that ends with a page
    _page_of: dict[int, int] = field(init=False, default_factory=dict)  # the reverse

    def __post_init__(self) -> None:
        assert self.block_tokens % self.pages.page_tokens == 0, "a block is not a whole number of pages"

    @property
    def unit_tokens(self) -> int:
        """Return the tokens of a page."""
        return self.pages.page_tokens

    def match(
        self, chain: Chain, token_ids: Sequence[int], most_tokens: int, known: Sequence[int] = ()
    ) -> tuple[int, ...]:
        """Return the pages of the longest common prefix with any path, of at most most_tokens tokens."""
        if chain.salt is None:
            return ()
        node = self._node_of[known[-1]] if known else self._roots.get(chain.salt)
        found: list[int] = []
        size, start = self.pages.page_tokens, len(known)
        for index, tokens in enumerate(units_of(token_ids, size, start, most_tokens // size), start):
            node = node and _step(node, index, tokens)
            if node is None:
                break
            found.append(node.pages[index - node.start])
        return (*known, *found)

    def insert(self, chain: Chain, token_ids: Sequence[int], pages: list[int], num_tokens: int) -> None:
        """Note that the first num_tokens tokens are computed and lie in these pages of a sequence.

        Follows the tree from the sequence's last cached page. Where the tree ends, or a page of it has other
        tokens, the sequence's own pages become a branch.
        """
        if chain.salt is None:
            return
        end = num_tokens // self.pages.page_tokens
        known = next((n for n in range(end, 0, -1) if pages[n - 1] in self._node_of), 0)
        node = self._node_of[pages[known - 1]] if known else self._roots.get(chain.salt)
        units = list(units_of(token_ids, self.pages.page_tokens, known, end))
        for index, tokens in enumerate(units, known):
            after = node and _step(node, index, tokens)
            if after is None:
                node = node or self._roots.setdefault(chain.salt, Node(chain.salt, 0, None))
                self._branch(node, index, units[index - known :], pages[index:end])
                self._name_blocks(chain, pages, index, end)
                break
            node = after
            there = node.pages[index - node.start]
            self.pages.share([there])
            self.pages.give_back([pages[index]])
            pages[index] = there

    def victims(self) -> Iterator[tuple[int, ...]]:
        """Yield idle pages: each is the last page of a leaf once those before it are dropped."""
        return ((page,) for page in self.pages.idle)

    def drop(self, pages: Sequence[int]) -> None:
        """Evict pages, each of which is the last page of a leaf."""
        for page in pages:
            node = self._node_of.pop(page)
            assert node.pages[-1] == page, f"page {page} is dropped from the middle of a run"
            assert not node.children, f"page {page} is dropped before the pages that follow it"
            node.pages.pop()
            tokens = node.tokens.pop()
            if not node.pages:
                self._unlink(node, tokens)
        self._forget_keys(pages)
        self.pages.uncache(pages)

    def clear(self) -> None:
        """Forget all trees."""
        self._forget_keys(list(self._key_of))
        self.pages.uncache(list(self._node_of))
        self._roots.clear()
        self._node_of.clear()

    def held(self) -> list[int]:
        """Return the keys of all blocks, and drain."""
        self._came_in.clear()
        return list(self._page_of)

    def check(self) -> None:
        """Assert the invariants."""
        assert self._node_of.keys() == self.pages.cached.keys()
        assert self._key_of.keys() <= self._node_of.keys()
        assert {page: key for key, page in self._page_of.items()} == self._key_of
        pages: list[int] = []
        for salt, root in self._roots.items():
            assert root.salt == salt
            assert root.children, "a root without children is kept"
            assert not root.pages
            nodes = [root]
            while nodes:
                node = nodes.pop()
                pages += node.pages
                assert len(node.tokens) == len(node.pages)
                assert all(len(tokens) == self.pages.page_tokens for tokens in node.tokens)
                assert all(self._node_of[page] is node for page in node.pages)
                for first, child in node.children.items():
                    assert child.parent is node
                    assert child.salt == node.salt
                    assert child.start == node.start + len(node.pages)
                    assert child.tokens[0] == first
                nodes += node.children.values()
        assert len(pages) == len(set(pages)) == len(self._node_of), "a page is in two nodes"

    def _branch(self, node: Node, index: int, tokens: list[PageTokens], pages: list[int]) -> None:
        """Add a run of pages after the first `index` pages of the path to `node`."""
        if index < node.start + len(node.pages):
            node = self._split(node, index - node.start)
        if node.children or node.parent is None:
            child = Node(node.salt, index, node)
            node.children[tokens[0]] = child
            node = child
        node.tokens += tokens
        node.pages += pages
        self._node_of.update(dict.fromkeys(pages, node))
        self.pages.cache(pages)

    def _name_blocks(self, chain: Chain, pages: Sequence[int], first: int, end: int) -> None:
        """Note the keys of the blocks whose last page is one of the new pages first .. end-1 of a sequence.

        A key that names another block of the tree already is a collision, and not reported again.
        """
        size = self.block_tokens // self.pages.page_tokens
        for number in range(first // size, min(end // size, len(chain.keys))):
            key, page = chain.keys[number], pages[(number + 1) * size - 1]
            if key not in self._page_of:
                self._key_of[page], self._page_of[key] = key, page
                self._note(key, came_in=True)

    def _forget_keys(self, pages: Sequence[int]) -> None:
        for page in pages:
            if page in self._key_of:
                key = self._key_of.pop(page)
                del self._page_of[key]
                self._note(key, came_in=False)

    def _split(self, node: Node, count: int) -> Node:
        """Move the first `count` pages of a run into a node of their own, above the rest. Return it."""
        assert node.parent is not None
        upper = Node(node.salt, node.start, node.parent, node.tokens[:count], node.pages[:count])
        node.parent.children[upper.tokens[0]] = upper
        del node.tokens[:count], node.pages[:count]
        node.start += count
        node.parent = upper
        upper.children[node.tokens[0]] = node
        self._node_of.update(dict.fromkeys(upper.pages, upper))
        return upper

    def _unlink(self, node: Node, first: PageTokens) -> None:
        """Remove a node without pages, and its root if that has no other child."""
        assert node.parent is not None
        del node.parent.children[first]
        if node.parent.parent is None and not node.parent.children:
            del self._roots[node.salt]


def _step(node: Node, index: int, tokens: PageTokens) -> Node | None:
    """Return the node that has the page number `index` of a path with these tokens, or None.

    It is `node` itself, or the child that follows its last page.
    """
    at = index - node.start
    if at == len(node.pages):
        return node.children.get(tokens)
    return node if node.tokens[at] == tokens else None
