"""The forecast against an engine that keeps a radix tree as SGLang does, node by node, and tells of it late.

Pages are single letters; a node is named by the word up to its end.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import count

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from router.core.forecast import Allocation
from router.core.radix_pool import RadixPool

#: Conversations that share heads; prompts and answers are pieces of them.
CONVERSATIONS = ("aaaaaaaa", "aaabbbbb", "aaabbccc", "ddddd", "ddeee", "fff", "ggggggg")
PROMPTS = st.tuples(st.sampled_from(CONVERSATIONS), st.integers(1, 6))


@dataclass(eq=False)
class Node:
    """The pages of ``word`` behind those of its parent."""

    word: str
    parent: Node | None
    used: tuple[int, int] = (0, 0)
    locks: int = 0
    children: dict[str, Node] = field(default_factory=dict)

    @property
    def pages(self) -> int:
        return len(self.word) - len(self.parent.word) if self.parent is not None else 0


class Tree:
    """``UnifiedTreeCore`` with nothing but full attention."""

    def __init__(self) -> None:
        self.root = Node("", None)
        self.ticks = count(1)
        self.events: list[tuple[str, str, str]] = []  # what happened, the node's word, its parent's

    def nodes(self) -> list[Node]:
        found, todo = [], list(self.root.children.values())
        while todo:
            node = todo.pop()
            found.append(node)
            todo += node.children.values()
        return found

    def held(self) -> int:
        return sum(node.pages for node in self.nodes())

    def match(self, word: str) -> Node:
        """The node where the word's known part ends, cut if need be; it and all before it are used."""
        node = self.root
        while (child := node.children.get(word[len(node.word) : len(node.word) + 1])) is not None:
            common = sum(child.word.startswith(word[:end]) for end in range(1, min(len(child.word), len(word)) + 1))
            node = child if common == len(child.word) else self.cut(child, common)
            if node is not child:
                break
        tick, used = next(self.ticks), node
        while used.parent is not None:
            used.used = (tick, len(used.word))
            used = used.parent
        return node

    def cut(self, child: Node, at: int) -> Node:
        """The rest counts as used, too."""
        assert child.parent is not None
        head = Node(child.word[:at], child.parent, child.used, child.locks, {child.word[at]: child})
        child.parent.children[child.word[len(child.parent.word)]] = head
        child.parent, child.used = head, (next(self.ticks), 0)
        return head

    def insert(self, word: str) -> Node:
        node = self.match(word)
        if len(node.word) < len(word):
            leaf = Node(word, node, (next(self.ticks), 0))
            node.children[word[len(node.word)]] = leaf
            self.events.append(("stored", word, node.word))
            return leaf
        return node

    def lock(self, node: Node | None, by: int) -> None:
        while node is not None:
            node.locks += by
            node = node.parent

    def evict_one(self) -> bool:
        leaves = [node for node in self.nodes() if not node.children and not node.locks]
        if not leaves:
            return False
        leaf = min(leaves, key=lambda node: node.used)
        assert leaf.parent is not None
        del leaf.parent.children[leaf.word[len(leaf.parent.word)]]
        self.events.append(("removed", leaf.word, leaf.parent.word))
        return True


@dataclass(eq=False)
class Request:
    word: str  # of the conversation: its prompt and what may be answered
    prompt: str
    allocation: Allocation
    node: Node
    own: int = 0  # pages outside the tree


class RadixPoolMachine(RuleBasedStateMachine):
    """Prompts come, alone or several at once; batches are computed; answers end. Events come with a batch alone."""

    @initialize(pages=st.integers(8, 28))
    def start(self, pages: int) -> None:
        self.pages = pages
        self.tree = Tree()
        self.pool = RadixPool(pages, page_tokens=16)
        self.heard: set[str] = set()
        self.promised: list[str] = []  # answers that have ended
        self.waiting: list[Request] = []
        self.launched: list[Request] = []
        self.running: list[Request] = []
        self.is_stuck = False  # something does not fit: who waits for whom nobody knows
        self.may_end = True

    def room(self, pages: int) -> None:
        def free() -> int:
            return self.pages - self.tree.held() - sum(each.own for each in (*self.launched, *self.running))

        while free() < pages:
            if not self.tree.evict_one():
                self.is_stuck = True
                return

    def launch(self, batch: list[Request]) -> None:
        for each in batch:
            each.node = self.tree.match(each.prompt)
            self.tree.lock(each.node, 1)
        needs = [len(each.prompt) + 1 - len(each.node.word) for each in batch]
        self.room(sum(needs) + len(batch))
        for each, need in zip(batch, needs, strict=True):
            each.own = need

    @rule(prompts=st.lists(PROMPTS, min_size=1, max_size=3))
    def send(self, prompts: list[tuple[str, int]]) -> None:
        if self.is_stuck:
            return
        is_idle = not (self.running or self.launched or self.waiting)
        for word, length in prompts:
            prompt = word[:length]
            allocation = self.pool.sent(keys_of(prompt), blocks=len(prompt) + 1)
            self.waiting.append(Request(word, prompt, allocation, self.tree.root))
        if is_idle:
            self.schedule(self.waiting[:1])

    def schedule(self, batch: list[Request]) -> None:
        self.launch(batch)
        self.waiting = self.waiting[len(batch) :]
        self.launched = batch

    @precondition(lambda self: not self.is_stuck and (self.launched or self.waiting))
    @rule()
    def compute(self) -> None:
        """Those that wait are scheduled before what is computed by then enters the tree."""
        if not self.launched:
            self.schedule(list(self.waiting))
        batch, following = self.launched, list(self.waiting)
        self.launch(following)
        for each in batch:
            known = each.node
            each.node = self.tree.insert(each.prompt)
            self.tree.lock(each.node, 1)
            self.tree.lock(known, -1)
            each.own = 1
        self.launched, self.waiting = following, []
        self.running += batch
        self.deliver()
        for each in batch:
            self.pool.begun(each.allocation)
        self.may_end = True

    def deliver(self) -> None:
        for what, word, parent in self.tree.events:
            prefixes = [word[:end] for end in range(len(parent) + 1, len(word) + 1)]
            keys = [key_of(prefix) for prefix in prefixes]
            if what == "stored":
                self.heard.update(prefixes)
                self.pool.stored(key_of(parent) if parent else None, keys)
            else:
                copies = len(self.heard)
                self.heard.difference_update(prefixes)
                self.pool.removed(keys, copies=copies)
        self.tree.events.clear()
        self.promised.clear()

    @precondition(lambda self: not self.is_stuck and self.running and self.may_end and not self.launched)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        """Answers end together. What has waited is scheduled with the next token."""
        many = data.draw(st.integers(1, len(self.running)))
        over, self.running = self.running[:many], self.running[many:]
        answers = [each.word[: len(each.prompt) + data.draw(st.integers(0, 2))] for each in over]
        decoding = many + len(self.running)
        self.running += over
        for each, answer in zip(over, answers, strict=True):
            each.own += len(answer) - len(each.prompt)
        self.room(decoding)
        self.running = [each for each in self.running if each not in over]
        for each, answer in zip(over, answers, strict=True):
            self.tree.insert(answer)
            self.tree.lock(each.node, -1)
            self.promised.append(answer)
            self.pool.ended(each.allocation, keys_of(answer))
        self.may_end = False
        if not self.pool.pending:  # with nothing unheard of, nothing is foretold
            self.deliver()
        if self.waiting:
            self.schedule(list(self.waiting))

    @invariant()
    def found(self) -> None:
        """What is foretold of any conversation is what the engine would find now."""
        if self.is_stuck:
            return
        for word in CONVERSATIONS:
            known = self.heard.union(*({answer[:end] for end in range(1, len(answer) + 1)} for answer in self.promised))
            depth = next((end for end in range(len(word)) if word[: end + 1] not in known), len(word))
            there = {node.word[:end] for node in self.tree.nodes() for end in range(1, len(node.word) + 1)}
            truth = next((end for end in range(len(word)) if word[: end + 1] not in there), len(word))
            assert self.pool.kept(keys_of(word), depth, copies=len(self.heard)) == truth, word


def key_of(prefix: str) -> int:
    return int.from_bytes(prefix.encode(), "big")


def keys_of(word: str) -> list[int]:
    return [key_of(word[: end + 1]) for end in range(len(word))]


TestRadixPool = RadixPoolMachine.TestCase
TestRadixPool.settings = settings(max_examples=50, stateful_step_count=25, deadline=None)
