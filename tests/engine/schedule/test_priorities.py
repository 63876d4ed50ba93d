"""Who goes first and who gives way under the priority policy."""

from __future__ import annotations

import pytest
from kv_memory import KvMemory, expected_output

from engine_shim.schedule.scheduler import Scheduler
from engine_shim.types import CacheGroup, CacheLayout, GroupKind, Request, Sampling, SchedulingPolicy

PAGE = 4


class Rank:
    """One full-attention group, pages of 4 tokens; ``log`` has who is admitted (+), preempted (-) and ends (=)."""

    def __init__(
        self,
        pages: int,
        *,
        max_running: int = 3,
        chunk_tokens: int = 64,
        policy: SchedulingPolicy = SchedulingPolicy.PRIORITY,
    ) -> None:
        layout = CacheLayout(PAGE, (CacheGroup(0, GroupKind.FULL, (1,)),), (pages + 1,))
        self.scheduler = Scheduler(
            layout, max_running=max_running, chunk_tokens=chunk_tokens, max_context_tokens=512, policy=policy
        )
        self.memory = KvMemory(layout)
        self.requests: list[Request] = []
        self.log: list[str] = []

    def add(self, priority: int, prompt: tuple[int, ...], *, max_tokens: int = 1) -> Request:
        sampling = Sampling(max_tokens=max_tokens, ignore_eos=True)
        request = Request(str(len(self.requests)), prompt, sampling, priority=priority)
        self.requests.append(request)
        self.scheduler.add(request)
        return request

    def running(self) -> list[str]:
        return [entry.request.id for entry in self.scheduler._running]

    def step(self) -> None:
        before = self.running()
        batch = self.scheduler.schedule()
        assert batch is not None
        after = self.running()
        self.log += [f"-{name}" for name in before if name not in after]
        self.log += [f"+{name}" for name in after if name not in before]
        outputs = self.scheduler.commit(batch, self.memory.run(batch))
        self.scheduler.check_integrity()
        self.log += [f"={output.request.id}" for output in outputs if output.finish is not None]

    def finish(self) -> str:
        while self.scheduler.has_work:
            self.step()
        for request in self.requests:
            assert request.output == expected_output(request.prompt, request.sampling)[0]
        return " ".join(self.log)


def numbers(count: int, *, start: int) -> tuple[int, ...]:
    """Distinct tokens that are never sampled."""
    return tuple(range(start, start + count))


# Each: pages; (priority, step of arrival, prompt tokens, answer tokens) of each request; what vLLM 0.32's scheduler
# does with them (policy "priority", three at once, blocks of 4 tokens).
RECORDED = [
    pytest.param(
        13,
        [(0, 0, 6, 5), (0, 1, 11, 22), (1, 1, 10, 17), (-1, 2, 10, 23), (-1, 3, 8, 11), (0, 3, 6, 24)],
        "+0 +1 +2 =0 +3 -2 +4 -1 =4 +1 -1 =3 +1 +5 =1 +2 =2 =5",
        id="the-least-important-first-then-the-latest",
    ),
    pytest.param(
        14,
        [(0, 0, 10, 19), (0, 0, 10, 21), (1, 1, 5, 6), (0, 1, 9, 13), (-1, 1, 5, 16), (1, 5, 11, 9)],
        "+0 +1 +4 -1 =4 +1 =0 +3 +2 =2 =1 +5 =3 =5",
        id="the-latest-of-equals-though-admitted-before",
    ),
    pytest.param(
        13,
        [(1, 0, 8, 21), (0, 0, 12, 5), (1, 0, 8, 23), (-1, 0, 9, 19), (1, 4, 8, 14), (0, 5, 6, 12)],
        "+3 +1 +0 =1 +5 -0 =5 +0 =3 +2 +4 -4 =0 +4 =4 =2",
        id="the-oldest-of-all-if-it-is-the-least-important",
    ),
    pytest.param(
        14,
        [(1, 0, 10, 22), (-1, 4, 5, 13), (1, 8, 10, 13), (-1, 12, 10, 9), (-1, 12, 6, 16), (0, 12, 7, 17)],
        "+0 +1 +2 -2 =1 +3 +4 -0 +5 =3 =4 +0 =0 +2 =5 =2",
        id="the-preempted-wait-in-the-order-of-all",
    ),
]


@pytest.mark.parametrize(("pages", "requests", "recorded"), RECORDED)
def test_as_vllm_does_it(pages: int, requests: list[tuple[int, int, int, int]], recorded: str) -> None:
    """Admissions, preemptions and ends come in the order in which vLLM's scheduler has them."""
    rank = Rank(pages)
    for step in range(1 + max(at for _, at, _, _ in requests)):
        for number, (priority, at, prompt, answer) in enumerate(requests):
            if at == step:
                rank.add(priority, numbers(prompt, start=100 * (number + 1)), max_tokens=answer)
        rank.step()
    assert rank.finish() == recorded


def test_priorities_say_nothing_where_arrival_counts() -> None:
    """First come, first served: the same requests under the other policy."""
    logs = []
    for policy in SchedulingPolicy:
        rank = Rank(100, max_running=1, policy=policy)
        for number, priority in enumerate((3, 1, 2)):
            rank.add(priority, numbers(5, start=100 * (number + 1)))
        logs.append(rank.finish())
    assert logs == ["+0 =0 +1 =1 +2 =2", "+1 =1 +2 =2 +0 =0"]


def test_who_waits_preempts_nobody() -> None:
    """As in vLLM: the only seat is taken by the least important request, which keeps it."""
    rank = Rank(100, max_running=1)
    rank.add(9, numbers(5, start=100), max_tokens=6)
    rank.step()
    rank.add(-9, numbers(5, start=200))
    assert rank.finish() == "+0 =0 +1 =1"
    assert rank.scheduler.stats().preemptions == 0


def test_a_more_important_sibling_reuses_the_prefill_under_way() -> None:
    """40 common tokens, 16 of them computed when it comes: it steps aside until all are, a stranger passes it."""
    rank = Rank(100, chunk_tokens=16)
    rank.add(5, numbers(60, start=1000))
    rank.step()
    sibling = rank.add(-5, numbers(40, start=1000) + numbers(4, start=2000))
    rank.add(7, numbers(4, start=3000))
    assert rank.finish() == "+0 +2 =2 +1 =0 =1"
    assert sibling.cached_tokens == 40


def test_the_most_important_gets_on_and_all_end() -> None:
    """A pool of 9 pages, requests of up to 9: everybody gives way to the one that matters most, and nobody is lost."""
    rank = Rank(9, max_running=4)
    for number in range(12):
        rank.add(number % 3, numbers(5 + number, start=100 * (number + 1)), max_tokens=12)
    ends = [name[1:] for name in rank.finish().split() if name.startswith("=")]
    assert [int(name) % 3 for name in ends] == [0] * 4 + [1] * 4 + [2] * 4
    assert rank.scheduler.stats().preemptions > 0


def test_an_aborted_request_leaves_the_line() -> None:
    """Waiting, and preempted and waiting again."""
    rank = Rank(8)
    rank.add(1, numbers(12, start=100), max_tokens=16)
    rank.add(0, numbers(12, start=200), max_tokens=16)
    rank.add(2, numbers(4, start=300))
    while "-0" not in rank.log:
        rank.step()
    assert rank.scheduler.abort("0")
    assert rank.scheduler.abort("2")
    assert [output.request.id for output in rank.scheduler.drain_outputs()] == ["0", "2"]
    while rank.scheduler.has_work:
        rank.step()
    assert rank.log[-1] == "=1"
    stats = rank.scheduler.stats()
    assert stats.used_pages == stats.evictable_pages
