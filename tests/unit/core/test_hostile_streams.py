"""Events and requests in any order, as no engine would send them: what is kept of a shared pool stays consistent."""

from __future__ import annotations

from collections import Counter

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from router.core.forecast import Pool
from router.core.index import PrefixIndex
from router.core.shared_allocation import SharedAllocation
from router.core.shared_pool import SharedPool
from router.core.usable import Geometry
from router.wire.block_keys import block_keys, namespace_seed
from router.wire.kv_events import AllBlocksCleared, BlockRemoved, BlockStored

#: A group's kind, and the tokens of its window. Blocks have one token each.
Group = tuple[str, int | None]
GROUPS = st.sampled_from(
    [("sliding_window", 1), ("sliding_window", 3), ("mamba", None), ("chunked_local_attention", None)]
)
FULL: Group = ("full_attention", None)
CHUNK_TOKENS = 3
TEXTS = st.tuples(st.sampled_from(["aaaa", "aabb"]), st.integers(1, 4)).map(lambda pair: pair[0][: pair[1]])
PLACES = st.integers(0, 3)


def name_of(text: str) -> int:
    return int.from_bytes(text.encode())


def keys_of(text: str) -> list[int]:
    return block_keys([*text.encode()], block_tokens=1, parent=namespace_seed("", ""))


class HostileMachine(RuleBasedStateMachine):
    """Blocks are stored twice, removed before they are named, cleared under running requests; requests begin, end and
    fail whenever they like.
    """

    @initialize(kinds=st.lists(GROUPS, min_size=1, max_size=2), blocks=st.integers(6, 24))
    def start(self, kinds: list[Group], blocks: int) -> None:
        self.kinds = [*kinds, FULL]
        self.index = PrefixIndex(block_tokens=1)
        self.failed: list[Exception] = []
        self.index.on_failed_forecast = lambda _slot, error: self.failed.append(error)
        geometry = Geometry(chunk_tokens=CHUNK_TOKENS)
        self.index.add_rank(0, domain="engine", geometry=geometry, pool=Pool(None, all_blocks=blocks))
        self.sent: list[tuple[str, SharedAllocation]] = []
        for group in reversed(range(len(self.kinds))):
            self.store("z", 0, group, [0])

    @property
    def pool(self) -> SharedPool:
        pool = self.index.pool(0)
        assert isinstance(pool, SharedPool)
        return pool

    @rule(text=TEXTS, start=PLACES, group=PLACES, kept=st.lists(PLACES, max_size=4, unique=True))
    def store(self, text: str, start: int, group: int, kept: list[int]) -> None:
        """Any blocks of a text for any group; full attention names them all."""
        group, start = group % len(self.kinds), start % len(text)
        kind, window = self.kinds[group]
        ends = [end for end in range(start + 1, len(text) + 1) if kind == FULL[0] or end - 1 in kept]
        parent = name_of(text[:start]) if start else None
        names = tuple(name_of(text[:end]) for end in ends)
        tokens = [*text.encode()][start:]
        self.index.apply(0, BlockStored(names, parent, tokens, 1, group=group, kind=kind, window_tokens=window))

    @rule(text=TEXTS, group=PLACES)
    def remove(self, text: str, group: int) -> None:
        self.index.apply(0, BlockRemoved((name_of(text),), group=group % len(self.kinds)))

    @rule(is_wanted=st.integers(0, 9).map(lambda draw: not draw))
    def clear(self, *, is_wanted: bool) -> None:
        if is_wanted:
            self.index.apply(0, AllBlocksCleared())

    @rule(text=TEXTS)
    def send(self, text: str) -> None:
        self.sent.append((text, self.pool.sent(keys_of(text), blocks=len(text) + 1)))

    @rule(text=TEXTS, kept=st.lists(PLACES, max_size=4, unique=True), gone=st.none() | TEXTS)
    def compute(self, text: str, kept: list[int], gone: str | None) -> None:
        """A prompt comes and is stored as an engine would, but that something may be removed in between."""
        self.send(text)
        for group in range(len(self.kinds)):
            if gone is not None and group + 1 == len(self.kinds):
                self.remove(gone, 0)
            self.store(text, 0, group, kept)

    @precondition(lambda self: self.sent)
    @rule(place=PLACES, generated=st.integers(0, 3))
    def begin(self, place: int, generated: int) -> None:
        _, allocation = self.sent[place % len(self.sent)]
        allocation.begun()
        allocation.grows(lambda: generated)

    @precondition(lambda self: self.sent)
    @rule(place=PLACES, answer=st.text("xy", max_size=3), is_forgotten=st.booleans())
    def end(self, place: int, answer: str, *, is_forgotten: bool) -> None:
        """Once it has ended its events may still come, until it is forgotten."""
        text, allocation = self.sent[place % len(self.sent)]
        allocation.ended(keys_of(text + answer))
        if is_forgotten:
            allocation.forget()
            self.sent.pop(place % len(self.sent))

    @rule(text=TEXTS)
    def look_up(self, text: str) -> None:
        """An answer changes nothing, nor does another prompt's."""
        found = self.index.reusable_tokens(keys_of(text), prompt_tokens=len(text) + 1)
        assert found.get(0, 0) <= len(text)
        self.index.reusable_tokens(keys_of("aabbx"), prompt_tokens=5)
        assert self.index.reusable_tokens(keys_of(text), prompt_tokens=len(text) + 1) == found

    @rule()
    def end_batch(self) -> None:
        """What is held is what the running requests hold, of which some has no name, or none any more."""
        self.index.end_batch(0)
        assert not self.failed
        pool, queue = self.pool, self.pool.queue
        held = [copy for each in pool.running for group in pool.groups for copy in each.tables[group]]
        pins = Counter(copy for copy in held if copy is not None)
        assert queue.pins == pins
        assert queue.nameless == held.count(None) + sum(copy not in queue.order for copy in pins)


TestHostileStreams = HostileMachine.TestCase
TestHostileStreams.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
