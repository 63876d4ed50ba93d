"""The fleet's own rules: slots, views, gauges, and whose cache picture is whose."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from prometheus_client import CollectorRegistry

from router.core.types import Engine, RankId, RankStatus, SessionKey
from router.fleet.fleet import Fleet
from router.fleet.target import Target
from router.settings import RoutingSettings
from router.telemetry.metrics import Metrics
from router.wire.block_keys import block_keys, namespace_seed
from router.wire.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, EventBatch, Snapshot

TOKENS = list(range(64))
RANK_GAUGES = (
    "rank_up",
    "rank_inflight_requests",
    "rank_waiting_tokens",
    "rank_prefill_tokens_per_second",
    "rank_trust_ratio",
    "index_blocks",
    "index_orphan_blocks",
)


class World:
    """A fleet and its clock."""

    def __init__(self) -> None:
        self.now = 100.0
        self.metrics = Metrics(CollectorRegistry())
        self.fleet = Fleet(RoutingSettings(), self.metrics, clock=lambda: self.now)

    def add(self, worker: str, *, rank: int = 0, models: Sequence[str] = ("m",), block_tokens: int | None = 16) -> int:
        return self.fleet.add_rank(
            RankId(worker, rank),
            target=Target("127.0.0.1", 1, rank, 1, Engine.SHIM),
            models=frozenset(models),
            block_tokens=block_tokens,
            pool_tokens=None,
        )

    def publish(self, slot: int, *events: BlockStored | BlockRemoved | AllBlocksCleared) -> None:
        self.fleet.apply(slot, EventBatch(self.now, events), now=self.now)

    def reusable(self, model: str = "m") -> dict[int, int]:
        """What each rank holds of TOKENS and one token more, over all indexes of a model."""
        found: dict[int, int] = {}
        for index in self.fleet.indexes(model):
            keys = block_keys(TOKENS, block_tokens=index.block_tokens, parent=namespace_seed("", ""))
            found |= index.reusable_tokens(keys, prompt_tokens=len(TOKENS) + 1)
        return found

    def sample(self, name: str, worker: str = "a", **labels: str) -> float | None:
        return self.metrics.registry.get_sample_value(f"homing_{name}", {"worker": worker, "rank": "0", **labels})


def stored(blocks: int, *, block_tokens: int = 16) -> BlockStored:
    """The first blocks of TOKENS became resident."""
    return BlockStored(tuple(range(1, blocks + 1)), None, tuple(TOKENS[: blocks * block_tokens]), block_tokens)


def test_a_new_rank_gets_the_lowest_free_slot() -> None:
    """Slots are dense: one that was left is given again first."""
    world = World()
    assert [world.add(name) for name in "abcd"] == [0, 1, 2, 3]
    world.fleet.remove_rank(1)
    world.fleet.remove_rank(2)

    assert [world.add(name) for name in "efg"] == [1, 2, 4]
    assert [str(member.id) for member in world.fleet.members()] == ["a/0", "e/0", "f/0", "d/0", "g/0"]
    with pytest.raises(KeyError):
        world.fleet.member(5)


def test_views_are_replaced_and_never_changed() -> None:
    """A decision that began with a view keeps it; each change of membership or status is a new version."""
    world = World()
    world.add("a")
    before = world.fleet.view
    world.fleet.set_status(0, RankStatus.READY)
    after = world.fleet.view
    world.fleet.set_status(0, RankStatus.READY)

    assert [rank.status for rank in (*before.ranks, *after.ranks)] == [RankStatus.PENDING, RankStatus.READY]
    assert (world.fleet.view is after, after.version) == (True, before.version + 1)
    world.fleet.remove_rank(0)
    assert world.fleet.view.ranks == ()


def test_views_hold_live_cells() -> None:
    """Load and residency are read at the moment of the decision, without a new view."""
    world = World()
    slot = world.add("a")
    (rank,) = world.fleet.view.ranks
    world.fleet.loads.open(slot, prompt_tokens=10, prefill_tokens=10, seconds=1.0, now=world.now)
    world.publish(slot, stored(3))

    assert (rank.load.inflight, rank.resident_tokens()) == (1, 48)


def test_a_ranks_gauges_come_and_go_with_it() -> None:
    """No series is left behind by a worker that has left."""
    world = World()
    slot = world.add("a")
    assert world.sample("rank_up") == 0
    assert world.sample("rank_prefill_tokens_per_second") == pytest.approx(20_000)
    for status, up in ((RankStatus.READY, 1), (RankStatus.DRAINING, 1), (RankStatus.DOWN, 0)):
        world.fleet.set_status(slot, status)
        assert world.sample("rank_up") == up
    world.publish(slot, stored(3))
    assert world.sample("index_blocks") == 3
    assert all(world.sample(name) is not None for name in RANK_GAUGES)

    world.fleet.remove_rank(slot)
    assert [name for name in RANK_GAUGES if world.sample(name) is not None] == []
    world.add("a")
    assert world.sample("index_blocks") == 0


def test_ranks_of_one_model_share_an_index_and_others_do_not() -> None:
    """What one model's rank holds is no other model's."""
    world = World()
    slots = [world.add("a"), world.add("b"), world.add("c", models=("n",))]
    for slot in slots:
        world.publish(slot, stored(2 + slot))

    assert world.reusable("m") == {0: 32, 1: 48}
    assert world.reusable("n") == {2: 64}
    assert world.reusable("unknown") == {}


def test_events_are_counted_by_type() -> None:
    """Three messages' worth in one batch."""
    world = World()
    slot = world.add("a")
    world.publish(slot, stored(4), BlockRemoved((4,)), BlockRemoved((3,)))

    assert world.sample("kv_events_total", type="BlockStored") == 1
    assert world.sample("kv_events_total", type="BlockRemoved") == 2
    assert (world.reusable(), world.fleet.member(slot).residency.tokens) == ({0: 32}, 32)


def test_the_block_size_is_learned_from_events() -> None:
    """A worker that does not tell it, or tells another, is indexed in the blocks that it publishes."""
    world = World()
    quiet, wrong = world.add("a", block_tokens=None), world.add("b", block_tokens=64)
    assert (world.fleet.member(quiet).index, world.reusable()) == (None, {})
    for slot in (quiet, wrong):
        world.publish(slot, stored(3))

    assert world.reusable() == {quiet: 48, wrong: 48}
    assert [world.fleet.member(slot).block_tokens for slot in (quiet, wrong)] == [16, 16]


def test_what_groups_are_is_known_still_once_a_smaller_unit_turns_up() -> None:
    """Blocks of 48 tokens, in which a prompt of 64 ends: by its last 16 the end is met, and all is to be heard anew."""
    world = World()
    slot = world.add("a", block_tokens=None)
    kinds = ("mamba", "full_attention")
    blocks = [BlockStored((1,), None, TOKENS[:48], 48, group=at, kind=kind) for at, kind in enumerate(kinds)]
    ends = [BlockStored((2,), 1, TOKENS[48:], 16, group=at, kind=kind) for at, kind in enumerate(kinds)]
    world.publish(slot, *blocks)
    assert world.reusable() == {slot: 48}

    is_whole = world.fleet.apply(slot, EventBatch(world.now, tuple(ends)), now=world.now)
    assert not is_whole
    assert world.reusable() == {}

    world.publish(slot, *blocks)
    assert world.reusable() == {slot: 48}
    world.publish(slot, *ends)
    assert world.reusable() == {slot: 64}


def test_a_cleared_rank_holds_nothing_and_the_cause_is_counted() -> None:
    """Another rank keeps what it has."""
    world = World()
    for slot in (world.add("a"), world.add("b")):
        world.publish(slot, stored(2))
        world.fleet.texts.add(slot, [1, 2])
    world.fleet.clear(0, "gap")

    assert (world.reusable(), world.fleet.texts.blocks_sent([1, 2])) == ({1: 32}, {1: 2})
    assert world.sample("kv_resyncs_total", cause="gap") == 1
    assert [member.residency.tokens for member in world.fleet.members()] == [0, 32]


def test_a_snapshot_replaces_what_was_believed() -> None:
    """Blocks that it does not name are gone."""
    world = World()
    slot = world.add("a")
    world.publish(slot, stored(4))
    world.fleet.load_snapshot(slot, Snapshot(7, EventBatch(world.now, (stored(1),))), now=world.now)

    assert world.reusable() == {0: 16}


def test_a_rank_that_leaves_takes_everything_with_it() -> None:
    """Blocks, promises, text, load and sessions: the next in its slot begins with nothing."""
    world = World()
    slot = world.add("a")
    world.publish(slot, stored(2))
    index = world.fleet.member(slot).index
    assert index is not None
    keys = block_keys(TOKENS, block_tokens=16, parent=namespace_seed("", ""))
    promise = index.promise(slot, keys, prompt_tokens=len(TOKENS))
    world.fleet.texts.add(slot, [1, 2])
    world.fleet.loads.open(slot, prompt_tokens=10, prefill_tokens=10, seconds=1.0, now=world.now)
    world.fleet.sessions.start("m", SessionKey("t", "s"), slot=slot, now=world.now)
    assert world.reusable() == {slot: 64}
    world.fleet.remove_rank(slot)
    assert world.add("b") == slot

    assert (world.reusable(), world.fleet.texts.blocks_sent([1, 2])) == ({}, {})
    assert world.fleet.member(slot).load.inflight == 0
    assert world.fleet.sessions.home("m", SessionKey("t", "s"), now=world.now) is None
    newcomers = world.fleet.member(slot).index
    assert newcomers is not None
    mine = newcomers.promise(slot, keys[:2], prompt_tokens=33)
    index.provisional.drop(promise)
    assert world.reusable() == {slot: 32}
    newcomers.provisional.drop(mine)
    assert (len(newcomers.provisional), newcomers.provisional.dense) == (0, {})


def test_a_promise_shorter_than_the_window_counts_whole() -> None:
    """Three blocks promised to a rank whose window spans four: the run reaches back to the start."""
    world = World()
    slot = world.add("a")
    world.publish(slot, BlockStored((9,), None, tuple(range(500, 516)), 16))
    world.publish(slot, BlockStored((9,), None, (0,) * 16, 16, group=1, kind="sliding_window", window_tokens=65))
    index = world.fleet.member(slot).index
    assert index is not None
    keys = block_keys(TOKENS[:48], block_tokens=16, parent=namespace_seed("", ""))
    index.promise(slot, keys, prompt_tokens=49)

    assert index.reusable_tokens(keys, prompt_tokens=49) == {slot: 48}


def test_the_admin_planes_rows_say_what_the_rank_is() -> None:
    """One row a rank, in the order of slots."""
    world = World()
    world.add("b", rank=1, models=("z", "m"))
    world.publish(0, stored(3))
    world.fleet.loads.open(0, prompt_tokens=50, prefill_tokens=40, seconds=1.0, now=world.now)
    (row,) = world.fleet.ranks()

    assert (row.id, row.slot, row.status, row.models) == (RankId("b", 1), 0, RankStatus.PENDING, ("m", "z"))
    assert (row.inflight, row.waiting_tokens, row.resident_blocks, row.block_tokens) == (1, 40, 3, 16)
    assert (row.prefill_tokens_per_second, row.trust_ratio) == (pytest.approx(20_000), 1.0)


def test_sessions_are_listed_from_the_last_used() -> None:
    """With their home's name and how long they have been idle."""
    world = World()
    slot = world.add("a")
    for number in range(3):
        world.now += 10
        key = SessionKey("t", f"s{number}")
        binding = world.fleet.sessions.start("m", key, slot=slot, now=world.now)
        world.fleet.sessions.finish("m", key, binding, now=world.now)
    world.now += 5

    assert world.fleet.session_list(2) == [
        ("m", SessionKey("t", "s2"), RankId("a", 0), 5.0),
        ("m", SessionKey("t", "s1"), RankId("a", 0), 15.0),
    ]
