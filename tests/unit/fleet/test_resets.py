"""Caches emptied through the router: what the engine publishes late is expected."""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from router.core.types import Engine, RankId
from router.fleet.fleet import CLEAR_SECONDS, Fleet
from router.fleet.member import DEAF_EVENTS
from router.fleet.target import Target
from router.settings import RoutingSettings
from router.telemetry.metrics import Metrics
from router.wire.kv_events import AllBlocksCleared, BlockStored, Event, EventBatch


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
    world.fleet.expect_clear(world.slot)
    world.publish(stored(2))
    assert world.blocks == 0

    world.publish(stored(3), AllBlocksCleared(), stored(4))
    assert world.blocks == 1
    world.publish(stored(5))
    assert world.blocks == 2


def test_an_engine_that_was_quicker_than_its_answer_is_not_waited_for() -> None:
    """SGLang publishes at once: its clear may be here before the reset has returned."""
    world = World()
    world.publish(stored(1))
    world.publish(AllBlocksCleared())
    world.fleet.expect_clear(world.slot)
    world.publish(stored(2))

    assert world.blocks == 1


def test_an_engine_that_never_tells_is_believed_after_a_while() -> None:
    """Nothing that came meanwhile is lost."""
    world = World()
    world.publish(stored(1))
    world.fleet.expect_clear(world.slot)
    world.publish(stored(2))
    world.now = CLEAR_SECONDS
    world.publish(stored(3))

    assert world.blocks == 2


def test_a_stream_without_effect_is_reported() -> None:
    """Stores whose parents never come: an alarm of its own, until one can be applied."""
    world = World()
    for name in range(DEAF_EVENTS):
        world.publish(BlockStored((name,), 999, (name, name), 2))
    member = world.fleet.member(world.slot)
    assert member.is_deaf

    world.publish(stored(50))
    assert not member.is_deaf
