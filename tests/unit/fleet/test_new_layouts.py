"""A worker that comes back with a cache of another kind: a running router knows what a fresh one would."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from prometheus_client import CollectorRegistry

from router.core.continuity import advance
from router.core.continuity_types import Apply, Clear, Continuity, Discarded, Event, Joined, Message
from router.core.types import Engine, RankId
from router.fleet.fleet import Fleet
from router.fleet.member import DEAF_EVENTS
from router.fleet.target import Target
from router.settings import RoutingSettings
from router.telemetry.metrics import Metrics
from router.wire.kv_events import BlockStored, EventBatch

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
