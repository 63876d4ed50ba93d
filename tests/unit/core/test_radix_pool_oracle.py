"""The forecast against an engine that keeps a radix tree as SGLang does, node by node, and tells of it late.

Pages are single letters; a node is named by the word up to its end.
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass, field
from itertools import count

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from router.core.forecast import Allocation
from router.core.radix_pool import RadixPool
from router.core.radix_requests import Want

#: Tokens of a page; prompts end in the middle of one.
PAGE = 16
HALF = 8

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

    def depth(self, word: str) -> int:
        """How many of a word's pages are there."""
        words = [node.word for node in self.nodes()]
        return next(
            end for end in range(len(word), -1, -1) if not end or any(each.startswith(word[:end]) for each in words)
        )

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
    """``word`` is the conversation: its prompt and what may be answered. ``own`` are pages outside the tree, ``found``
    what it found as it was scheduled.
    """

    number: int
    word: str
    prompt: str
    want: Want
    node: Node
    own: int = 0
    found: int | None = None
    was_refused: bool = False
    generated: int = 0

    @property
    def left(self) -> int:
        return self.want.most_tokens - self.generated


class Engine:
    """``Scheduler`` and ``PrefillAdder`` above the tree, with pages for the tokens of prompts and answers."""

    def __init__(self, pages: int) -> None:
        self.pages = pages
        self.tree = Tree()
        self.waiting: list[Request] = []
        self.launched: list[Request] = []
        self.running: list[Request] = []
        self.is_full = False

    def rows(self) -> list[Request]:
        return [*self.launched, *self.running]

    def make_room(self, pages: int) -> None:
        while self.pages - self.tree.held() - sum(each.own for each in self.rows()) < pages:
            if not self.tree.evict_one():
                return

    def schedule(self) -> list[Request]:
        """Those that wait are let in until one does not fit; then nobody is until an answer ends."""
        batch: list[Request] = []
        reserved = 0
        while self.waiting and not self.is_full:
            each = self.waiting[0]
            node = self.tree.match(each.prompt)
            lacking = each.want.prompt_tokens - PAGE * len(node.word)
            self.tree.lock(node, 1)
            locked = sum(other.pages for other in self.tree.nodes() if other.locks)
            free = PAGE * (self.pages - locked - sum(other.own for other in self.rows()))
            taken = reserved + sum(other.left for other in self.rows())
            if lacking + each.want.most_tokens + PAGE >= free - taken:
                self.tree.lock(node, -1)
                each.was_refused = True
                self.is_full = bool(batch or self.rows())
                break
            each.node, each.found = node, len(node.word)
            reserved += PAGE * -(-lacking // PAGE) + PAGE + each.want.most_tokens
            batch.append(self.waiting.pop(0))
        needs = [len(each.prompt) + 1 - len(each.node.word) for each in batch]
        self.make_room(sum(needs) + len(batch))
        for each, need in zip(batch, needs, strict=True):
            each.own = need
        return batch

    def compute(self) -> list[Request]:
        """What is computed by then enters the tree once the next batch, or the next token of all, has its pages.
        Returns what that was.
        """
        if not self.launched:
            self.launched = self.schedule()
        batch = self.launched
        following = self.schedule()
        if not following:
            self.make_room(len(self.rows()))
        self.insert(batch)
        self.launched = following
        return batch

    def insert(self, batch: list[Request]) -> None:
        for each in batch:
            known = each.node
            each.node = self.tree.insert(each.prompt)
            self.tree.lock(each.node, 1)
            self.tree.lock(known, -1)
            each.own = 1
        self.running += batch

    def end(self, over: list[Request], answers: list[str]) -> None:
        """Answers end together. What has waited is scheduled with the next token."""
        for each, answer in zip(over, answers, strict=True):
            each.own += len(answer) - len(each.prompt)
        self.make_room(len(self.running))
        self.running = [each for each in self.running if each not in over]
        for each, answer in zip(over, answers, strict=True):
            self.tree.insert(answer)
            self.tree.lock(each.node, -1)
        self.is_full = False

    def would_find(self, word: str) -> int | None:
        """What a prompt that comes now finds as it is let in. None: it waits for longer than anybody looks ahead."""
        future = deepcopy(self)
        last = Request(-1, word, word, Want(PAGE * len(word) + HALF), future.tree.root)
        future.waiting.append(last)
        following = future.schedule()
        for _ in range(4):
            if last.found is not None:
                return last.found
            future.launched += following
            while future.launched:
                batch, future.launched = future.launched, []
                future.insert(batch)
            if not future.running:
                return None
            tokens = min(each.left for each in future.running)
            over = [each for each in future.running if each.left == tokens]
            for each in future.running:
                each.generated += tokens
                whole = each.want.most_tokens // PAGE if each in over else 0  # added as they end
                each.own = -(-(HALF + each.generated) // PAGE) - whole
            answers = [each.prompt + chr(0x100 + each.number) * (each.want.most_tokens // PAGE) for each in over]
            future.end(over, answers)
            following = future.schedule()
        return last.found


class RadixPoolMachine(RuleBasedStateMachine):
    """Prompts come, alone or several at once; batches are computed; answers end. Events come with a batch alone, before
    or after the answers' ends are seen, which may be in another order. An answer that leaves nothing new ends by
    itself: of several that end at once nothing would tell when it did.
    """

    @initialize(pages=st.integers(12, 28))
    def start(self, pages: int) -> None:
        self.engine = Engine(pages)
        self.pool = RadixPool(pages, page_tokens=PAGE)
        self.numbers = count()
        self.heard: set[str] = set()
        self.promised: list[str] = []  # answers that have ended
        self.allocations: dict[int, Allocation] = {}
        self.may_end = True

    @rule(prompts=st.lists(st.tuples(PROMPTS, st.integers(0, 2)), min_size=1, max_size=3))
    def send(self, prompts: list[tuple[tuple[str, int], int]]) -> None:
        engine = self.engine
        is_idle = not engine.rows() and not engine.waiting
        for (word, length), pages in prompts:
            prompt = word[:length]
            want = Want(PAGE * len(prompt) + HALF, PAGE * pages + 1, PAGE * pages + 1, is_whole=True)
            number = next(self.numbers)
            self.allocations[number] = self.pool.sent(keys_of(prompt), blocks=len(prompt) + 1, want=want)
            engine.waiting.append(Request(number, word, prompt, want, engine.tree.root))
        if is_idle:
            behind, engine.waiting = engine.waiting[1:], engine.waiting[:1]
            engine.launched = engine.schedule()
            engine.waiting += behind

    @precondition(lambda self: self.engine.launched or (self.engine.waiting and not self.engine.is_full))
    @rule()
    def compute(self) -> None:
        batch = self.engine.compute()
        self.deliver()
        for each in batch:
            self.pool.begun(self.allocations[each.number])
        self.may_end = True

    def deliver(self) -> None:
        for what, word, parent in self.engine.tree.events:
            prefixes = [word[:end] for end in range(len(parent) + 1, len(word) + 1)]
            keys = [key_of(prefix) for prefix in prefixes]
            if what == "stored":
                self.heard.update(prefixes)
                self.pool.stored(key_of(parent) if parent else None, keys)
            else:
                copies = len(self.heard)
                self.heard.difference_update(prefixes)
                self.pool.removed(keys, copies=copies)
        self.engine.tree.events.clear()
        self.promised.clear()

    @precondition(lambda self: self.engine.running and self.may_end and not self.engine.launched)
    @rule(data=st.data(), is_told_before=st.booleans())
    def end(self, data: st.DataObject, is_told_before: bool) -> None:
        running = self.engine.running
        over = running[: data.draw(st.integers(1, len(running)))]
        pages = [data.draw(st.integers(0, each.want.most_tokens // PAGE)) for each in over]
        self.end_with(pages, is_told_before=is_told_before)

    def end_with(self, pages: list[int], *, is_told_before: bool) -> None:
        """The first answers end, with so many pages each."""
        over = self.engine.running[: len(pages)]
        answers = [each.word[: len(each.prompt) + count] for each, count in zip(over, pages, strict=True)]
        words = {node.word for node in self.engine.tree.nodes()}
        if any(any(word.startswith(answer) for word in words) for answer in answers):  # nothing will tell of its end
            over, answers = over[:1], answers[:1]
        self.engine.end(over, answers)
        if is_told_before:  # as on a rank that falls idle
            self.deliver()
        seen = list(zip(over, answers, strict=True))
        if is_told_before:
            seen.reverse()
        for each, answer in seen:
            if not is_told_before:
                self.promised.append(answer)
            self.pool.ended(self.allocations.pop(each.number), keys_of(answer))
        self.may_end = False
        if not self.pool.pending:  # with nothing unheard of, nothing is due
            self.deliver()
        self.engine.launched = self.engine.schedule()
        if not self.engine.launched:  # the next token of all that are left has its pages
            self.engine.make_room(len(self.engine.running))

    @invariant()
    def found(self) -> None:
        """What is foretold of any conversation is what the engine would find as it lets it in, of what is there now.
        Whom it has refused before nobody has told: until one is computed that was, nothing is compared. Nor is while a
        batch computes what has come into the tree since it was looked up: its taking pages twice is not foretold.
        """
        engine = self.engine
        if any(each.was_refused for each in (*engine.waiting, *engine.launched)):
            return
        if any(each.found != engine.tree.depth(each.prompt) for each in engine.launched):
            return
        for word in CONVERSATIONS:
            known = self.heard.union(*({answer[:end] for end in range(1, len(answer) + 1)} for answer in self.promised))
            depth = next((end for end in range(len(word)) if word[: end + 1] not in known), len(word))
            truth = self.engine.would_find(word)
            want = Want(PAGE * len(word) + HALF)
            foretold = self.pool.kept(keys_of(word), depth, copies=len(self.heard), want=want)
            assert truth is None or min(foretold, depth) == min(truth, depth), word


def key_of(prefix: str) -> int:
    return int.from_bytes(prefix.encode(), "big")


def keys_of(word: str) -> list[int]:
    return [key_of(word[: end + 1]) for end in range(len(word))]


TestRadixPool = RadixPoolMachine.TestCase
TestRadixPool.settings = settings(max_examples=60, stateful_step_count=12, deadline=None)
