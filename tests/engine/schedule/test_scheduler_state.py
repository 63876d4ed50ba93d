"""Recurrent states: where they are left, who may write them, and how they are told; all numbers worked out by hand."""

from __future__ import annotations

from kv_memory import KvMemory, expected_output

from engine_shim.schedule.scheduler import Scheduler
from engine_shim.types import NULL_PAGE, CacheGroup, CacheLayout, GroupKind, Request, Sampling
from router.wire.block_keys import block_keys, namespace_seed
from router.wire.kv_events import BlockRemoved, BlockStored

PAGE = 4


class Rank:
    """Pages of 4 tokens, a state every 16 tokens of a long prompt."""

    def __init__(self, *, slots: int = 20, chunk_tokens: int = 64) -> None:
        groups = (CacheGroup(0, GroupKind.FULL, (1,)), CacheGroup(1, GroupKind.STATE, (0,)))
        layout = CacheLayout(PAGE, groups, (101, slots + 1), checkpoint_tokens=16)
        self.scheduler = Scheduler(layout, chunk_tokens=chunk_tokens, max_context_tokens=400)
        self.memory = KvMemory(layout)

    def add(self, name: str, prompt: tuple[int, ...], *, max_tokens: int = 1) -> Request:
        request = Request(name, prompt, Sampling(max_tokens=max_tokens, ignore_eos=True))
        self.scheduler.add(request)
        return request

    def step(self) -> list[tuple[str, int, int]]:
        batch = self.scheduler.schedule()
        assert batch is not None
        shape = [(chunk.request.id, chunk.start, chunk.count) for chunk in batch.chunks]
        self.scheduler.commit(batch, self.memory.run(batch))
        self.scheduler.check_integrity()
        return shape

    def finish(self) -> list[list[tuple[str, int, int]]]:
        shapes = []
        while self.scheduler.has_work:
            self.scheduler.drain_outputs()
            if self.scheduler.has_work:
                shapes.append(self.step())
        return shapes

    def answers(self, request: Request) -> bool:
        return request.output == expected_output(request.prompt, request.sampling)[0]


def numbers(count: int, *, start: int = 100) -> tuple[int, ...]:
    """Distinct tokens that are never sampled."""
    return tuple(range(start, start + count))


def test_a_long_prompt_leaves_states_on_a_grid_and_at_its_end() -> None:
    """41 tokens stop at 16, 32 and, a page boundary before the last token, 40; a fork behind 34 starts from 32."""
    rank = Rank()
    rank.add("a", numbers(41))
    assert rank.finish() == [[("a", 0, 16)], [("a", 16, 16)], [("a", 32, 8)], [("a", 40, 1)]]
    again = rank.add("b", numbers(41))
    fork = rank.add("c", numbers(34) + numbers(5, start=900))
    rank.finish()
    assert (again.cached_tokens, fork.cached_tokens) == (40, 32)
    assert rank.answers(again)
    assert rank.answers(fork)


def test_the_next_turn_starts_at_the_last_page_of_the_answer() -> None:
    """6 prompt tokens, 12 sampled, 17 computed: the state after 16 was kept while the answer went on."""
    rank = Rank()
    first = rank.add("a", numbers(6), max_tokens=12)
    rank.finish()
    second = rank.add("b", (*first.tokens, *numbers(3, start=500)), max_tokens=9)
    rank.finish()
    assert second.cached_tokens == 16
    assert rank.answers(second)


def test_a_shared_state_is_read_by_many_and_written_by_none() -> None:
    """Copy on write: three requests of one step read one slot and write three others."""
    rank = Rank()
    rank.add("a", numbers(9))
    rank.finish()
    for name in "bcd":
        rank.add(name, (*numbers(8), ord(name), ord(name)))
    batch = rank.scheduler.schedule()
    assert batch is not None
    tables = [chunk.tables[1] for chunk in batch.chunks]
    assert [chunk.start for chunk in batch.chunks] == [8, 8, 8]
    assert len({source for source, _ in tables}) == 1
    assert len({NULL_PAGE, tables[0][0], *(target for _, target in tables)}) == 5


def test_twins_that_meet_keep_one_state() -> None:
    """Without a leader both compute one prompt; at each stop the second finds the first one's state and reads that."""
    rank = Rank(chunk_tokens=32)
    rank.add("leader", numbers(60))
    twins = [rank.add(name, (*numbers(40), ord(name), ord(name)), max_tokens=3) for name in "ab"]
    rank.step()
    assert rank.scheduler.abort("leader")
    shapes = rank.finish()
    assert [("a", 16, 16), ("b", 16, 16)] in shapes
    assert all(rank.answers(twin) for twin in twins)
    stats = rank.scheduler.stats()
    assert stats.used_pages == stats.evictable_pages
    assert stats.used_pages[1] == 5  # after 16, 32 and 40 tokens, and each at its end after 44


def test_a_rank_with_two_slots_gets_on() -> None:
    """One to read and one to write are enough for any number of requests, one after the other."""
    rank = Rank(slots=2)
    requests = [rank.add(str(n), numbers(20 + n, start=100 * n), max_tokens=10) for n in range(1, 4)]
    rank.finish()
    assert all(rank.answers(request) for request in requests)


def test_a_state_is_told_as_the_block_it_stands_behind() -> None:
    """Group kind "mamba", one hash a state, its parent the block before; the grid point at 16 is block 3."""
    rank = Rank()
    rank.add("a", numbers(18))
    rank.finish()
    hashes = block_keys(numbers(18), block_tokens=PAGE, parent=namespace_seed(""))
    states = [event for event in rank.scheduler.take_events() if isinstance(event, BlockStored) and event.group == 1]
    assert states == [
        BlockStored(
            hashes=(hashes[3],),
            parent=hashes[2],
            token_ids=numbers(4, start=112),
            block_tokens=PAGE,
            group=1,
            kind="mamba",
        )
    ]
    assert rank.scheduler.reset_cache()


def test_a_leaf_without_a_state_goes_an_inner_node_stays() -> None:
    """Four slots: states after 16 and 20 tokens; two strangers take the older one first, whose node is an inner one."""
    rank = Rank(slots=4)
    rank.add("a", numbers(21))
    rank.finish()
    rank.scheduler.take_events()
    hashes = block_keys(numbers(21), block_tokens=PAGE, parent=namespace_seed(""))
    removed: list[tuple[int, int | bytes]] = []
    for n in range(1, 4):
        rank.add(str(n), numbers(5, start=1000 * n))
        rank.finish()
        for event in rank.scheduler.take_events():
            if isinstance(event, BlockRemoved):
                removed += [(event.group, gone) for gone in event.hashes if gone in hashes]
    # The inner one's state alone; then the leaf's state and page, and with it the four pages nobody can use any more.
    assert removed == [(1, hashes[3]), (1, hashes[4]), *((0, gone) for gone in hashes[4::-1])]
