"""Is the cache what it claims to be? Recounts everything from the tree itself; for idle moments and for tests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence

from engine_shim.cache.component import Component
from engine_shim.cache.node import Node
from engine_shim.cache.radix import FULL, RadixCache, Receipt
from engine_shim.types import NULL_PAGE, GroupKind
from router.wire.block_keys import block_keys


class IntegrityError(RuntimeError):
    """The cache contradicts itself; the message says where."""


def check_integrity(
    cache: RadixCache,
    *,
    held: Sequence[Collection[int]],
    receipts: Iterable[Receipt],
    pins: Iterable[Receipt] = (),
) -> None:
    """Raise ``IntegrityError`` unless the tree, its pools and its users agree.

    ``held[g]`` are the pages of group g that requests own, ``receipts`` all locks that were not released, ``pins``
    what is being copied out.

    - Links go both ways, keys and hashes follow from the tokens, and every run has one full page a page, as many
      window pages or none, and one state or none. No leaf without readers is of no use.
    - Each page of a pool is free, the tree's or a request's: exactly one of them.
    - Lock counts are those that the receipts add up to; what is locked is there; full locks are the most.
    - The orders of eviction list exactly what is unlocked, count their pages right, and no parent is
      older than its child in the full one.
    """
    nodes = list(cache.nodes())
    for node in nodes:
        _check_node(cache, node)
    _check_locks(cache, nodes, list(receipts))
    _check_pins(cache, nodes, list(pins))
    for component in cache.components:
        _check_pages(component, nodes, held[component.index])
        _check_order(component, nodes)
    place = {node: index for index, node in enumerate(cache.components[FULL].unlocked)}
    for node in place:
        if node.parent in place and place[node.parent] < place[node]:
            raise IntegrityError(f"{_name(node)} is more recent than its parent")


def _check_node(cache: RadixCache, node: Node) -> None:
    parent, page = node.parent, cache.layout.page_tokens
    if parent is None or parent.children.get(node.tokens[:page]) is not node:
        raise IntegrityError(f"{_name(node)} is not where its parent looks for it")
    if node.namespace != parent.namespace:
        raise IntegrityError(f"{_name(node)} lies in another namespace than its parent")
    if node.hashes != block_keys(node.tokens, block_tokens=page, parent=parent.hashes[-1]):
        raise IntegrityError(f"the hashes of {_name(node)} do not follow from its tokens")
    if not node.pages or len(node.tokens) != node.pages * page:
        raise IntegrityError(f"{_name(node)} has {len(node.tokens)} tokens on {node.pages} pages")
    for group, pages in zip(cache.layout.groups, node.held, strict=True):
        expected = 1 if group.kind is GroupKind.STATE else node.pages
        if len(pages or ()) != expected and (pages is not None or group.index == FULL):
            raise IntegrityError(f"{_name(node)} has {len(pages or ())} pages of group {group.index}, not {expected}")
    if not (node.children or node.locks[FULL] or node.pins[FULL]) and not all(c.serves(node) for c in cache.components):
        raise IntegrityError(f"{_name(node)} is a leaf that serves nobody")


def _check_pages(component: Component, nodes: list[Node], held: Collection[int]) -> None:
    pool, group = component.pool, component.index
    owners = Counter(pool.free_set())
    owners.update(held)
    for node in nodes:
        owners.update(node.held[group] or ())
    for page in range(NULL_PAGE + 1, pool.total + 1):
        if owners[page] != 1:
            raise IntegrityError(f"page {page} of group {group} has {owners[page]} owners, expected one")
    if len(owners) != pool.total or pool.free_pages != len(pool.free_set()):
        raise IntegrityError(f"group {group} has pages that are not of its pool, or free ones twice")


def _check_locks(cache: RadixCache, nodes: list[Node], receipts: list[Receipt]) -> None:
    known = set(nodes)
    for group, component in enumerate(cache.components):
        counts: Counter[Node] = Counter()
        for receipt in receipts:
            counts.update(component.covered(receipt.node, receipt.extents[group], _refuse_to_cut))
        if not counts.keys() <= known:
            raise IntegrityError("a locked node is not in the tree any more")
        for node in nodes:
            if node.locks[group] != counts[node]:
                raise IntegrityError(
                    f"{_name(node)} has {node.locks[group]} locks in group {group}, its receipts are {counts[node]}"
                )
            if node.locks[group] and (node.held[group] is None or node.locks[group] > node.locks[FULL]):
                raise IntegrityError(f"{_name(node)} is locked in group {group}, but not there or not in the full one")
    for receipt in receipts:
        if sum(node.pages for node in receipt.node.path()) != receipt.pages:
            raise IntegrityError(f"a receipt for {receipt.pages} pages ends elsewhere")
    if cache.receipts != len(receipts):
        raise IntegrityError(f"{cache.receipts} locks counted, {len(receipts)} receipts out")


def _check_pins(cache: RadixCache, nodes: list[Node], pins: list[Receipt]) -> None:
    for group, component in enumerate(cache.components):
        counts: Counter[Node] = Counter()
        for receipt in pins:
            counts.update(component.covered(receipt.node, receipt.extents[group], _refuse_to_cut))
        if any(node.pins[group] != counts[node] for node in nodes) or not counts.keys() <= set(nodes):
            raise IntegrityError(f"group {group}: pins are not what the copies under way add up to")
        if any(node.pins[group] and (node.held[group] is None or not node.pins[FULL]) for node in nodes):
            raise IntegrityError(f"group {group}: a copy is made of what is not there")
    if cache.pinned != len(pins):
        raise IntegrityError(f"{cache.pinned} pins counted, {len(pins)} copies under way")


def _refuse_to_cut(node: Node, pages: int) -> None:
    raise IntegrityError(f"a window lock begins inside {_name(node)}")


def _check_order(component: Component, nodes: list[Node]) -> None:
    group, listed = component.index, list(component.unlocked)
    expected = {node for node in nodes if node.held[group] is not None and not node.locks[group]}
    if len(listed) != len(expected) or set(listed) != expected:
        raise IntegrityError(f"group {group}: {len(listed)} nodes may be evicted, {len(expected)} are unlocked")
    if component.unlocked.pages != sum(len(component.held(node)) for node in listed if not node.pins[group]):
        raise IntegrityError(f"{component.unlocked.pages} pages counted as evictable, not what the nodes hold")


def _name(node: Node) -> str:
    return f"the node {node.namespace!r} {list(node.tokens[:4])}… of {node.pages} pages"
