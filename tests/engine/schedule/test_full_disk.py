"""A disk that takes nothing: it is said seldom and tried seldom."""

from __future__ import annotations

import itertools
import threading

from kv_memory import KvMemory
from kv_mover import KvMover
from structlog.testing import capture_logs

from engine_shim.cache.transfers import Place, Transfer
from engine_shim.offload.lane import Lane
from engine_shim.offload.quiet import Quiet
from engine_shim.schedule.scheduler import Scheduler
from engine_shim.schedule.transit import OffloadPlan
from engine_shim.types import CacheGroup, CacheLayout, GroupKind, Request, Sampling

LAYOUT = CacheLayout(2, (CacheGroup(0, GroupKind.FULL, (0,)),), (200,))
FULL_DISK = OSError(28, "No space left on device", "0-7.new")


def failures(times: list[float], error: Exception) -> list[dict]:
    """What a lane logs of a transfer that fails at each of these times."""
    clock, ended = iter(times), threading.Semaphore(0)

    def work(transfer: Transfer) -> None:
        raise error

    lane = Lane("disk", work, broke=lambda transfer: ended.release(), quiet=Quiet(clock=lambda: next(clock)))
    with capture_logs() as lines:
        for number in range(len(times)):
            lane.put(Transfer(number, Place.HOST, Place.DISK, ()))
            assert ended.acquire(timeout=10)
        lane.close()
    return lines


def test_it_is_said_once_a_minute_and_counted() -> None:
    """The first failure at once, then those of a minute together, each time the system's words without a traceback."""
    lines = failures([0.0, 0.1, 30.0, 59.9, 60.0, 60.1, 200.0], FULL_DISK)
    assert [line["count"] for line in lines] == [1, 4, 2]
    for line in lines:
        assert (line["source"], line["target"], line["exc_info"]) == (Place.HOST, Place.DISK, None)
        assert "No space left on device" in line["error"]


def test_a_fault_of_ours_is_told_with_its_place() -> None:
    fault = ValueError("a host slot holds something else")
    (line,) = failures([0.0, 1.0], fault)
    assert line["exc_info"] is fault


class Rank:
    """Each prompt is a page of its own prefix and one piece; the disk has room for so many pages."""

    def __init__(self, *, disk_pages: int) -> None:
        memory = KvMemory(LAYOUT)
        self.mover = KvMover(memory)
        plan = OffloadPlan((200,), (1 + disk_pages,), piece_pages=8)
        options = {"chunk_tokens": 64, "max_context_tokens": 60, "eos_token_ids": frozenset()}
        self.scheduler = Scheduler(LAYOUT, offload=plan, mover=self.mover, **options)
        self.memory = memory
        self.numbers = itertools.count()
        self.tried = 0

    def arrive(self, *, disk_works: bool) -> bool:
        """One more piece comes to the host; whether it was tried to write it to disk."""
        number = next(self.numbers)
        request = Request(str(number), (1 + number % 3, 4 + number // 3, 9), Sampling(1))
        self.scheduler.add(request)
        while self.scheduler.has_work:
            batch = self.scheduler.schedule()
            self.scheduler.commit(batch, self.memory.run(batch))
        before = len(self.mover.moved)
        while self.scheduler.awaits_transfers:
            is_spill = not self.mover.lanes.get((Place.DEVICE, Place.HOST))
            self.mover.land(0, whole=disk_works or not is_spill)
            self.scheduler.poll()
        self.scheduler.check_integrity()
        return any(transfer.target is Place.DISK for transfer in self.mover.moved[before:])

    @property
    def on_disk(self) -> int:
        return self.scheduler._memory.offload.stats().used_pages[Place.DISK]


def test_after_each_failure_it_is_left_alone_twice_as_long() -> None:
    """1, 2, 4 ... 32 pieces pass by between the attempts, and with the first that succeeds all goes on as before."""
    rank = Rank(disk_pages=100)
    tried = [rank.arrive(disk_works=False) for _ in range(140)]
    attempts = [place for place, was in enumerate(tried) if was]
    assert [later - earlier - 1 for earlier, later in itertools.pairwise(attempts)] == [1, 2, 4, 8, 16, 32, 32, 32]
    assert rank.on_disk == 0
    waits = 0
    while not rank.arrive(disk_works=True):
        waits += 1
    assert waits <= 32
    assert all(rank.arrive(disk_works=True) for _ in range(9))
    assert rank.on_disk == 10


def test_it_costs_a_full_pool_no_more_than_the_first_piece() -> None:
    """One page goes, to make room for an attempt, and the attempts that follow have that room."""
    rank = Rank(disk_pages=20)
    assert all(rank.arrive(disk_works=True) for _ in range(20))
    assert sum(rank.arrive(disk_works=False) for _ in range(60)) == 6
    assert rank.on_disk == 19
