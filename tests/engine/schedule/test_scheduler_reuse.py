"""What the scheduler reuses of earlier requests and of siblings, and tells of it; pages worked out by hand."""

from __future__ import annotations

import pytest
from kv_memory import expected_output
from scheduler_rig import PAGE, Rank, layout_of, numbers

from engine_shim.schedule.entry import Entry
from engine_shim.types import NULL_PAGE, Request, Sampling
from router.wire.block_keys import block_keys, namespace_seed
from router.wire.kv_events import AllBlocksCleared, BlockStored


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
