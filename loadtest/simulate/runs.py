"""A session's prompts as runs of a radix tree, so that a cache is one number per rank and run.

A *run* is a stretch of blocks that no recorded prompt leaves in its middle. A prompt is a *path*: runs from the root,
each with the number of its blocks that the prompt has. All but the last are whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from loadtest.types import BlockRuns, common_blocks, count_blocks, drop_blocks, take_blocks


@dataclass(slots=True, eq=False)
class Run:
    """One run of one play. What is known of it, by slot, in blocks from its start.

    ``known``: what the router believes resident; ``promised``: what it has sent there lately, with the sending's
    number; ``loadable``: what the host tier holds; ``sent``: what was ever sent there; ``last``: where it was sent
    last; ``spans``: what the sliding-window layers hold, from block to block; ``ever``: the most blocks that any prompt
    so far has had.
    """

    known: dict[int, int] = field(default_factory=dict)
    promised: dict[int, tuple[int, int]] = field(default_factory=dict)
    loadable: dict[int, int] = field(default_factory=dict)
    sent: dict[int, int] = field(default_factory=dict)
    last: int | None = None
    spans: dict[int, tuple[int, int]] = field(default_factory=dict)
    ever: int = 0


T = TypeVar("T")

#: Runs from the root, each with the blocks of it that a prompt has.
Path = tuple[tuple[Run, int], ...]
#: The same with a run's number within its tree.
NumberedPath = tuple[tuple[int, int], ...]


@dataclass(slots=True, eq=False)
class _Node:
    label: BlockRuns
    children: dict[int, _Node] = field(default_factory=dict)
    number: int = -1


def number_paths(prompts: Sequence[BlockRuns]) -> tuple[list[NumberedPath], int]:
    """The path of each prompt in the tree of them all, and how many runs the tree has."""
    root = _Node(())
    for blocks in prompts:
        _insert(root, blocks)
    runs = 0
    paths: list[NumberedPath] = []
    for blocks in prompts:
        node, rest, path = root, blocks, []
        while rest:
            node = node.children[_first(rest)]
            if node.number < 0:
                node.number = runs
                runs += 1
            length = count_blocks(node.label)
            path.append((node.number, min(length, count_blocks(rest))))
            rest = drop_blocks(rest, length)
        paths.append(tuple(path))
    return paths, runs


def _insert(root: _Node, blocks: BlockRuns) -> None:
    node, rest = root, blocks
    while rest:
        child = node.children.get(_first(rest))
        if child is None:
            if node is root or node.children:
                node.children[_first(rest)] = _Node(rest)
            else:
                node.label += rest  # a prompt that grows where nothing branches off makes its last run longer
            return
        shared = common_blocks(child.label, rest)
        if shared < count_blocks(child.label):
            if shared == count_blocks(rest):
                return
            tail = _Node(drop_blocks(child.label, shared), child.children)
            child.label = take_blocks(child.label, shared)
            child.children = {_first(tail.label): tail}
        node, rest = child, drop_blocks(rest, shared)


def _first(runs: BlockRuns) -> int:
    return runs[0].start


def path_blocks(path: Path) -> int:
    """Whole blocks of the prompt."""
    return sum(blocks for _, blocks in path)


def ever_blocks(path: Path) -> int:
    """Blocks of the prompt that any earlier prompt has had: what one endless cache for all would hold."""
    found = 0
    for run, blocks in path:
        found += min(run.ever, blocks)
        if run.ever < blocks:
            break
    return found


def remember(path: Path) -> None:
    """The prompt has been seen."""
    for run, blocks in path:
        run.ever = max(run.ever, blocks)


def believe(held: dict[int, T], slot: int, what: T | None) -> None:
    """Note what a slot holds of a run: blocks or a span; nothing at all is not noted."""
    if what:
        held[slot] = what
    else:
        held.pop(slot, None)


def believed_blocks(path: Path) -> dict[int, int]:
    """What the router believes each slot to hold of the prompt: told by events, or promised by what it sent."""
    if not path:
        return {}
    alive: Iterable[int] = path[0][0].known.keys() | path[0][0].promised.keys()
    found: dict[int, int] = {}
    for run, blocks in path:
        whole = []
        known, promised = run.known, run.promised
        for slot in alive:
            held = known.get(slot, 0)
            if slot in promised:
                held = max(held, promised[slot][0])
            if held >= blocks:
                whole.append(slot)
                held = blocks
            if held:
                found[slot] = found.get(slot, 0) + held
        if not whole:
            break
        alive = whole
    return found


def loadable_blocks(path: Path) -> dict[int, int]:
    """The same for the host tier."""
    return _depth_by_slot([(run.loadable, blocks) for run, blocks in path])


def sent_blocks(path: Path) -> dict[int, int]:
    """What was ever sent to each slot, evicted or not."""
    return _depth_by_slot([(run.sent, blocks) for run, blocks in path])


def _depth_by_slot(path: Sequence[tuple[dict[int, int], int]]) -> dict[int, int]:
    found: dict[int, int] = {}
    alive: Iterable[int] = path[0][0] if path else ()
    for held_by, blocks in path:
        whole = []
        for slot in alive:
            held = min(held_by.get(slot, 0), blocks)
            if held:
                found[slot] = found.get(slot, 0) + held
            if held == blocks:
                whole.append(slot)
        alive = whole
    return found
