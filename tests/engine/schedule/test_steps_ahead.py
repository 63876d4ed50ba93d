"""A step launched before the one in front of it is known: who goes on, who waits, and which pages stay meanwhile."""

from __future__ import annotations

import collections
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from kv_memory import EOS, KvMemory, expected_output

from engine_shim.cache.integrity import IntegrityError
from engine_shim.runner.shadow import ShadowRunner
from engine_shim.schedule.entry import Entry
from engine_shim.schedule.held_back import HeldBack
from engine_shim.schedule.launches import Launches
from engine_shim.schedule.scheduler import Scheduler
from engine_shim.types import (
    Batch,
    CacheGroup,
    CacheLayout,
    Chunk,
    FinishReason,
    GroupKind,
    Request,
    Sampled,
    Sampling,
    SchedulingPolicy,
    WindowTails,
)

PAGE = 4
FULL = CacheLayout(PAGE, (CacheGroup(0, GroupKind.FULL, (1,)),), (60,))
WINDOWED = CacheLayout(PAGE, (CacheGroup(0, GroupKind.FULL, (1,)), CacheGroup(1, GroupKind.WINDOW, (0,), 10)), (60, 30))
RECURRENT = CacheLayout(
    PAGE, (CacheGroup(0, GroupKind.FULL, (1,)), CacheGroup(1, GroupKind.STATE, (0,))), (60, 14), checkpoint_tokens=16
)
RINGS = replace(WINDOWED, window_tails=WindowTails.RING, ring_pages=5)
LAYOUTS = {"full": FULL, "windowed": WINDOWED, "recurrent": RECURRENT, "rings": RINGS}


class Rank:
    """A scheduler over a memory of fingerprints, two steps deep, recounted and shadowed."""

    def __init__(self, layout: CacheLayout, **options: Any) -> None:
        settings = {"max_running": 4, "chunk_tokens": 24, "max_context_tokens": 120, "eos_token_ids": {EOS}}
        self.scheduler = Scheduler(layout, **{**settings, **options})
        self.memory = KvMemory(layout)
        self.runner = ShadowRunner(self.memory, layout, generations=self.scheduler.generations)
        self.flights: collections.deque[tuple[Batch, Any]] = collections.deque()
        self.ended: list[Request] = []
        self.in_vain = 0

    def launch(self, *, ahead: bool) -> Batch | None:
        batch = self.scheduler.schedule_ahead() if ahead else self.scheduler.schedule()
        if batch is not None:
            self.flights.append((batch, self.runner.launch(batch)))
        return batch

    def land(self) -> list[tuple[str, tuple[int, ...]]]:
        batch, landing = self.flights.popleft()
        self.in_vain += sum(chunk.request.finish is not None for chunk in batch.chunks)
        outputs = self.scheduler.commit(batch, landing())
        self.scheduler.check_integrity()
        self.ended += [output.request for output in outputs if output.finish is not None]
        return [(output.request.id, output.tokens) for output in outputs]

    def turn(self) -> None:
        """What an engine does: one step, and as many behind it as can be launched ahead."""
        self.launch(ahead=False)
        while self.flights:
            if len(self.flights) == 1:
                self.launch(ahead=True)
            self.land()


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


def test_what_ran_behind_a_failed_step_is_no_alarm() -> None:
    """It has read what the failed step never wrote: the shadow lets it pass, for it counts for nothing."""
    rank = Rank(FULL)
    rank.scheduler.add(Request("a", tuple(range(1, 11)) * 5, Sampling(2, ignore_eos=True)))
    launch = rank.memory.launch
    rank.memory.launch = lambda batch: lost  # type: ignore[method-assign]
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
