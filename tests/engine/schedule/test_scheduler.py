"""The scheduler's rules one at a time, with pages, chunks and boundaries worked out by hand."""

from __future__ import annotations

import pytest
from kv_memory import KvMemory, expected_output
from scheduler_rig import PAGE, Rank, layout_of, numbers

from engine_shim.schedule.scheduler import Scheduler
from engine_shim.types import Batch, FinishReason, Output, Request, Sampling

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
