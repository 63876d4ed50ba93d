"""What becomes of a context that is longer than the device's pool, case by case."""

from __future__ import annotations

import pytest
from test_long_context_machine import LongContextMachine

from engine_shim.cache.transfers import WritePolicy
from engine_shim.types import FinishReason, Request, Sampling, SchedulingPolicy, WindowTails

PAGE = 4
#: The device's room in every case.
DEVICE_TOKENS = 16 * PAGE


def machine(*, host: int, state: bool = False, **options: object) -> LongContextMachine:
    """A rank with room for 64 tokens, and for ``host`` below; windows of 5, chunks of 12."""
    rank = LongContextMachine()
    rank.longest = 400
    defaults = {"head": False, "policy": WritePolicy.THROUGH}
    rank.start(
        page=PAGE,
        window=5,
        full_pages=17,
        spare_window_pages=12,
        state_slots=8 if state else None,
        checkpoint_pages=4,
        chunk=12,
        running=4,
        drafts=0,
        tails=WindowTails.STORED,
        layers=1,
        ring=2,
        seed=0,
        scheduling=SchedulingPolicy.FCFS,
        host=1 + host // PAGE,
        disk=None,
        piece=3,
        overlaps=True,
        **{**defaults, **options},
    )
    return rank


def add(rank: LongContextMachine, tokens: list[int], max_tokens: int = 3) -> Request:
    """A request that nothing but its length ends."""
    request = Request(str(len(rank.requests)), tuple(tokens), Sampling(max_tokens, ignore_eos=True))
    rank.requests[request.id], rank.streams[request.id] = request, []
    rank.scheduler.add(request)
    rank.take(rank.scheduler.drain_outputs())
    return request


def finish(rank: LongContextMachine) -> None:
    while rank.scheduler.has_work:
        rank.steps(3)
    rank.settle()


def text(tokens: int, *, seed: int = 0) -> list[int]:
    return [1 + (seed + i * i) % 3 for i in range(tokens)]


@pytest.mark.parametrize("policy", WritePolicy)
@pytest.mark.parametrize("state", [False, True], ids=["windows", "states"])
def test_the_next_on_the_same_prefix_computes_its_question(policy: WritePolicy, *, state: bool) -> None:
    """Half of the device keeps its head, the host all behind that; whatever the policy, as nobody could compute less.

    The media of what is resident say so.
    """
    rank = machine(host=240, state=state, policy=policy)
    prefix = text(160)
    add(rank, prefix)
    finish(rank)
    on = {medium: len(hashes) for (medium, group), hashes in rank.resident.items() if group == 0}
    assert on["GPU"] == DEVICE_TOKENS // PAGE // 2
    assert on["CPU"] >= 160 // PAGE
    second = add(rank, [*prefix, 3, 2, 1])
    finish(rank)
    assert second.cached_tokens == 160
    assert rank.memory.host_reads > 0
    rank.teardown()


def test_who_reads_the_same_shares_it() -> None:
    """Three questions on one prefix run side by side, on the same copies, and each computes its own part only."""
    rank = machine(host=240)
    prefix = text(160)
    add(rank, prefix)
    finish(rank)
    questions = [add(rank, [*prefix, n, n, 2], max_tokens=6) for n in (1, 2, 3)]
    together: list[set[int]] = []
    while rank.scheduler.has_work:
        rank.steps(1)
        slots = [set(entry.below.slots) for entry in rank.scheduler._running if entry.below is not None]
        together = max(together, slots, key=len)
    rank.settle()
    assert len(together) == 3
    assert together[0] == together[1] == together[2]
    assert [question.cached_tokens for question in questions] == [160] * 3
    assert rank.scheduler.stats().preemptions == 0
    rank.teardown()


def test_an_answer_may_outgrow_the_device() -> None:
    """A prompt that fits goes on when its answer does not; nothing of it sinks before that."""
    rank = machine(host=240)
    request = add(rank, text(50), max_tokens=100)
    while len(request.tokens) < DEVICE_TOKENS:
        rank.steps(1)
        assert all(entry.head_pages is None for entry in rank.scheduler._running)
    assert rank.memory.host_reads == 0
    finish(rank)
    assert (len(request.output), request.finish) == (100, FinishReason.LENGTH)
    assert rank.memory.host_reads > 0
    rank.teardown()


def test_two_that_the_host_cannot_hold_run_one_after_the_other() -> None:
    """Neither pushes the other out, nor is one begun in vain; a short one behind them runs as well."""
    rank = machine(host=240)
    first, second = add(rank, text(160)), add(rank, text(170, seed=1))
    short = add(rank, text(9, seed=2))
    while first.finish is None:
        rank.steps(1)
        assert second.computed_tokens == 0
    finish(rank)
    assert {request.finish for request in (first, second, short)} == {FinishReason.LENGTH}
    assert rank.scheduler.stats().preemptions == 0
    rank.teardown()


@pytest.mark.parametrize(("host", "head", "fits"), [(240, False, True), (120, False, False), (240, True, False)])
def test_what_cannot_sink_is_refused(host: int, *, head: bool, fits: bool) -> None:
    """A prompt that the host has no room for, or whose draft head's pages would have to sink, ends at once."""
    rank = machine(host=host, head=head)
    assert (rank.scheduler.context_tokens > 160) is fits
    request = add(rank, text(160))
    assert (request.finish is FinishReason.ERROR) is not fits
    rank.teardown()
