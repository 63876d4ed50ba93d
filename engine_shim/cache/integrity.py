"""Is the cache what it claims to be? Recounts everything from the tree itself; for idle moments and for tests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence

from engine_shim.cache.node import Node, Recency
from engine_shim.cache.radix import FULL, RadixCache, Receipt
from engine_shim.types import NULL_PAGE
from router.wire.block_keys import block_keys


class IntegrityError(RuntimeError):
    """The cache contradicts itself; the message says where."""


def check_integrity(cache: RadixCache, *, held: Sequence[Collection[int]], receipts: Iterable[Receipt]) -> None:
    """Raise ``IntegrityError`` unless the tree, its pools and its users agree.

    ``held[g]`` are the pages of group g that requests own, ``receipts`` all locks that were not released.

    - Links go both ways, keys and hashes follow from the tokens, and every run has one full page a page and
      as many window pages or none.
    - Each page of a pool is free, the tree's or a request's: exactly one of them.
    - Lock counts are those that the receipts add up to.
    - The two orders of eviction list exactly what is unlocked, count their pages right, and no parent is
      older than its child.
    """
    nodes = list(cache.nodes())
    for node in nodes:
        _check_node(node, page=cache.layout.page_tokens)
    _check_pages(cache, nodes, held)
    _check_locks(cache, nodes, list(receipts))
    _check_order(cache.full_unlocked, [node for node in nodes if not node.full_locks])
    _check_order(cache.window_unlocked, [node for node in nodes if node.window and not node.window_locks])
    place = {node: index for index, node in enumerate(cache.full_unlocked)}
    for node in place:
        if node.parent in place and place[node.parent] < place[node]:
            raise IntegrityError(f"{_name(node)} is more recent than its parent")


def _check_node(node: Node, *, page: int) -> None:
    parent = node.parent
    if parent is None or parent.children.get(node.tokens[:page]) is not node:
        raise IntegrityError(f"{_name(node)} is not where its parent looks for it")
    if node.namespace != parent.namespace:
        raise IntegrityError(f"{_name(node)} lies in another namespace than its parent")
    if not node.full or len(node.tokens) != len(node.full) * page:
        raise IntegrityError(f"{_name(node)} has {len(node.tokens)} tokens on {len(node.full)} full pages")
    if node.window is not None and len(node.window) != len(node.full):
        raise IntegrityError(f"{_name(node)} has {len(node.window)} window pages, {len(node.full)} full ones")
    if node.hashes != block_keys(node.tokens, block_tokens=page, parent=parent.hashes[-1]):
        raise IntegrityError(f"the hashes of {_name(node)} do not follow from its tokens")


def _check_pages(cache: RadixCache, nodes: list[Node], held: Sequence[Collection[int]]) -> None:
    for group, pool in enumerate(cache.pools):
        owners = Counter(pool.free_set())
        owners.update(held[group])
        for node in nodes:
            owners.update((node.full if group == FULL else node.window) or ())
        for page in range(NULL_PAGE + 1, pool.total + 1):
            if owners[page] != 1:
                raise IntegrityError(f"page {page} of group {group} has {owners[page]} owners, expected one")
        if len(owners) != pool.total or pool.free_pages != len(pool.free_set()):
            raise IntegrityError(f"group {group} has pages that are not of its pool, or free ones twice")


def _check_locks(cache: RadixCache, nodes: list[Node], receipts: list[Receipt]) -> None:
    full: Counter[Node] = Counter()
    window: Counter[Node] = Counter()
    for receipt in receipts:
        left = receipt.window_pages
        path = list(receipt.node.path())
        if sum(len(node.full) for node in path) != receipt.pages:
            raise IntegrityError(f"a receipt for {receipt.pages} pages ends elsewhere")
        for node in path:
            full[node] += 1
            if left > 0:
                window[node] += 1
                left -= len(node.full)
        if left != 0:
            raise IntegrityError("a window lock does not begin where a node does")
    for node in nodes:
        if (node.full_locks, node.window_locks) != (full[node], window[node]):
            raise IntegrityError(
                f"{_name(node)} has {node.full_locks} full and {node.window_locks} window locks, "
                f"its receipts are {full[node]} and {window[node]}"
            )
        if node.window_locks and node.window is None:
            raise IntegrityError(f"{_name(node)} is a tombstone under a window lock")
    if set(full) - set(nodes):
        raise IntegrityError("a locked node is not in the tree any more")
    if cache.receipts != len(receipts):
        raise IntegrityError(f"{cache.receipts} locks counted, {len(receipts)} receipts out")


def _check_order(order: Recency, expected: list[Node]) -> None:
    listed = list(order)
    if len(listed) != len(expected) or set(listed) != set(expected):
        raise IntegrityError(f"{len(listed)} nodes may be evicted, {len(expected)} are unlocked")
    if order.pages != sum(len(node.full) for node in listed):
        raise IntegrityError(f"{order.pages} pages counted as evictable, not what the nodes hold")


def _name(node: Node) -> str:
    return f"the node {node.namespace!r} {list(node.tokens[:4])}… of {len(node.full)} pages"
