"""What the state machines of forecasts for vLLM have in common: how requests end, and several are served in turn."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

#: Conversations that share heads; a prompt is a beginning of one.
CONVERSATIONS = ("aaaaaaaa", "aaabbbbb", "aaabbccc", "ddddd", "ddeee", "fff", "ggggggg")
PROMPTS = st.tuples(st.sampled_from(CONVERSATIONS), st.integers(1, 8)).map(lambda pair: pair[0][: pair[1]])


class LateEventsMachine(RuleBasedStateMachine):
    """Requests are sent, scheduled in order and ended; their events come late. ``waiting``, ``scheduled`` (their events
    are under way) and ``running`` hold them, as whoever derives from this likes.
    """

    waiting: list[Any]
    scheduled: list[Any]
    running: list[Any]

    def send(self, prompt: str) -> None:
        raise NotImplementedError

    def step(self) -> None:
        raise NotImplementedError

    def deliver(self) -> None:
        raise NotImplementedError

    def end(self, place: int) -> None:
        raise NotImplementedError

    @precondition(lambda self: self.running and not self.scheduled)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        """Nothing unheard of has been scheduled before it: whether its blocks were free by then nobody could know."""
        self.end(data.draw(st.integers(0, len(self.running) - 1)))

    @rule(prompts=st.lists(PROMPTS, min_size=1, max_size=3))
    def serve(self, prompts: list[str]) -> None:
        """Nobody is before them, and their events come at once; all but the last end."""
        for place, prompt in enumerate(prompts):
            if self.waiting or self.scheduled:
                return
            self.send(prompt)
            self.step()
            if self.scheduled:
                self.deliver()
            if not self.waiting and not self.scheduled and place + 1 < len(prompts):
                self.end(len(self.running) - 1)
