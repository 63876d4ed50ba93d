"""Lanes and arrivals: the clients of a simulated run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from loadtest.simulate.measure import Meter, PolicyResult
from loadtest.simulate.runs import Run
from loadtest.simulate.scenario import Request, Scenario
from loadtest.simulate.workload import ChildPlan, Play, Recording, Shared, child_path, plays
from loadtest.simulate.world import World
from router.core.types import SessionKey


def simulate(recording: Recording, scenario: Scenario, policy: str) -> PolicyResult:
    """One policy's run. The same scenario asks the same of every policy."""
    lanes = 0 if recording.arrivals else scenario.lanes
    meter = Meter(lanes=lanes, window_seconds=scenario.window_seconds)
    world = World(scenario, policy, block_tokens=recording.block_tokens, meter=meter)
    if recording.arrivals:
        _replay(recording, world)
    else:
        shared = Shared()
        for lane in range(lanes):
            _Lane(world, lane, shared, plays(recording, shared, seed=scenario.seed, lane=lane, lanes=lanes)).next_play()
    world.run()
    return meter.result(policy)


class _Lane:
    """One session after another; a turn is asked when the one before, and the subagents it spawned, are done."""

    def __init__(self, world: World, number: int, shared: Shared, coming: Iterator[Play]) -> None:
        self._world = world
        self._number = number
        self._shared = shared
        self._coming = coming

    def next_play(self) -> None:
        """Begin the next session."""
        play = next(self._coming)
        self._wait(play, play.start)

    def _wait(self, play: Play, turn: int) -> None:
        if turn == len(play.shape.turns):
            self.next_play()
            return
        gap_seconds = play.shape.turns[turn].gap_seconds
        self._world.at(self._world.now + gap_seconds, lambda: self._ask(play, turn))

    def _ask(self, play: Play, turn: int) -> None:
        shape = play.shape.turns[turn]
        self._world.ask(
            Request(
                session=SessionKey("", play.name),
                path=play.path(turn),
                prompt_tokens=shape.prompt_tokens,
                output_tokens=shape.output_tokens,
                done=lambda: self._answered(play, turn),
                lane=self._number,
            )
        )

    def _answered(self, play: Play, turn: int) -> None:
        children = play.groups.get(turn, ())
        if not children:
            self._wait(play, turn + 1)
            return
        left = len(children)

        def joined() -> None:
            nonlocal left
            left -= 1
            if not left:
                self._wait(play, turn + 1)

        for number, child in enumerate(children):
            _Child(self._world, self._number, play, f"{turn}.{number}", child, self._shared, joined).ask(0)


class _Child:
    """A subagent: its own conversation, joined by its parent."""

    def __init__(
        self,
        world: World,
        lane: int,
        play: Play,
        agent: str,
        plan: ChildPlan,
        shared: Shared,
        joined: Callable[[], None],
    ) -> None:
        self._world = world
        self._lane = lane
        self._session = SessionKey("", play.name, agent)
        self._plan = plan
        self._head = shared.kinds[plan.kind]
        self._own = Run()
        self._joined = joined

    def ask(self, turn: int) -> None:
        """Its next request, or the end."""
        if turn == len(self._plan.turns):
            self._joined()
            return
        prompt_tokens, output_tokens, _ = self._plan.turns[turn]
        self._world.ask(
            Request(
                session=self._session,
                path=child_path(self._head, self._own, prompt_tokens, block_tokens=self._world.block_tokens),
                prompt_tokens=prompt_tokens,
                output_tokens=output_tokens,
                done=lambda: self._answered(turn + 1),
                lane=self._lane,
                is_main=False,
            )
        )

    def _answered(self, turn: int) -> None:
        gap_seconds = self._plan.turns[turn][2] if turn < len(self._plan.turns) else 0.0
        self._world.at(self._world.now + gap_seconds, lambda: self.ask(turn))


def _replay(recording: Recording, world: World) -> None:
    """An open loop: requests come when they were recorded, however slow the answers are."""
    runs = [Run() for _ in range(recording.runs)]
    first = recording.arrivals[0].at_seconds
    for arrival in recording.arrivals:
        request = Request(
            session=SessionKey("", str(arrival.conversation)),
            path=tuple((runs[number], blocks) for number, blocks in arrival.path),
            prompt_tokens=arrival.prompt_tokens,
            output_tokens=arrival.output_tokens,
            done=lambda: None,
            lane=0,
        )
        when = (arrival.at_seconds - first) / world.scenario.speed_up
        world.at(when, partial(world.ask, request))
