"""Whether holding requests is of any use: learned from what comes back, and from what had to be computed again."""

from __future__ import annotations

from collections import OrderedDict

from router.core.types import SessionKey

#: A model's name and who asks it.
Conversation = tuple[str, SessionKey]


class Guard:
    """Holding is of use while conversations come back soon and prompts are computed again that had been evicted.

    Both are fading shares with a lower threshold for going off than for going on. Until there is evidence holding is
    on, so that a cold fleet is not flooded before anything is known. Of returns there is evidence after some ten
    seconds. Of evictions there is none before the fleet has computed as much as its pools hold, and none from a
    fleet that holds requests, since what holding saves cannot be seen.
    """

    #: An agent's next request comes within seconds (half of them within ten), a reader's next message after minutes.
    RETURN_SECONDS = 10.0
    RETURN_ON, RETURN_OFF = 0.45, 0.35
    EVICTED_ON, EVICTED_OFF = 0.1, 0.03
    #: Observations, and seconds, over which the shares forget half.
    RETURNS_HALVE = 200
    EVICTED_HALVE_SECONDS = 120.0
    #: The prior: so many returns of as many departures.
    PRIOR_RETURNS = 10.0

    def __init__(self) -> None:
        self.on = True
        self._left: OrderedDict[Conversation, float] = OrderedDict()
        self._returned = self._departed = self.PRIOR_RETURNS
        self._evicted_tokens = self._computed_tokens = 0.0
        self._ever_computed_tokens = 0
        self._computed_at = 0.0

    @property
    def return_ratio(self) -> float:
        """Share of conversations that ask again soon after their last answer."""
        return self._returned / self._departed

    @property
    def evicted_ratio(self) -> float:
        """Share of computed prompt tokens that had been computed before; 1 while nothing is known."""
        return self._evicted_tokens / self._computed_tokens if self._computed_tokens else 1.0

    def arrived(self, conversation: Conversation, *, now: float) -> None:
        """A request of the conversation came."""
        self._give_up(now)
        if self._left.pop(conversation, None) is not None:
            self._count(returned=1.0)

    def left(self, conversation: Conversation, *, now: float) -> None:
        """It was answered, and nothing else of it runs."""
        self._left[conversation] = now
        self._left.move_to_end(conversation)

    def computed(self, *, tokens: int, evicted_tokens: int, pool_tokens: int, is_holding: bool, now: float) -> None:
        """A prompt needed so many tokens computed, of which so many had been computed before.

        ``pool_tokens`` is what all ranks hold together; ``is_holding`` if requests are held at this moment.
        """
        self._ever_computed_tokens += tokens
        if self._ever_computed_tokens <= pool_tokens or is_holding:
            return
        fade = 0.5 ** ((now - self._computed_at) / self.EVICTED_HALVE_SECONDS)
        self._computed_at = now
        self._computed_tokens = self._computed_tokens * fade + tokens
        self._evicted_tokens = self._evicted_tokens * fade + evicted_tokens

    def decide(self, *, now: float) -> bool:
        """Whether to hold from now on."""
        self._give_up(now)
        if self.on:
            self.on = self.return_ratio > self.RETURN_OFF and self.evicted_ratio > self.EVICTED_OFF
        else:
            self.on = self.return_ratio > self.RETURN_ON and self.evicted_ratio > self.EVICTED_ON
        return self.on

    def _give_up(self, now: float) -> None:
        """Who has been away for longer has not come back soon."""
        while self._left:
            conversation, left_at = next(iter(self._left.items()))
            if now - left_at <= self.RETURN_SECONDS:
                return
            del self._left[conversation]
            self._count(returned=0.0)

    def _count(self, *, returned: float) -> None:
        fade = 0.5 ** (1 / self.RETURNS_HALVE)
        self._returned = self._returned * fade + returned
        self._departed = self._departed * fade + 1.0
