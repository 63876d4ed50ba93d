"""Token ids and block keys of the texts that came before, kept by their heads: a turn pays for what it added.

A radix tree over texts, cut where tokens cannot cross (``proxy/cuts``). A node holds a stretch of text with the ids
and the chain keys of the blocks that end in it::

    root ── system prompt and tools ──┬── conversation A, all its turns
                                      └── conversation B

A conversation's next turn compares its text with what is known, tokenizes the rest and appends to
its node. What a turn says last (the opening of the answer) never enters: the next turn says more there.
"""

from __future__ import annotations

import threading
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from router.proxy.cuts import Cutter
from router.wire.block_keys import block_keys

#: What a token, a key, a piece and a node are charged with.
_TOKEN_BYTES = 4
_KEY_BYTES = 8
_PIECE_BYTES = 80
_NODE_BYTES = 1024
#: Namespaces (block size and salt) of which a node keeps keys.
_MAX_CHAINS = 4
#: Python keeps a text as wide as its widest character: so many of ASCII get a node without others.
_NARROW_CHARS = 512
#: A leaf's last characters, up to so many, are overwritten by a turn that goes on otherwise.
_LOOSE_CHARS = 256


class Chain(NamedTuple):
    """One way of keying blocks: their size, and the root of the namespace."""

    block_tokens: int
    seed: int


@dataclass(eq=False, slots=True)
class _Node:
    """A stretch of text in pieces: ``ends`` are where they end in it, ``counts`` where in its own tokens."""

    parent: _Node | None
    start_tokens: int
    text: str = ""
    ends: list[int] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    tokens: array[int] = field(default_factory=lambda: array("I"))
    keys: OrderedDict[Chain, array[int]] = field(default_factory=OrderedDict)
    children: dict[int, _Node] = field(default_factory=dict)
    name: int = 0  # under which the parent knows it: the hash of its first piece

    def end_tokens(self) -> int:
        return self.start_tokens + len(self.tokens)

    def size_bytes(self) -> int:
        keys = sum(map(len, self.keys.values()))
        known = self.text.__sizeof__() + _TOKEN_BYTES * len(self.tokens) + _KEY_BYTES * keys
        return _NODE_BYTES + known + _PIECE_BYTES * len(self.ends)


@dataclass(frozen=True, slots=True)
class Known:
    """How much of a text is known: its first ``chars`` characters are ``tokens``, which are the caller's own.

    ``path`` are its nodes, as long as the tree has had so many ``changes`` and no more.
    """

    chars: int
    tokens: array[int]
    path: list[_Node]
    changes: int


class TokenCache:
    """A bounded tree. Any thread may use it; its lock is never held while something is tokenized.

    ``opening`` are ids that stand before every text.
    """

    def __init__(self, cutter: Cutter, *, max_bytes: int, opening: Sequence[int] = ()) -> None:
        self.max_bytes = max_bytes
        self._cutter = cutter
        self._root = _Node(None, 0, tokens=array("I", opening))
        self._used: OrderedDict[_Node, int] = OrderedDict()  # the longest unused first, with the bytes charged
        self._bytes = 0
        self._changes = 0
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return self._bytes

    def look_up(self, text: str) -> Known:
        """The longest head of ``text`` that is known."""
        with self._lock:
            path, chars = self._walk(text)
            tokens: array[int] = array("I")
            for node in path:
                tokens.extend(node.tokens)
            return Known(chars, tokens, path, self._changes)

    def keep(
        self,
        text: str,
        known: Known,
        pieces: Sequence[tuple[str, array[int]]],
        *,
        tail: Sequence[int],
        chains: Iterable[Chain],
    ) -> tuple[array[int], dict[Chain, array[int]]]:
        """Keep the pieces of ``text`` that followed what was known. All its ids and keys, ``tail`` included, which is
        not kept.
        """
        tokens = known.tokens
        for _, ids in pieces:
            tokens.extend(ids)
        tokens.extend(tail)
        with self._lock:
            if known.changes == self._changes and _is_in_tree(known.path[-1]):
                path, chars = known.path, known.chars
            else:
                path, chars = self._walk(text, may_cut=True)
            start, new = known.chars, list(pieces)
            while new and start < chars:  # another thread has kept it meanwhile
                start += len(new.pop(0)[0])
            if new and start == chars:  # else the head was forgotten meanwhile
                self._append(path, new)
            keys = {chain: _chain_keys(path, chain, tokens) for chain in chains}
            self._touch(path)
        return tokens, keys

    # --- the tree -------------------------------------------------------------------------------------

    def _walk(self, text: str, *, may_cut: bool = False) -> tuple[list[_Node], int]:
        """The nodes along ``text`` and how far they reach. A node that differs in the middle is cut there, or a copy of
        its first part stands for it.
        """
        path = [self._root]
        at = 0
        while at < len(text):
            node = path[-1].children.get(hash(text[at : self._cutter.next_cut(text, at)]))
            if node is None:
                break
            count, chars = self._common(text, at, node)
            at += chars
            if count == len(node.ends):
                path.append(node)
                continue
            if count:
                path.append(self._cut(node, count) if may_cut else _head(node, count))
            break
        return path, at

    def _common(self, text: str, at: int, node: _Node) -> tuple[int, int]:
        """How many of the node's pieces the text has from ``at`` on, and their characters."""
        ends = node.ends
        count = len(ends) if text.startswith(node.text, at) else _same_pieces(text, at, node)
        # The last of them may go on in this text: only where it has a cut, too, are they the same pieces.
        while count:
            start = ends[count - 2] if count > 1 else 0
            if self._cutter.next_cut(text, at + start) == at + ends[count - 1]:
                return count, ends[count - 1]
            count -= 1
        return 0, 0

    def _cut(self, node: _Node, count: int) -> _Node:
        """Divide a node after some of its pieces. What was a leaf's short end is given up instead."""
        self._changes += 1
        head, end = _head(node, count), node.ends[count - 1]
        if node.children or len(node.text) - end > _LOOSE_CHARS:
            rest = _Node(
                parent=node,
                start_tokens=head.end_tokens(),
                text=node.text[end:],
                ends=[each - end for each in node.ends[count:]],
                counts=[each - len(head.tokens) for each in node.counts[count:]],
                tokens=node.tokens[len(head.tokens) :],
                keys=OrderedDict((chain, keys[len(head.keys[chain]) :]) for chain, keys in node.keys.items()),
                children=node.children,
                name=hash(node.text[end : node.ends[count]]),
            )
            for child in rest.children.values():
                child.parent = rest
            node.children = {rest.name: rest}
            self._charge(rest)
        node.text, node.ends, node.counts = node.text[:end], head.ends, head.counts
        node.tokens, node.keys = head.tokens, head.keys
        self._charge(node)
        return node

    def _append(self, path: list[_Node], pieces: Sequence[tuple[str, array[int]]]) -> None:
        """Put pieces behind the last node: into it where nothing else follows and they suit it, else as its child."""
        self._changes += 1
        node = path[-1]
        text, node.text = node.text, ""  # Python copies no text that only one name has when it is added to
        for piece, ids in pieces:
            if node is self._root or node.children or _widens(text, piece):
                node.text, text = text, ""
                child = _Node(node, node.end_tokens(), name=hash(piece))
                if child.name in node.children:  # two texts of one hash: the first stays
                    return
                node.children[child.name] = child
                path.append(child)
                node = child
            text += piece
            node.ends.append(len(text))
            node.tokens.extend(ids)
            node.counts.append(len(node.tokens))
        node.text = text

    # --- what it costs ----------------------------------------------------------------------------------

    def _touch(self, path: Sequence[_Node]) -> None:
        """The path was used now, its head last: a node is never forgotten before those that follow it."""
        for node in reversed(path[1:]):
            self._charge(node)
            self._used.move_to_end(node)
        while self._bytes > self.max_bytes and self._used:
            self._changes += 1
            node, size = self._used.popitem(last=False)
            self._bytes -= size
            assert node.parent is not None
            assert not node.children, "what follows a node is forgotten before it"
            del node.parent.children[node.name]

    def _charge(self, node: _Node) -> None:
        size = node.size_bytes()
        self._bytes += size - self._used.get(node, 0)
        self._used[node] = size


def _head(node: _Node, count: int) -> _Node:
    """A copy of a node's first pieces, but for their text, known to nobody."""
    tokens = node.counts[count - 1]
    end = node.start_tokens + tokens
    return _Node(
        parent=node.parent,
        start_tokens=node.start_tokens,
        ends=node.ends[:count],
        counts=node.counts[:count],
        tokens=node.tokens[:tokens],
        keys=OrderedDict((chain, keys[: _blocks_in(node, chain, end)]) for chain, keys in node.keys.items()),
        name=node.name,
    )


def _widens(text: str, piece: str) -> bool:
    """Together they would take much more memory than apart."""
    is_narrow = text.isascii()
    return is_narrow is not piece.isascii() and len(text if is_narrow else piece) >= _NARROW_CHARS


def _is_in_tree(node: _Node) -> bool:
    """Not the copy of a node's first pieces."""
    return node.parent is None or node.parent.children.get(node.name) is node


def _same_pieces(text: str, at: int, node: _Node) -> int:
    """How many of the node's pieces stand in the text at ``at``, where not all do: looked for by halves."""
    same, most = 0, len(node.ends) - 1
    while same < most:
        middle = (same + most + 1) // 2
        start = node.ends[same - 1] if same else 0
        if text.startswith(node.text[start : node.ends[middle - 1]], at + start):
            same = middle
        else:
            most = middle - 1
    return same


def _blocks_in(node: _Node, chain: Chain, end_tokens: int) -> int:
    """How many blocks end in the node's tokens up to ``end_tokens``."""
    return end_tokens // chain.block_tokens - node.start_tokens // chain.block_tokens


def _chain_keys(path: Sequence[_Node], chain: Chain, tokens: array[int]) -> array[int]:
    """Keys of all whole blocks of ``tokens``, which begin with those of ``path``: known ones taken, new ones kept."""
    keys: array[int] = array("Q")
    size, parent = chain
    for node in path:
        own = node.keys.get(chain)
        if own is None:
            own = node.keys[chain] = array("Q")
            while len(node.keys) > _MAX_CHAINS:
                node.keys.popitem(last=False)
        keys.extend(own)
        missing = tokens[len(keys) * size : node.end_tokens() // size * size]
        if missing:
            new = array("Q", block_keys(missing, block_tokens=size, parent=keys[-1] if keys else parent))
            own.extend(new)
            keys.extend(new)
    rest = tokens[len(keys) * size :]
    keys.extend(block_keys(rest, block_tokens=size, parent=keys[-1] if keys else parent))
    return keys
