"""A worker that comes back with a cache of another kind: a running router knows what a fresh one would."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from prometheus_client import CollectorRegistry

from router.core.continuity import advance
from router.core.continuity_types import Apply, Clear, Continuity, Discarded, Event, Joined, Message
from router.core.groups import MOST_ODD
from router.core.types import Engine, RankId
from router.fleet.fleet import Fleet
from router.fleet.member import DEAF_EVENTS
from router.fleet.target import Target
from router.settings import RoutingSettings
from router.telemetry.metrics import Metrics
from router.wire.kv_events import AllBlocksCleared, BlockStored, EventBatch
from router.wire.kv_events import Event as CacheEvent

TOKENS = [(at * 7919 + 3) % 50_000 for at in range(640)]
FULL, WINDOW = "full_attention", "sliding_window"
#: Groups: kind, window and block in tokens, how many blocks of a prompt's end it keeps (None: all).
Layout = Sequence[tuple[str | None, int | None, int, int | None]]


class Router:
    """The control side of a router with one rank, whose events it gets in order, and cannot ask for again."""

    def __init__(self, *, block_tokens: int | None) -> None:
        self.fleet = Fleet(RoutingSettings(), Metrics(CollectorRegistry()), clock=lambda: 0.0)
        self.slot = self.fleet.add_rank(
            RankId("w", 0),
            target=Target(host="", port=0, rank=0, dp_size=1, engine=Engine.VLLM),
            models=frozenset({"m"}),
            block_tokens=block_tokens,
            pool_tokens=None,
        )
        self.state = Continuity(has_replay=False, has_snapshot=False)

    def feed(self, event: Event) -> None:
        self.state, actions = advance(self.state, event)
        for action in actions:
            match action:
                case Apply(batch):
                    if not self.fleet.apply(self.slot, batch, now=0.0):
                        self.feed(Discarded())
                case Clear(cause):
                    self.fleet.clear(self.slot, cause)

    def known(self) -> int:
        return self.fleet.promised_tokens(self.slot, TOKENS)


def stored(layout: Layout, *, process: int) -> tuple[BlockStored, ...]:
    told = []
    for group, (kind, window, block, kept) in enumerate(layout):
        ends = range(block, len(TOKENS) + 1, block)
        names = tuple(hash((process, block, *TOKENS[:end])) & (1 << 64) - 1 for end in ends)
        tokens = TOKENS[: len(names) * block]
        told.append(
            BlockStored(names[-(kept or 0) :], None, tokens, block, group=group, kind=kind, window_tokens=window)
        )
    return tuple(told)


@pytest.mark.parametrize("is_seen_by", ["its numbers", "its connection"])
@pytest.mark.parametrize(
    ("before", "after", "tokens"),
    [
        ([(FULL, None, 16, None)], [(FULL, None, 64, None)], 576),
        ([(FULL, None, 64, None)], [(FULL, None, 16, None)], 624),
        ([(FULL, None, 64, None)], [(FULL, None, 32, None)], 608),
        ([(WINDOW, 64, 16, None), (FULL, None, 16, None)], [(FULL, None, 16, None)], 624),
        ([(FULL, None, 16, None)], [(WINDOW, 64, 16, None), (FULL, None, 16, None)], 624),
        ([(FULL, None, 16, None), (WINDOW, 64, 16, None)], [(FULL, None, 16, None)], 624),
        ([(FULL, None, 16, None), (WINDOW, 64, 16, 5)], [(FULL, None, 16, None), (WINDOW, 512, 16, 5)], 0),
        ([(FULL, None, 16, None), (WINDOW, 512, 16, 5)], [(FULL, None, 16, None), (WINDOW, 64, 16, 5)], 624),
        ([(FULL, None, 16, None), (WINDOW, 64, 16, 5)], [(WINDOW, 64, 16, 5), (FULL, None, 16, None)], 624),
        ([(None, None, 16, None)], [(WINDOW, 64, 16, 5), (FULL, None, 16, None)], 624),
    ],
)
def test_a_process_with_another_layout_is_judged_by_it(
    before: Layout, after: Layout, tokens: int, is_seen_by: str
) -> None:
    """Blocks, groups, windows: what the worker says from now on holds, without its being registered anew."""
    router, fresh = Router(block_tokens=before[0][2]), Router(block_tokens=None)
    router.feed(Message(0, EventBatch(1.0, stored(before, process=1))))
    if is_seen_by == "its connection":
        router.feed(Joined())
    for each in (router, fresh):
        each.feed(Message(0, EventBatch(100.0, stored(after, process=2))))
    assert router.known() == fresh.known() == tokens


def test_a_restart_that_nobody_saw_costs_the_picture_only() -> None:
    """The numbers go on, the connection, too: a group that is another than it was is noticed, and all is asked anew."""
    router = Router(block_tokens=16)
    router.feed(Message(0, EventBatch(1.0, stored([(FULL, None, 16, None), (WINDOW, 64, 16, 5)], process=1))))
    assert router.known() == 624
    new = stored([(FULL, None, 16, None), (WINDOW, 512, 16, 5)], process=2)
    assert not router.fleet.apply(router.slot, EventBatch(2.0, new), now=0.0)
    router.fleet.clear(router.slot, "layout")
    assert router.fleet.apply(router.slot, EventBatch(2.0, new), now=0.0)
    assert router.known() == 0


def test_a_stream_that_was_understood_once_can_turn_deaf() -> None:
    """Since the picture was last thrown away not one block could be entered: that alone counts."""
    router = Router(block_tokens=16)
    router.feed(Message(0, EventBatch(1.0, stored([(FULL, None, 16, None)], process=1))))
    member = router.fleet.member(router.slot)
    router.feed(Joined())
    orphan = BlockStored((5,), 4, TOKENS[:16], 16, kind=FULL)
    for number in range(DEAF_EVENTS):
        assert not member.is_deaf
        router.feed(Message(number, EventBatch(2.0 + number, (orphan,))))
    assert member.is_deaf
    router.feed(Message(DEAF_EVENTS, EventBatch(100.0, stored([(FULL, None, 16, None)], process=2))))
    assert not member.is_deaf


def odd(tokens: int, *, at: int = 0) -> BlockStored:
    return BlockStored((9_000 + at,), None, [7 + at] * tokens, tokens, kind=FULL)


class Told(Router):
    """A router whose rank has told of the whole prompt in blocks of 16."""

    def __init__(self) -> None:
        super().__init__(block_tokens=16)
        self.number = 0
        self.tell(*stored([(FULL, None, 16, None)], process=1))

    def tell(self, *events: CacheEvent) -> None:
        self.feed(Message(self.number, EventBatch(1.0 + self.number, events)))
        self.number += 1

    @property
    def blocks(self) -> int:
        return self.fleet.member(self.slot).blocks


@pytest.mark.parametrize("tokens", [15, 17, 32, 48])
def test_one_event_of_another_block_size_changes_nothing(tokens: int) -> None:
    """What was known stays known, and what comes after it is entered."""
    router = Told()
    blocks = router.blocks
    router.tell(odd(tokens))
    assert router.known() == 624

    router.tell(BlockStored((1, 2), None, [5] * 32, 16, kind=FULL))
    assert (router.known(), router.blocks) == (624, blocks + 2)


@pytest.mark.parametrize("tokens", [15, 17, 32])
def test_many_events_of_another_block_size_are_what_the_rank_uses_now(tokens: int) -> None:
    """A process that has restarted unseen. Every so often one of the old size in between is no more than odd, too."""
    router = Told()
    for at in range(2 * MOST_ODD):
        router.tell(odd(tokens, at=at))
    taken = router.blocks
    assert router.known() == 0
    assert taken >= MOST_ODD - 1
    router.tell(BlockStored((1, 2), None, [5] * 32, 16, kind=FULL))
    router.tell(odd(tokens, at=500))
    assert router.blocks == taken + 1


@pytest.mark.parametrize("tokens", [17, 32])
def test_a_rank_that_began_with_an_odd_event_is_known_by_what_follows(tokens: int) -> None:
    """Its first event is no better than any other."""
    router = Router(block_tokens=16)
    router.feed(Message(0, EventBatch(1.0, (BlockStored((1, 2), None, [7] * 2 * tokens, tokens, kind=FULL),))))
    for number in range(1, MOST_ODD + 2):
        router.feed(Message(number, EventBatch(1.0 + number, stored([(FULL, None, 16, None)], process=1))))
    assert router.known() == 624


@pytest.mark.parametrize("tokens", [17, 32])
def test_a_clear_begins_anew_after_an_odd_event(tokens: int) -> None:
    """An empty cache has blocks of whatever size it says."""
    router = Told()
    router.tell(odd(tokens), AllBlocksCleared())
    assert router.known() == 0
    names, ids = range(1, 640 // tokens + 1), TOKENS[: 640 // tokens * tokens]
    router.tell(BlockStored(tuple(names), None, ids, tokens, kind=FULL))
    assert router.known() == len(ids) - (tokens if len(ids) == len(TOKENS) else 0)
