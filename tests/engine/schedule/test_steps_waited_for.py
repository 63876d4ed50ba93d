"""What no step is launched ahead of: drafts, grammars, loads, newcomers, pages that have run out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from ahead_rank import FULL, WINDOWED, Rank

from engine_shim.schedule.entry import Entry
from engine_shim.schedule.launches import Launches
from engine_shim.types import (
    Batch,
    Chunk,
    Request,
    Sampling,
    SchedulingPolicy,
    WindowTails,
)


@pytest.mark.parametrize(
    "needy",
    [
        Sampling(20, ignore_eos=True, presence_penalty=0.5),
        Sampling(20, ignore_eos=True, frequency_penalty=0.5),
        Sampling(20, ignore_eos=True, repetition_penalty=1.1),
    ],
)
def test_whose_next_token_depends_on_the_last_ones_is_waited_for(needy: Sampling) -> None:
    """Nothing is launched ahead while such a request decodes, not even for those who need nothing."""
    rank = Rank(FULL)
    rank.scheduler.add(Request("a", (1, 2, 3), Sampling(20, ignore_eos=True)))
    rank.scheduler.add(Request("b", (2, 2, 3), needy))
    rank.launch(ahead=False)
    assert rank.launch(ahead=True) is None
    rank.land()
    assert rank.launch(ahead=False) is not None
    assert rank.launch(ahead=True) is None


class AnyToken:
    """A grammar that lets everything pass."""

    def fitting(self, output: Sequence[int], drafts: Sequence[int]) -> int:
        return len(drafts)

    def masks(self, output: Sequence[int], drafts: Sequence[int]) -> list[bytes]:
        return [b"\xff\xff"] * (1 + len(drafts))


def test_who_follows_a_grammar_is_waited_for() -> None:
    """What may come next depends on what has come."""
    rank = Rank(FULL)
    rank.scheduler.add(Request("a", (1, 2, 3), Sampling(20, ignore_eos=True), constraint=AnyToken()))
    rank.launch(ahead=False)
    assert rank.launch(ahead=True) is None


def test_a_step_that_waits_for_a_load_is_waited_for() -> None:
    """What lands with it is then the request's, and may be stored."""
    request = Request("a", (1, 2, 3), Sampling(20))
    chunk = Chunk(request, start=0, count=3, tables=([1],), samples=True, draws=0)
    for loads, can in [((), True), ((7,), False)]:
        launches = Launches(FULL, drafts=False)
        launches.add(Batch((chunk,), loads), [Entry(request, (0, 1))])
        assert launches.can_be_followed() is can


def test_nobody_goes_ahead_of_one_who_has_no_page_left() -> None:
    """Where pages run out somebody has to give way, which is for the next step to choose: all wait for that."""
    rank = Rank(replace(FULL, pages=(5,)))
    rank.scheduler.add(Request("a", (1, 2, 3), Sampling(14, ignore_eos=True)))
    rank.scheduler.add(Request("b", (2, 2, 3, 4, 5), Sampling(12, ignore_eos=True)))
    rank.launch(ahead=False)
    steps = 0
    while (batch := rank.launch(ahead=True)) is not None:
        assert [chunk.request.id for chunk in batch.chunks] == ["a", "b"]
        rank.land()
        steps += 1
    assert (steps, rank.ended) == (3, [])
    rank.land()
    rank.launch(ahead=False)
    assert rank.scheduler.stats().preemptions == 1


def test_drafts_are_waited_for() -> None:
    """How many of them hold decides where the next step begins; nor does one without any go ahead, behind a prompt."""
    rank = Rank(FULL, draft_tokens=3)
    rank.scheduler.add(Request("a", (1, 2, 3), Sampling(20, ignore_eos=True)))
    rank.launch(ahead=False)
    assert rank.launch(ahead=True) is None
    rank.land()
    drafted = rank.launch(ahead=False)
    assert drafted is not None
    assert drafted.chunks[0].room > 0
    assert rank.launch(ahead=True) is None


def test_whoever_can_be_admitted_is_not_passed_over() -> None:
    """A newcomer is in the next step but one: nothing is launched ahead while he could run."""
    rank = Rank(FULL)
    rank.scheduler.add(Request("a", (1, 2, 3), Sampling(20, ignore_eos=True)))
    rank.launch(ahead=False)
    assert rank.launch(ahead=True) is not None
    rank.scheduler.add(Request("b", (2, 2, 3), Sampling(20, ignore_eos=True)))
    rank.land()
    assert rank.launch(ahead=True) is None
    rank.land()
    batch = rank.launch(ahead=False)
    assert batch is not None
    assert {chunk.request.id for chunk in batch.chunks} == {"a", "b"}


def first_token_of(rank: Rank, name: str, *, overlaps: bool) -> int:
    """How many steps had been launched when a request was told its first token."""
    steps = 0
    while rank.scheduler.has_work:
        steps += rank.launch(ahead=False) is not None
        while rank.flights:
            if overlaps and len(rank.flights) == 1:
                steps += rank.launch(ahead=True) is not None
            if any(told == name for told, _ in rank.land()):
                return steps
    raise AssertionError("never told")


@pytest.mark.parametrize("tails", [WindowTails.STORED, WindowTails.REBUILT])
def test_pages_that_a_window_lets_go_of_let_the_next_one_in(tails: WindowTails) -> None:
    """Who found no room is not left waiting until somebody ends: steps ahead cost him two at most."""
    steps = []
    for overlaps in (False, True):
        rank = Rank(replace(WINDOWED, pages=(200, 13), window_tails=tails), chunk_tokens=64, max_context_tokens=400)
        for name, length in {"a": 30, "b": 26}.items():
            prompt = tuple((i * 5 + ord(name)) % 11 for i in range(length))
            rank.scheduler.add(Request(name, prompt, Sampling(200, ignore_eos=True)))
        steps.append(first_token_of(rank, "b", overlaps=overlaps))
    assert steps[0] == 2
    assert steps[1] <= 4


def test_whoever_leaves_lets_the_next_one_in() -> None:
    """Short of pages, a newcomer is asked again once a request has left, though another one runs on."""
    steps = []
    for overlaps in (False, True):
        rank = Rank(replace(FULL, pages=(21,)), chunk_tokens=64)
        for name, tokens in {"a": 40, "short": 4, "b": 3}.items():
            prompt = tuple((i * 5 + ord(name[0])) % 11 for i in range(30))
            rank.scheduler.add(Request(name, prompt, Sampling(tokens, ignore_eos=True)))
        steps.append(first_token_of(rank, "b", overlaps=overlaps))
    assert 4 <= steps[0] <= steps[1] <= steps[0] + 2


def test_a_newcomer_in_front_of_one_who_found_no_room_is_asked() -> None:
    """He may need less, so that nothing is launched ahead before he has been asked."""
    rank = Rank(replace(FULL, pages=(12,)), chunk_tokens=64, policy=SchedulingPolicy.PRIORITY)
    rank.scheduler.add(Request("a", (1, 2, 3), Sampling(30, ignore_eos=True)))
    rank.scheduler.add(Request("large", tuple(i % 11 for i in range(44)), Sampling(4), priority=1))
    rank.launch(ahead=False)
    assert rank.launch(ahead=True) is not None
    rank.land()
    rank.scheduler.add(Request("small", (4, 5), Sampling(4)))
    assert rank.launch(ahead=True) is None
    rank.land()
    batch = rank.launch(ahead=False)
    assert batch is not None
    assert {chunk.request.id for chunk in batch.chunks} == {"a", "small"}
