"""A step launched before the one in front of it is known: who goes on, who waits, and which pages stay meanwhile."""

from __future__ import annotations

import collections
import random
from collections.abc import Callable
from typing import Any

import pytest
from ahead_rank import FULL, LAYOUTS, PAGE, RECURRENT, WINDOWED, Rank
from kv_memory import expected_output

from engine_shim.cache.integrity import IntegrityError
from engine_shim.schedule.held_back import HeldBack
from engine_shim.schedule.launches import Launches
from engine_shim.types import (
    Batch,
    CacheLayout,
    FinishReason,
    Request,
    Sampled,
    Sampling,
)


def drive(seed: int, *, layout: CacheLayout) -> Rank:
    """Conversations that grow, fork, end by themselves and are aborted; nearly every step is launched ahead."""
    rng = random.Random(seed)
    rank = Rank(layout)
    histories = [tuple(rng.randrange(11) for _ in range(40)) for _ in range(2)]
    for name in range(60):
        history = rng.choice(histories[-4:])
        cut = len(history) if rng.random() < 0.6 else rng.randrange(len(history))
        # As often as not somebody asks what another has just asked: their pages are twins.
        prompt = (*history[:cut][:80], *(rng.randrange(3) for _ in range(rng.randint(1, 9))))
        for twin in range(rng.randint(1, 2)):
            sampling = Sampling(rng.randint(4, 30), ignore_eos=rng.random() < 0.3)
            rank.scheduler.add(Request(f"{name}.{twin}", prompt, sampling))
        for _ in range(rng.randint(0, 3)):
            if rng.random() < 0.2:
                rank.launch(ahead=False)
                rank.launch(ahead=True) if rank.flights else None
                rank.scheduler.abort(f"{rng.randint(0, name)}.0")
                while rank.flights:
                    rank.land()
            rank.turn()
        rank.scheduler.drain_outputs()
        histories += [tuple(request.tokens) for request in rank.ended[-2:]]
    while rank.scheduler.has_work:
        rank.turn()
        rank.scheduler.drain_outputs()
    return rank


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("seed", range(3))
def test_answers_are_those_of_steps_one_by_one(seed: int, layout: CacheLayout) -> None:
    """Every request ends as it must though steps ran past ends that nobody had seen, and nothing is left behind."""
    rank = drive(seed, layout=layout)
    for request in rank.ended:
        answer, reason = expected_output(request.prompt, request.sampling, context_tokens=120)
        if request.finish is FinishReason.ABORT:
            assert request.output == answer[: len(request.output)]
        else:
            assert (request.output, request.finish) == (answer, reason)
    stats = rank.scheduler.stats()
    assert stats.used_pages == stats.evictable_pages
    assert stats.evicted_pages[0] > 100, "nothing was used again"
    assert rank.in_vain > 4, "nobody ended unseen"


def freed_in_flight(patch: pytest.MonkeyPatch) -> None:
    """A page that is given up is free at once, whatever is launched."""
    patch.setattr(HeldBack, "give_up", lambda self, group, pages: self._pools[group].free(pages))


def left_in_flight(patch: pytest.MonkeyPatch) -> None:
    """Who has ended gives up lock and pages though a launched step still runs for him."""
    end = Launches.end

    def bad(self: Launches, batch: Batch) -> Any:
        launch = end(self, batch)
        for entry in launch.entries:
            entry.launches = 0
        return launch

    patch.setattr(Launches, "end", bad)


def follows_everything(patch: pytest.MonkeyPatch) -> None:
    """A step is launched ahead though the state it reads is about to be kept."""
    patch.setattr(Launches, "can_be_followed", lambda self: len(self) == 1)


@pytest.mark.parametrize(
    ("plant", "layout"),
    [
        (freed_in_flight, FULL),
        (freed_in_flight, WINDOWED),
        (left_in_flight, FULL),
        (left_in_flight, RECURRENT),
        (follows_everything, RECURRENT),
    ],
)
def test_a_planted_bug_is_found(
    plant: Callable[[pytest.MonkeyPatch], None], layout: CacheLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of three runs ends with an alarm."""
    plant(monkeypatch)
    with pytest.raises((IntegrityError, AssertionError, KeyError, ValueError, RuntimeError)):
        collections.deque(drive(seed, layout=layout) for seed in range(3))


def test_an_end_that_nobody_saw_costs_one_position_and_keeps_the_pages_for_it() -> None:
    """The answer is told with the step that sampled it; the request's pages come back one step later."""
    rank = Rank(FULL)
    prompts = ((1, 2, 3, 4, last) for last in range(11))
    prompt = next(each for each in prompts if len(expected_output(each, Sampling(50))[0]) > 6)
    answer, reason = expected_output(prompt, Sampling(50))
    assert reason is FinishReason.STOP
    rank.scheduler.add(Request("a", prompt, Sampling(50)))
    rank.launch(ahead=False)
    told: list[int] = []
    while len(told) < len(answer):
        ahead = rank.launch(ahead=True)
        assert ahead is not None
        assert ahead.chunks[0].awaits_token
        told += rank.land()[0][1]
    assert told == answer
    assert [request.finish for request in rank.ended] == [FinishReason.STOP]
    assert rank.scheduler.has_work
    stored = len(prompt) + len(answer) - 1
    assert rank.scheduler.stats().used_pages == (-(-(stored + 1) // PAGE),)
    assert rank.land() == []
    assert rank.in_vain == 1
    assert not rank.scheduler.has_work
    assert rank.scheduler.stats().used_pages == (stored // PAGE,)


def test_an_end_by_length_is_foreseen() -> None:
    """The last token that a request may have is not followed by anything."""
    rank = Rank(FULL)
    rank.scheduler.add(Request("a", (1, 2, 3), Sampling(3, ignore_eos=True)))
    rank.turn()
    assert (len(rank.ended), rank.in_vain) == (1, 0)


def test_a_prompt_goes_on_behind_its_own_chunk() -> None:
    """The next chunk of a prompt is launched ahead: its tokens are known."""
    rank = Rank(FULL)
    rank.scheduler.add(Request("a", tuple(range(1, 11)) * 6, Sampling(2, ignore_eos=True)))
    rank.launch(ahead=False)
    batch = rank.launch(ahead=True)
    assert batch is not None
    assert [(chunk.start, chunk.count, chunk.awaits_token) for chunk in batch.chunks] == [(24, 24, False)]
    rank.land()
    last = rank.launch(ahead=True)
    assert last is not None
    assert [(chunk.start, chunk.count, chunk.samples) for chunk in last.chunks] == [(48, 12, True)]


def test_a_failed_step_takes_the_one_behind_it_along() -> None:
    """Its requests end, with nothing left behind, and the rank goes on."""
    rank = Rank(FULL)
    for name in "ab":
        rank.scheduler.add(Request(name, (1, 2, 3, ord(name) % 11), Sampling(9, ignore_eos=True)))
    rank.launch(ahead=False)
    assert rank.launch(ahead=True) is not None
    batch, _ = rank.flights.popleft()
    rank.flights.clear()
    rank.memory.forget()
    ended = {output.request.id: output.finish for output in rank.scheduler.fail(batch)}
    assert ended == dict.fromkeys("ab", FinishReason.ERROR)
    rank.scheduler.check_integrity()
    assert rank.scheduler.stats().used_pages == (0,)
    rank.scheduler.add(Request("c", (1, 2, 3), Sampling(9, ignore_eos=True)))
    while rank.scheduler.has_work:
        rank.turn()
    assert rank.ended[0].output == expected_output((1, 2, 3), Sampling(9, ignore_eos=True))[0]


def test_who_is_aborted_in_a_step_that_fails_has_been_aborted() -> None:
    """The step's error is that of the others."""
    rank = Rank(FULL)
    for name in "ab":
        rank.scheduler.add(Request(name, (1, 2, 3, ord(name) % 11), Sampling(9, ignore_eos=True)))
    rank.launch(ahead=False)
    assert rank.scheduler.abort("a")
    batch, _ = rank.flights.popleft()
    ended = {output.request.id: output.finish for output in rank.scheduler.fail(batch)}
    assert ended == {"a": FinishReason.ABORT, "b": FinishReason.ERROR}


@pytest.mark.parametrize("at_launch", [False, True])
def test_what_ran_behind_a_failed_step_is_no_alarm(*, at_launch: bool) -> None:
    """It has read what the failed step never wrote: the shadow lets it pass, for it counts for nothing."""
    rank = Rank(FULL)
    rank.scheduler.add(Request("a", tuple(range(1, 11)) * 5, Sampling(2, ignore_eos=True)))
    launch = rank.memory.launch
    rank.memory.launch = lambda batch: lost() if at_launch else lost  # type: ignore[method-assign]
    failing = rank.launch(ahead=False)
    rank.memory.launch = lambda batch: list  # type: ignore[method-assign]
    assert rank.launch(ahead=True) is not None
    rank.memory.launch = launch  # type: ignore[method-assign]
    (_, first), (_, second) = rank.flights
    rank.flights.clear()
    with pytest.raises(RuntimeError, match="lost"):
        first()
    assert second() == []
    assert failing is not None
    rank.scheduler.fail(failing)
    rank.scheduler.add(Request("b", tuple(range(1, 11)) * 5, Sampling(2, ignore_eos=True)))
    while rank.scheduler.has_work:
        rank.turn()
    assert [request.id for request in rank.ended] == ["b"]


def test_a_step_whose_requests_have_all_been_aborted_is_no_alarm() -> None:
    """What it was to go on with has been given to nobody, so there is nothing to book."""
    rank = Rank(FULL)
    rank.scheduler.add(Request("a", (1, 2, 3), Sampling(9, ignore_eos=True)))
    rank.launch(ahead=False)
    assert rank.launch(ahead=True) is not None
    assert rank.scheduler.abort("a")
    while rank.flights:
        rank.land()
    assert [request.finish for request in rank.ended] == [FinishReason.ABORT]
    assert not rank.scheduler.has_work


def lost() -> list[Sampled]:
    raise RuntimeError("lost")


def test_steps_are_committed_in_their_order() -> None:
    """The one behind cannot be booked before the one in front of it."""
    rank = Rank(FULL)
    rank.scheduler.add(Request("a", (1, 2, 3), Sampling(20, ignore_eos=True)))
    rank.launch(ahead=False)
    behind = rank.launch(ahead=True)
    assert behind is not None
    with pytest.raises(RuntimeError, match="not the launched batch"):
        rank.scheduler.commit(behind, [Sampled((1,))])


@pytest.mark.parametrize("seed", range(2))
def test_the_device_reads_awaited_tokens_before_the_host_does(seed: int) -> None:
    """Where the device is quick it takes each awaited token from itself, and the answers are the same."""
    rng = random.Random(seed)
    rank = Rank(FULL)
    for name in range(4):
        prompt = tuple(rng.randrange(1, 11) for _ in range(5))
        rank.scheduler.add(Request(str(name), prompt, Sampling(12, ignore_eos=True)))
    rank.launch(ahead=False)
    while rank.flights:
        rank.launch(ahead=True)
        rank.memory.hurry()
        rank.land()
    assert rank.memory.ran_ahead >= 40
    for request in rank.ended:
        assert request.output == expected_output(request.prompt, request.sampling)[0]
