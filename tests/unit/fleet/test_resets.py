"""Caches emptied through the router: what the engine publishes late is expected."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry

from router.core.index import PrefixIndex
from router.core.types import Engine, RankId
from router.fleet.fleet import CLEAR_SECONDS, Fleet
from router.fleet.member import DEAF_EVENTS
from router.fleet.target import Target
from router.settings import RoutingSettings
from router.telemetry.metrics import Metrics
from router.wire.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, Event, EventBatch, Snapshot


class World:
    """A fleet of one rank in blocks of two tokens, at a time that the test sets."""

    def __init__(self) -> None:
        self.now = 0.0
        self.fleet = Fleet(RoutingSettings(), Metrics(CollectorRegistry()), clock=lambda: self.now)
        target = Target(host="", port=0, rank=0, dp_size=1, engine=Engine.VLLM)
        self.slot = self.fleet.add_rank(
            RankId("w", 0), target=target, models=frozenset({"m"}), block_tokens=2, pool_tokens=None
        )

    def publish(self, *events: Event) -> None:
        self.fleet.apply(self.slot, EventBatch(0.0, events), now=self.now)

    @property
    def blocks(self) -> int:
        return self.fleet.ranks()[0].resident_blocks


def stored(name: int) -> BlockStored:
    return BlockStored((name,), None, (name, name), 2)


def test_what_arrives_before_the_engines_own_clear_is_older_than_the_reset() -> None:
    """vLLM publishes the clear with its next step, behind stores that were under way."""
    world = World()
    world.publish(stored(1))
    world.fleet.expect_clear(world.slot, since=world.now)
    world.publish(stored(2))
    assert world.blocks == 0

    world.publish(stored(3), AllBlocksCleared(), stored(4))
    assert world.blocks == 1
    world.publish(stored(5))
    assert world.blocks == 2


def test_an_engine_that_was_quicker_than_its_answer_is_not_waited_for() -> None:
    """SGLang publishes at once: its clear may be here before the reset has returned, and what it stores behind it."""
    world = World()
    world.publish(stored(1))
    world.now = 1.0
    world.publish(AllBlocksCleared(), stored(2))
    world.now = 1.5
    world.fleet.expect_clear(world.slot, since=0.5)
    assert world.blocks == 1
    world.publish(stored(3))
    assert world.blocks == 2


def test_a_clear_from_before_the_reset_is_not_its_own() -> None:
    """Nor is a rank that nothing is known of known to be empty."""
    world = World()
    world.publish(AllBlocksCleared(), stored(1))
    world.now = 1.0
    world.fleet.expect_clear(world.slot, since=0.5)
    world.publish(stored(2))
    assert world.blocks == 0
    world.publish(AllBlocksCleared(), stored(3))
    assert world.blocks == 1


def test_an_engine_that_never_tells_is_believed_after_a_while() -> None:
    """Nothing that came meanwhile is lost."""
    world = World()
    world.publish(stored(1))
    world.fleet.expect_clear(world.slot, since=world.now)
    world.publish(stored(2))
    world.now = CLEAR_SECONDS
    world.publish(stored(3))

    assert world.blocks == 2


def test_a_snapshot_has_what_came_before_it() -> None:
    """What was held back is in it, and counts once: a removal leaves no copy behind."""
    world = World()
    world.publish(stored(1))
    world.fleet.expect_clear(world.slot, since=world.now)
    world.publish(stored(2))
    snapshot = Snapshot(7, EventBatch(0.0, (stored(2), stored(3))))
    world.fleet.load_snapshot(world.slot, snapshot, now=world.now)
    world.now = CLEAR_SECONDS
    world.publish(BlockRemoved((2,)))

    assert world.blocks == 1


def test_nor_need_an_idle_engine_say_more() -> None:
    """What it stored last counts for whoever asks once the time is over."""
    world = World()
    world.publish(stored(1))
    world.fleet.expect_clear(world.slot, since=world.now)
    world.publish(stored(2))
    world.now = CLEAR_SECONDS
    assert world.fleet.promised_tokens(world.slot, (2, 2, 9)) == 0
    (index,) = world.fleet.indexes("m")

    assert index.blocks(world.slot) == 1
    assert world.fleet.promised_tokens(world.slot, (2, 2, 9)) == 2


@pytest.mark.parametrize("fails", [False, True])
def test_a_decision_that_finds_the_picture_lost_goes_on(fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was held back has blocks of another size, or the index fails at it: with its next event the rank is asked
    for all of it, once.
    """
    world = World()
    world.publish(stored(1))
    world.fleet.expect_clear(world.slot, since=world.now)
    world.publish(stored(2))
    world.publish(BlockStored((9,), None, (5,), 1))
    world.now = CLEAR_SECONDS
    with monkeypatch.context() as patched:
        if fails:
            patched.setattr(PrefixIndex, "apply", lambda _index, slot, _event: {}[slot])
        (index,) = world.fleet.indexes("m")
    assert index.blocks(world.slot) == 0

    assert not world.fleet.apply(world.slot, EventBatch(0.0, (stored(3),)), now=world.now)
    assert world.fleet.apply(world.slot, EventBatch(0.0, (stored(4),)), now=world.now)


def test_a_stream_without_effect_is_reported() -> None:
    """Stores whose parents never come: an alarm of its own, until one can be applied."""
    world = World()
    for name in range(DEAF_EVENTS):
        world.publish(BlockStored((name,), 999, (name, name), 2))
    member = world.fleet.member(world.slot)
    assert member.is_deaf

    world.publish(stored(50))
    assert not member.is_deaf


def test_a_stream_can_lose_its_effect_at_any_time() -> None:
    """Whatever was entered before: what counts is that nothing is any more."""
    world = World()
    world.publish(stored(1), stored(2))
    for name in range(DEAF_EVENTS):
        assert not world.fleet.member(world.slot).is_deaf
        world.publish(BlockStored((100 + name,), 999, (name, name), 2))
    assert world.fleet.member(world.slot).is_deaf


def test_copies_below_the_device_and_elsewhere_say_nothing_of_that() -> None:
    """An offloading connector may tell of many that are known already."""
    world = World()
    world.publish(stored(1))
    for name in range(DEAF_EVENTS):
        world.publish(
            BlockStored((100 + name,), 999, (name, name), 2, medium="CPU"),
            BlockStored((100 + name,), 999, (name, name), 2, locality="REMOTE"),
        )
    assert not world.fleet.member(world.slot).is_deaf
