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
    defaults: dict[str, object] = {
        "head": False,
        "page": PAGE,
        "window": 5,
        "full_pages": 17,
        "spare_window_pages": 12,
        "state_slots": 8 if state else None,
        "checkpoint_pages": 4,
        "chunk": 12,
        "running": 4,
        "drafts": 0,
        "tails": WindowTails.STORED,
        "layers": 1,
        "ring": 2,
        "seed": 0,
        "scheduling": SchedulingPolicy.FCFS,
        "host": 1 + host // PAGE,
        "disk": None,
        "policy": WritePolicy.THROUGH,
        "piece": 3,
        "overlaps": True,
    }
    rank.start(**(defaults | options))
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


@pytest.mark.parametrize("host", [16, 60, 64, 68, 240])
def test_what_just_fits_the_device_stays_there(host: int) -> None:
    """To the brim of the device nothing sinks, whatever the host has room for, and all goes to the tree."""
    rank = machine(host=host)
    request = add(rank, text(DEVICE_TOKENS), max_tokens=1)
    while rank.scheduler.has_work:
        rank.steps(1)
        assert all(entry.head_pages is None for entry in rank.scheduler._running)
    rank.settle()
    assert (len(request.output), request.finish) == (1, FinishReason.LENGTH)
    assert rank.memory.host_reads == 0
    assert sum(len(hashes) for (medium, group), hashes in rank.resident.items() if (medium, group) == ("GPU", 0)) == 16
    rank.teardown()


@pytest.mark.parametrize("host", [16, 64])
def test_a_host_no_larger_than_the_device_lengthens_no_context(host: int) -> None:
    """The limit is the device's, and one token more is refused."""
    rank = machine(host=host)
    assert rank.scheduler.context_tokens == DEVICE_TOKENS + 1
    assert add(rank, text(DEVICE_TOKENS + 1), max_tokens=1).finish is FinishReason.ERROR
    rank.teardown()


@pytest.mark.parametrize("known", [DEVICE_TOKENS - 1, DEVICE_TOKENS])
@pytest.mark.parametrize("is_long", [False, True], ids=["ends-there", "goes-on"])
@pytest.mark.parametrize("host", [16, 80])
def test_an_answer_restarts_at_the_brim(host: int, known: int, *, is_long: bool) -> None:
    """Preempted where the device is full to the last token: it sinks if it goes on from there, and only then."""
    rank = machine(host=host)
    request = add(rank, text(50), max_tokens=DEVICE_TOKENS + 1 - 50 + (10 if is_long else 0))
    while len(request.tokens) < known:
        rank.steps(1)
    (entry,) = rank.scheduler._running
    rank.scheduler._preempt(entry)
    finish(rank)
    assert request.finish is FinishReason.LENGTH
    assert len(request.tokens) == DEVICE_TOKENS + 1 + (10 if is_long and host > DEVICE_TOKENS else 0)
    assert (rank.memory.host_reads > 0) is (is_long and host > DEVICE_TOKENS)
    rank.teardown()


@pytest.mark.parametrize("tokens", range(96, 104))
@pytest.mark.parametrize("tails", WindowTails)
def test_the_smallest_window_pool_is_enough(tails: WindowTails, tokens: int) -> None:
    """The window page that the end of a prompt keeps to be copied is given back, so its answer has one to go on."""
    rank = machine(host=240, spare_window_pages=2, tails=tails, running=1)
    requests = [add(rank, text(tokens), max_tokens=9) for _ in range(2)]
    finish(rank)
    assert [len(request.output) for request in requests] == [9, 9]
    assert rank.memory.host_reads > 0
    rank.teardown()


@pytest.mark.parametrize("chunk", [5, 6, 9])
def test_nothing_is_shared_of_what_sinks(chunk: int) -> None:
    """While a head's pages are being copied none of them goes to the tree, and a sibling that arrives waits."""
    heads = 0
    for seed in range(8):
        rank = machine(host=800, chunk=chunk, running=6, window=None)
        for n in range(2):
            add(rank, text(16 + seed, seed=n), max_tokens=20)
        rank.steps(6 + seed)
        first, sibling = add(rank, text(90, seed=seed), max_tokens=4), None
        while first.finish is None:
            rank.launch()
            entry = rank.scheduler._entries.get(first.id)
            if entry is not None and entry.sinking is not None and not entry.sunk:
                begin, memory = entry.own_from, rank.scheduler._memory
                heads += memory.offload is not None and not memory.offload.sinks.is_deep(entry)
                memory.store(entry)
                assert entry.own_from == begin
                shared = first.computed_tokens // PAGE * PAGE
                assert sibling is None or sibling.computed_tokens == 0
                sibling = sibling or add(rank, [*first.tokens[:shared], 3, 3, 3], max_tokens=2)
            if rank.batch is not None:
                rank.land()
            else:
                rank.mover.land_all()
            rank.agrees()
        finish(rank)
        rank.teardown()
    assert heads > 0


def test_what_a_step_reads_stays_where_it_is() -> None:
    """A sibling that arrives has nothing sink of a prefill that is in the same step: the host may have it at once.

    That is so where the head alone has been lost and is computed again.
    """
    rank = machine(host=800, chunk=2, window=None)
    add(rank, text(90))
    finish(rank)
    memory = rank.scheduler._memory
    memory.cache.evict(0, DEVICE_TOKENS // PAGE)
    assert memory.offload is not None
    for page in list(memory.offload.copies.pages()):
        if page.parent is not None and page.parent.parent is None:
            for copy in list(page.copies.values()):
                memory.offload.copies._drop(copy)
    first = add(rank, text(90))
    arrived = 0
    while rank.scheduler.has_work:
        rank.steps(1)
        entry = rank.scheduler._entries.get(first.id)
        own = 0 if entry is None or not entry.sunk else first.computed_tokens // PAGE - entry.own_from
        if entry is not None and own > 0 and entry.sinking is None and entry.prefilling and arrived < 3:
            shared = first.computed_tokens // PAGE * PAGE
            add(rank, [*first.tokens[:shared], 4 - first.tokens[shared], 1], max_tokens=2)
            arrived += 1
    rank.settle()
    assert arrived > 0
    rank.teardown()


def test_who_reads_a_damaged_copy_starts_again() -> None:
    """A load of the same copies for another that fits the device does not arrive: nobody reads them any more."""
    rank = machine(host=240, window=None)
    prefix = text(160)
    long = add(rank, prefix, max_tokens=40)
    while len(long.output) < 3:
        rank.steps(1)
    (entry,) = rank.scheduler._running
    read = set(entry.sunk)
    add(rank, prefix[: DEVICE_TOKENS - 3 * PAGE], max_tokens=1)
    rank.launch()
    rank.land()
    loads = [flight for flight in rank.offload._flights if flight.load is not None]
    assert read.issuperset(loads[0].reads)
    rank.mover.land(0, whole=False)
    rank.scheduler.poll()
    assert entry not in rank.scheduler._running
    finish(rank)
    assert len(long.output) == 40
    rank.teardown()
