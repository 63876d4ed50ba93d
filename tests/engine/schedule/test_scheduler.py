"""The scheduler's rules one at a time, with pages, chunks and boundaries worked out by hand."""

from __future__ import annotations

import pytest
from kv_memory import KvMemory, expected_output

from engine_shim.schedule.entry import Entry
from engine_shim.schedule.scheduler import Scheduler
from engine_shim.types import (
    NULL_PAGE,
    Batch,
    CacheGroup,
    CacheLayout,
    FinishReason,
    GroupKind,
    Output,
    Request,
    Sampling,
)
from router.wire.block_keys import block_keys, namespace_seed
from router.wire.kv_events import AllBlocksCleared, BlockStored

PAGE = 4


def layout_of(full_pages: int = 100, window: int | None = None, window_pages: int = 100) -> CacheLayout:
    """Pages of 4 tokens; pools without the null page; ``window`` in tokens."""
    full = CacheGroup(0, GroupKind.FULL, (1,))
    if window is None:
        return CacheLayout(PAGE, (full,), (full_pages + 1,))
    sliding = CacheGroup(1, GroupKind.WINDOW, (0,), window)
    return CacheLayout(PAGE, (full, sliding), (full_pages + 1, window_pages + 1))


class Rank:
    """A scheduler with the checking memory behind it."""

    def __init__(self, layout: CacheLayout, *, chunk_tokens: int = 512, max_running: int = 64, context: int = 1000):
        self.scheduler = Scheduler(
            layout, max_running=max_running, chunk_tokens=chunk_tokens, max_context_tokens=context
        )
        self.memory = KvMemory(layout)

    def add(self, name: str, prompt: tuple[int, ...], *, max_tokens: int = 1, **sampling: object) -> Request:
        request = Request(name, prompt, Sampling(max_tokens=max_tokens, **sampling))  # type: ignore[arg-type]
        self.scheduler.add(request)
        return request

    def step(self) -> tuple[list[tuple[str, int, int]], list[Output]]:
        """One step: the chunks as (id, start, count), and the outputs."""
        batch = self.scheduler.schedule()
        assert batch is not None
        return shape(batch), self.land(batch)

    def land(self, batch: Batch) -> list[Output]:
        outputs = self.scheduler.commit(batch, self.memory.run(batch))
        self.scheduler.check_integrity()
        return outputs

    def finish(self) -> list[list[tuple[str, int, int]]]:
        """Step until all is done; the shapes of the batches."""
        shapes = []
        while self.scheduler.has_work:
            self.scheduler.drain_outputs()
            if self.scheduler.has_work:
                shapes.append(self.step()[0])
        return shapes


def shape(batch: Batch) -> list[tuple[str, int, int]]:
    return [(chunk.request.id, chunk.start, chunk.count) for chunk in batch.chunks]


def numbers(count: int, *, start: int = 100) -> tuple[int, ...]:
    """Distinct tokens that are never sampled."""
    return tuple(range(start, start + count))


# --- batches ------------------------------------------------------------------------------------------


def test_prefill_runs_in_chunks_and_samples_at_its_end_only() -> None:
    """A prompt of 10 under a budget of 4 takes chunks of 4, 4 and 2; only the last one samples."""
    rank = Rank(layout_of(), chunk_tokens=4)
    request = rank.add("a", numbers(10), max_tokens=2)
    assert rank.step() == ([("a", 0, 4)], [])
    assert rank.step() == ([("a", 4, 4)], [])
    shapes, outputs = rank.step()
    assert shapes == [("a", 8, 2)]
    assert [list(output.tokens) for output in outputs] == [request.output]
    assert len(request.output) == 1
    assert rank.step()[0] == [("a", 10, 1)]
    assert request.finish is FinishReason.LENGTH


def test_decodes_come_before_prefills_within_one_budget() -> None:
    """A long prompt gets what the decodes leave of the budget, and never delays them."""
    rank = Rank(layout_of(), chunk_tokens=6)
    rank.add("a", numbers(3), max_tokens=9)
    rank.step()
    rank.add("b", numbers(20, start=200))
    assert rank.step()[0] == [("a", 3, 1), ("b", 0, 5)]
    assert rank.step()[0] == [("a", 4, 1), ("b", 5, 5)]


def test_a_prefill_that_is_first_in_line_does_not_hold_up_a_younger_decode() -> None:
    """The older request is still in its prompt while the younger decodes: the decode stands first."""
    rank = Rank(layout_of(), chunk_tokens=8)
    rank.add("a", numbers(30))
    rank.step()
    rank.add("b", numbers(3, start=200), max_tokens=5)
    shapes = rank.finish()
    decodes = [batch for batch in shapes if ("b", 3, 1) in batch]
    assert decodes
    assert all(batch[0][0] == "b" for batch in decodes)


def test_nobody_passes_the_head_of_the_line() -> None:
    """A small request waits behind a big one that does not fit yet."""
    rank = Rank(layout_of(full_pages=10))
    rank.add("a", numbers(24), max_tokens=8)
    rank.step()
    rank.add("big", numbers(20, start=200))
    rank.add("small", numbers(2, start=300))
    shapes = rank.finish()
    started = {name: index for index, batch in reversed([*enumerate(shapes)]) for name, _, _ in batch}
    assert started["big"] == started["small"] > started["a"]


def test_max_running_bounds_the_batch() -> None:
    """With two seats the third request starts when one gets up."""
    rank = Rank(layout_of(), max_running=2)
    for index in range(3):
        rank.add(str(index), numbers(3, start=100 * index), max_tokens=3)
    shapes = rank.finish()
    assert max(map(len, shapes)) == 2
    assert [batch for batch in shapes if ("2", 0, 3) in batch] == [shapes[3]]


# --- prefix reuse -------------------------------------------------------------------------------------


def test_the_last_token_is_always_computed() -> None:
    """A repeated prompt of exactly two pages reuses one: a page must be left to compute the last token in."""
    rank = Rank(layout_of())
    rank.add("a", numbers(8))
    rank.finish()
    again = rank.add("b", numbers(8))
    assert rank.finish() == [[("b", 4, 4)]]
    assert again.cached_tokens == 4
    longer = rank.add("c", numbers(9))
    assert rank.finish() == [[("c", 8, 1)]]
    assert longer.cached_tokens == 8


def test_an_answer_is_reused_by_the_next_turn() -> None:
    """Prompt 6 + output 7: of 13 tokens 12 are computed, three pages, and the next turn starts behind them."""
    rank = Rank(layout_of(window=10))
    first = rank.add("a", numbers(6), max_tokens=7)
    rank.finish()
    second = rank.add("b", (*first.tokens, *numbers(3, start=500)))
    rank.finish()
    assert second.cached_tokens == 12


@pytest.mark.parametrize("tokens", [24, 25, 27])
@pytest.mark.parametrize("chunk_tokens", [1, 5, 64])
def test_the_same_prompt_again_is_reused_under_a_window(tokens: int, chunk_tokens: int) -> None:
    """All whole pages before the last token, wherever the prompt ends in its page."""
    rank = Rank(layout_of(window=9), chunk_tokens=chunk_tokens)
    rank.add("a", numbers(tokens), max_tokens=30, ignore_eos=True)
    rank.finish()
    again = rank.add("b", numbers(tokens), max_tokens=2, ignore_eos=True)
    rank.finish()
    assert again.cached_tokens == (tokens - 1) // PAGE * PAGE
    assert again.output == expected_output(again.prompt, again.sampling)[0]


def test_namespaces_do_not_share() -> None:
    """Equal tokens under another namespace are computed again."""
    rank = Rank(layout_of())
    rank.add("a", numbers(9))
    rank.finish()
    other = Request("b", numbers(9), Sampling(max_tokens=1), namespace="tenant")
    rank.scheduler.add(other)
    rank.finish()
    assert other.cached_tokens == 0


def test_the_third_request_reuses_a_fork_point() -> None:
    """Window of 9 tokens = 2 pages. The first leaves no window at the fork, the second makes one, the third uses it.

    The shared head is 10 pages; the first request's tail is 5 more, so its window lies at pages 13-14.
    """
    rank = Rank(layout_of(window=9), chunk_tokens=32)
    head = numbers(40)
    first = rank.add("a", head + numbers(20, start=1000))
    assert rank.finish() == [[("a", 0, 32)], [("a", 32, 28)]]
    second = rank.add("b", head + numbers(20, start=2000))
    assert rank.finish() == [[("b", 0, 32)], [("b", 32, 8)], [("b", 40, 20)]]
    third = rank.add("c", head + numbers(20, start=3000))
    assert rank.finish() == [[("c", 40, 20)]]
    assert (first.cached_tokens, second.cached_tokens, third.cached_tokens) == (0, 0, 40)


def test_without_a_stop_at_the_fork_nobody_would_reuse_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: a prefill does not store at the fork, and the test above fails."""
    monkeypatch.setattr(Entry, "stop_at", lambda self, tokens: None)
    with pytest.raises(AssertionError):
        test_the_third_request_reuses_a_fork_point()


def test_a_long_prefill_needs_a_window_of_pages_only() -> None:
    """400 tokens through a window pool of 9 pages.

    3 of window, 4 of chunk and a ragged end; each page is used many times.
    """
    rank = Rank(layout_of(window=12, window_pages=9), chunk_tokens=16)
    request = rank.add("a", numbers(398), max_tokens=1)
    nulls = []
    while (batch := rank.scheduler.schedule()) is not None:
        window = batch.chunks[0].tables[1]
        nulls.append(window.count(NULL_PAGE))
        assert len(window) - nulls[-1] <= 3 + 4 + 1
        rank.land(batch)
    assert nulls == [max(0, 4 * step - 3) for step in range(25)]
    assert request.output == expected_output(request.prompt, request.sampling)[0]
    assert rank.memory.window_pages_reused > 4 * 60
    assert rank.scheduler.stats().preemptions == 0


def test_a_reader_unlocks_what_its_window_has_passed() -> None:
    """Two sessions share a head whose window pages nobody may keep for good.

    A pool of window + one page serves both.
    """
    rank = Rank(layout_of(window=9, window_pages=3), chunk_tokens=64)
    rank.add("a", numbers(24))
    rank.finish()
    request = rank.add("b", numbers(24) + numbers(3, start=500), max_tokens=30, ignore_eos=True)
    rank.finish()
    assert request.cached_tokens == 24
    assert request.output == expected_output(request.prompt, request.sampling)[0]


def test_a_window_that_has_passed_the_reused_prefix_frees_its_tail_for_eviction() -> None:
    """While b reads the head, its last two window pages are locked; 8 tokens on, nobody looks back at them.

    A third one was left for whoever sends a's prompt again; b has no use for it.
    """
    rank = Rank(layout_of(window=9))
    rank.add("a", numbers(24))
    rank.finish()
    rank.add("b", numbers(24) + numbers(1, start=500), max_tokens=30, ignore_eos=True)
    unlocked = []
    for _ in range(9):
        rank.step()
        unlocked.append(rank.scheduler.stats().evictable_pages[1])
    assert unlocked == [1, 1, 1, 1, 1, 1, 1, 3, 3]


# --- siblings -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [None, 9])
def test_siblings_cost_one_prefill_of_their_head(window: int | None) -> None:
    """Three requests of 40 common tokens and 4 of their own arrive together: 40 + 3 x 4 tokens are computed.

    The first one stops at the fork though its budget goes further, and the others start in the next step.
    """
    rank = Rank(layout_of(window=window), chunk_tokens=64)
    requests = [rank.add(str(n), numbers(40) + numbers(4, start=1000 * n)) for n in range(1, 4)]
    assert rank.finish() == [[("1", 0, 40)], [("1", 40, 4), ("2", 40, 4), ("3", 40, 4)]]
    assert [request.cached_tokens for request in requests] == [0, 40, 40]


def test_a_late_sibling_waits_for_a_prefill_under_way() -> None:
    """It arrives when 16 of 40 common tokens are computed, starts when all are, and a stranger passes it."""
    rank = Rank(layout_of(), chunk_tokens=16, max_running=3)
    rank.add("first", numbers(60))
    rank.step()
    late = rank.add("late", numbers(40) + numbers(4, start=1000))
    rank.add("stranger", numbers(4, start=2000))
    assert rank.finish() == [
        [("first", 16, 16)],
        [("first", 32, 8), ("stranger", 0, 4)],
        [("first", 40, 16)],
        [("first", 56, 4), ("late", 40, 4)],
    ]
    assert late.cached_tokens == 40


def test_a_sibling_that_comes_after_the_fork_reuses_what_is_computed() -> None:
    """With full attention any page that is computed can be shared, at once; 32 tokens are when it arrives."""
    rank = Rank(layout_of(), chunk_tokens=16)
    rank.add("first", numbers(60))
    rank.step()
    rank.step()
    late = rank.add("late", numbers(20) + numbers(4, start=1000))
    rank.finish()
    assert late.cached_tokens == 20


def test_siblings_of_a_leader_that_goes_away_run_by_themselves() -> None:
    """The leader is aborted halfway: one of the two that waited computes the rest, the other waits for nobody twice."""
    rank = Rank(layout_of(), chunk_tokens=16)
    rank.add("leader", numbers(40))
    waiting = [rank.add(str(n), numbers(40) + numbers(4, start=1000 * n)) for n in (1, 2)]
    rank.step()
    assert rank.scheduler.abort("leader")
    rank.finish()
    assert [request.output for request in waiting] == [expected_output(r.prompt, r.sampling)[0] for r in waiting]
    assert waiting[0].cached_tokens == 16  # what the leader had computed


# --- a step that fails --------------------------------------------------------------------------------


def test_a_failed_step_ends_its_requests_and_no_others() -> None:
    """Two of three requests are in the step; what they had stored before stays, what they wrote last is forgotten."""
    rank = Rank(layout_of(), chunk_tokens=16, max_running=2)
    first = rank.add("1", numbers(8), max_tokens=30, ignore_eos=True)
    rank.step()
    second = rank.add("2", numbers(8, start=500))
    third = rank.add("3", numbers(8))
    batch = rank.scheduler.schedule()
    assert batch is not None
    failed = rank.scheduler.fail(batch)
    rank.scheduler.check_integrity()
    assert [(o.request, o.tokens, o.finish) for o in failed] == [
        (request, (), FinishReason.ERROR) for request in (first, second)
    ]
    rank.finish()
    assert third.finish is FinishReason.LENGTH
    assert third.cached_tokens == 4
    again = rank.add("4", numbers(9, start=500))
    rank.finish()
    assert again.cached_tokens == 0
    with pytest.raises(RuntimeError, match="not the launched batch"):
        rank.scheduler.fail(batch)


# --- too few pages ------------------------------------------------------------------------------------


def test_the_youngest_is_preempted_and_keeps_its_words() -> None:
    """Two requests that outgrow 12 pages together.

    The younger starts over, samples nothing twice, and both answer right.
    """
    rank = Rank(layout_of(full_pages=12, window=9))
    old = rank.add("old", numbers(10), max_tokens=24, ignore_eos=True)
    young = rank.add("young", numbers(10, start=500), max_tokens=24, ignore_eos=True)
    streams: dict[str, list[int]] = {"old": [], "young": []}
    ends = []
    while rank.scheduler.has_work:
        for output in rank.step()[1]:
            assert output.tokens
            streams[output.request.id] += output.tokens
            if output.finish is not None:
                ends.append(output.request.id)
    assert rank.scheduler.stats().preemptions == 1
    assert ends == ["old", "young"]
    for request in (old, young):
        assert streams[request.id] == request.output == expected_output(request.prompt, request.sampling)[0]
        assert request.cached_tokens == 0  # what was cached when it first ran, not after the preemption


def test_a_preempted_request_waits_before_those_that_never_ran() -> None:
    """Of three requests two run, one of these is preempted; when there is room again it goes before the third."""
    rank = Rank(layout_of(full_pages=12), max_running=2)
    for index, name in enumerate(("old", "young", "third")):
        rank.add(name, numbers(10, start=500 * index), max_tokens=24, ignore_eos=True)
    names = [[name for name, _, _ in batch] for batch in rank.finish()]
    assert rank.scheduler.stats().preemptions >= 1
    assert next(batch for batch in names if "third" in batch) == ["young", "third"]


def test_unused_prefixes_go_first_and_oldest_first() -> None:
    """A pool of 6 pages holds prompts a and b; c takes the pages of a, so that b is still known."""
    rank = Rank(layout_of(full_pages=6))
    for name in "abc":
        rank.add(name, numbers(9, start=100 * ord(name)))
        rank.finish()
    again = rank.add("b2", numbers(9, start=100 * ord("b")))
    rank.finish()
    assert again.cached_tokens == 8
    assert rank.scheduler.stats().evicted_pages[0] > 0
    assert rank.scheduler.stats().preemptions == 0


def test_an_impossible_prompt_is_refused_and_the_next_one_runs() -> None:
    """Five pages hold 20 tokens, and one more may be sampled: a prompt of 21 ends at once, one of 20 runs."""
    rank = Rank(layout_of(full_pages=5))
    impossible = rank.add("a", numbers(21))
    possible = rank.add("b", numbers(20), max_tokens=9)
    assert rank.scheduler.has_work
    assert rank.scheduler.drain_outputs() == [Output(impossible, (), FinishReason.ERROR)]
    rank.finish()
    assert (len(possible.output), possible.finish) == (1, FinishReason.LENGTH)
    assert rank.scheduler.context_tokens == 21


# --- ends ---------------------------------------------------------------------------------------------


def run_with_eos(prompt_tokens: int, *, ignore_eos: bool = False, stop: bool = False) -> tuple[Request, Scheduler]:
    """A request whose second token ends it, as eos or as a stop token."""
    prompt = numbers(prompt_tokens)
    second = expected_output(prompt, Sampling(max_tokens=2, ignore_eos=True))[0][1]
    layout = layout_of()
    scheduler = Scheduler(layout, max_context_tokens=100, eos_token_ids=frozenset() if stop else frozenset({second}))
    stops = frozenset({second}) if stop else frozenset()
    request = Request("a", prompt, Sampling(max_tokens=6, ignore_eos=ignore_eos, stop_token_ids=stops))
    scheduler.add(request)
    memory = KvMemory(layout)
    while (batch := scheduler.schedule()) is not None:
        scheduler.commit(batch, memory.run(batch))
        scheduler.check_integrity()
    return request, scheduler


def distinct_second(prompt_tokens: int) -> bool:
    first, second = expected_output(numbers(prompt_tokens), Sampling(max_tokens=2, ignore_eos=True))[0]
    return first != second


@pytest.mark.parametrize("prompt_tokens", [n for n in range(5, 14) if distinct_second(n)])
def test_eos_ends_a_request_wherever_the_page_ends(prompt_tokens: int) -> None:
    """The eos token is reported and not computed: prompt + 1 positions are, and their whole pages stay cached."""
    request, scheduler = run_with_eos(prompt_tokens)
    assert (len(request.output), request.finish) == (2, FinishReason.STOP)
    assert scheduler.stats().computed_tokens == prompt_tokens + 1
    assert scheduler.stats().used_pages == ((prompt_tokens + 1) // PAGE,)


def test_stop_tokens_hold_where_eos_is_ignored() -> None:
    """``ignore_eos`` lets eos pass, a stop token id still ends the request."""
    prompt_tokens = next(n for n in range(5, 14) if distinct_second(n))
    passed, _ = run_with_eos(prompt_tokens, ignore_eos=True)
    stopped, _ = run_with_eos(prompt_tokens, ignore_eos=True, stop=True)
    assert (len(passed.output), passed.finish) == (6, FinishReason.LENGTH)
    assert (len(stopped.output), stopped.finish) == (2, FinishReason.STOP)


def test_the_context_limit_counts_prompt_and_output() -> None:
    """A context of 12 leaves 2 tokens behind a prompt of 10, and none behind a prompt of 12."""
    rank = Rank(layout_of(), context=12)
    request = rank.add("a", numbers(10), max_tokens=50, ignore_eos=True)
    refused = rank.add("b", numbers(12))
    rank.finish()
    assert (len(request.output), request.finish) == (2, FinishReason.LENGTH)
    assert refused.finish is FinishReason.ERROR


def test_abort_in_flight_waits_for_the_commit() -> None:
    """Pages of a launched batch stay the request's until it lands.

    Then what it computed is cached and the token is dropped.
    """
    rank = Rank(layout_of())
    request = rank.add("a", numbers(9), max_tokens=5)
    batch = rank.scheduler.schedule()
    assert batch is not None
    assert rank.scheduler.abort("a")
    assert not rank.scheduler.abort("a")
    assert rank.scheduler.drain_outputs() == []
    assert rank.scheduler.stats().used_pages == (3,)
    assert rank.scheduler.stats().evictable_pages == (0,)
    assert not rank.scheduler.reset_cache()
    assert rank.land(batch) == [Output(request, (), FinishReason.ABORT)]
    assert request.output == []
    assert rank.scheduler.stats().used_pages == rank.scheduler.stats().evictable_pages == (2,)
    assert not rank.scheduler.has_work
    assert not rank.scheduler.abort("a")


def test_abort_outside_a_batch_ends_at_once() -> None:
    """A waiting request, and a running one between two steps, are reported by ``drain_outputs``."""
    rank = Rank(layout_of(), max_running=1)
    running = rank.add("a", numbers(9), max_tokens=5)
    waiting = rank.add("b", numbers(9, start=300))
    rank.step()
    assert rank.scheduler.abort("b")
    assert rank.scheduler.abort("a")
    assert [output.request for output in rank.scheduler.drain_outputs()] == [waiting, running]
    assert not rank.scheduler.has_work
    assert rank.scheduler.stats().evictable_pages == (2,)


# --- events -------------------------------------------------------------------------------------------


def test_a_prompt_is_announced_when_it_has_been_read() -> None:
    """Right after prefill, before the answer ends.

    The prompt's whole pages in both groups, of the window its last two only.
    """
    rank = Rank(layout_of(window=9))
    prompt = numbers(22)
    rank.add("a", prompt, max_tokens=8)
    rank.step()
    keys = block_keys(prompt, block_tokens=PAGE, parent=namespace_seed(""))
    full, window = rank.scheduler.take_events()
    assert full == BlockStored(tuple(keys), None, prompt[:20], PAGE, kind="full_attention")
    assert window == BlockStored(
        tuple(keys[3:]), keys[2], prompt[12:20], PAGE, group=1, kind="sliding_window", window_tokens=9
    )
    assert set(rank.scheduler.snapshot_events()) == {full, window}
    assert rank.step()[0] == [("a", 22, 1)]
    assert rank.scheduler.take_events() == ()


def test_reset_forgets_everything_once_nobody_holds_pages() -> None:
    """Reset is refused while a request runs; afterwards it is one event and the next prompt is cold."""
    rank = Rank(layout_of())
    rank.add("a", numbers(9), max_tokens=2)
    rank.step()
    assert not rank.scheduler.reset_cache()
    rank.finish()
    rank.scheduler.take_events()
    assert rank.scheduler.reset_cache()
    assert rank.scheduler.take_events() == (AllBlocksCleared(),)
    assert rank.scheduler.snapshot_events() == ()
    again = rank.add("b", numbers(9))
    rank.finish()
    assert again.cached_tokens == 0


# --- misuse -------------------------------------------------------------------------------------------


def test_misuse_is_told() -> None:
    """A window pool without room for one request, bad requests and steps out of order raise."""
    with pytest.raises(ValueError, match="window pool"):
        Scheduler(layout_of(window=9, window_pages=2), max_context_tokens=10)
    with pytest.raises(ValueError, match="at least 1"):
        Scheduler(layout_of(), max_context_tokens=10, chunk_tokens=0)
    rank = Rank(layout_of())
    with pytest.raises(ValueError, match="at least one prompt token"):
        rank.add("a", ())
    rank.add("a", numbers(3))
    with pytest.raises(ValueError, match="queued already"):
        rank.add("a", numbers(3))
    batch = rank.scheduler.schedule()
    assert batch is not None
    with pytest.raises(RuntimeError, match="not committed"):
        rank.scheduler.schedule()
    with pytest.raises(RuntimeError, match="not the launched batch"):
        rank.scheduler.commit(Batch(()), [])
    with pytest.raises(ValueError, match="do not fit"):
        rank.scheduler.commit(batch, [])
    rank.land(batch)
