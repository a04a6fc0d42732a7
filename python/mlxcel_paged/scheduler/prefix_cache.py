"""Pages of tokens that were computed before, found again by content.

A tree with one node per full page: a node is reached only through the tokens of every page before it, compared token by
token, so no hash can lead to another prompt's keys and values. Only pages whose steps have retired without an error are
here, and the cache is one of their holders. A page that sequences use as well stays; the others are given up, least
recently used first and no page before those that follow it, when somebody needs room.

Who holds a node's page holds the pages of all nodes above it: a sequence that finds its own prefix here under other
pages (two of them computed it side by side) adds nothing below. So a node without users has no descendant with users.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mlxcel_paged._core import PagePool
    from mlxcel_paged.scheduler.sequence import Sequence


class PrefixNode:
    """One full page of tokens after those of its ancestors.

    Attributes:
        token_ids: the page's tokens.
        pages: the page in every KV group.
        num_users: sequences that hold it.
    """

    __slots__ = ("children", "num_users", "pages", "parent", "token_ids")

    def __init__(self, parent: PrefixNode | None, token_ids: tuple[int, ...], pages: tuple[int, ...]) -> None:
        self.parent = parent
        self.token_ids = token_ids
        self.pages = pages
        self.num_users = 0
        self.children: dict[tuple[int, ...], PrefixNode] = {}


class PrefixCache:
    """The computed pages of one model. The scheduler's thread alone uses it; counts may be read by any.

    Args:
        pools: the page pool of every KV group.
        page_size: tokens in a page, the same in every group.

    Attributes:
        num_pages: pages held here, per KV group.
        num_queries: prompt tokens that were looked up.
        num_hits: of those, tokens that were found.
        num_evicted: pages given up, over all KV groups.
    """

    def __init__(self, pools: Seq[PagePool], page_size: int) -> None:
        self._pools = tuple(pools)
        self._page_size = page_size
        self._root = PrefixNode(None, (), ())
        self._idle: OrderedDict[PrefixNode, None] = OrderedDict()  # no user, least recently used first
        self.num_pages = 0
        self.num_queries = 0
        self.num_hits = 0
        self.num_evicted = 0

    @property
    def num_idle(self) -> int:
        """Pages per KV group that are held here alone."""
        return len(self._idle)

    def find(self, token_ids: Seq[int]) -> list[PrefixNode]:
        """The longest chain of pages that starts `token_ids` and leaves at least one token to compute."""
        size = self._page_size
        nodes: list[PrefixNode] = []
        node = self._root
        for begin in range(0, (len(token_ids) - 1) // size * size, size):
            found = node.children.get(tuple(token_ids[begin : begin + size]))
            if found is None:
                break
            nodes.append(found)
            node = found
        return nodes

    def use(self, sequence: Sequence, nodes: list[PrefixNode]) -> None:
        """Starts a sequence, whose tables are empty, on the pages of a chain."""
        for node in nodes:
            node.num_users += 1
            self._idle.pop(node, None)
        for group, table in enumerate(sequence.tables):
            table.adopt([node.pages[group] for node in nodes])
        sequence.prefix_nodes = list(nodes)
        sequence.num_computed_tokens = sequence.num_committed_tokens = len(nodes) * self._page_size

    def publish(self, sequence: Sequence) -> None:
        """Adds the sequence's full pages whose tokens are computed for certain."""
        size, nodes = self._page_size, sequence.prefix_nodes
        num_full = sequence.num_committed_tokens // size
        if not sequence.publishes or len(nodes) >= num_full:
            return
        pages = list(zip(*(table.pages for table in sequence.tables), strict=True))
        parent = nodes[-1] if nodes else self._root
        for index in range(len(nodes), num_full):
            token_ids = tuple(sequence.token_ids[index * size : (index + 1) * size])
            if token_ids in parent.children:
                sequence.publishes = False  # computed by another at the same time; its pages stay
                return
            node = PrefixNode(parent, token_ids, tuple(pages[index]))
            for pool, page in zip(self._pools, node.pages, strict=True):
                pool.retain((page,))
            node.num_users = 1
            parent.children[token_ids] = node
            nodes.append(node)
            self.num_pages += 1
            parent = node

    def leave(self, sequence: Sequence) -> None:
        """Ends a sequence's use of its chain; the deepest page becomes the first to be given up."""
        for node in reversed(sequence.prefix_nodes):
            node.num_users -= 1
            if not node.num_users:
                self._idle[node] = None
        sequence.prefix_nodes = []
        sequence.publishes = True

    def evict(self, num_pages: int) -> None:
        """Gives up to `num_pages` pages of every KV group back."""
        for _ in range(min(num_pages, len(self._idle))):
            node, _ = self._idle.popitem(last=False)
            assert node.parent is not None
            assert not node.children
            del node.parent.children[node.token_ids]
            for pool, page in zip(self._pools, node.pages, strict=True):
                pool.release((page,))
            self.num_pages -= 1
            self.num_evicted += len(self._pools)

    def check_integrity(self) -> None:
        """Walks the tree.

        Raises:
            RuntimeError: counts, users or pages contradict each other.
        """
        num_nodes = num_idle = 0
        stack = list(self._root.children.values())
        while stack:
            node = stack.pop()
            num_nodes += 1
            num_idle += not node.num_users
            if (node.num_users == 0) != (node in self._idle):
                raise RuntimeError(f"a cached page has {node.num_users} users and is idle: {node in self._idle}")
            if any(child.num_users > node.num_users for child in node.children.values()):
                raise RuntimeError("a cached page has more users than the page before it")
            for pool, page in zip(self._pools, node.pages, strict=True):
                if pool.refcount(page) != 1 + node.num_users:
                    message = f"cached page {page} has {pool.refcount(page)} holders, {node.num_users} users"
                    raise RuntimeError(message)
            stack.extend(node.children.values())
        if (num_nodes, num_idle) != (self.num_pages, len(self._idle)):
            raise RuntimeError(
                f"{num_nodes} cached pages, {num_idle} idle: counted {self.num_pages}, {len(self._idle)}"
            )
