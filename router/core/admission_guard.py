"""Whether holding requests is of any use: learned from what comes back, and from what had to be computed again."""

from __future__ import annotations

from router.core.returns import Conversation, Returns


class Guard:
    """Holding is of use while conversations come back soon and prompts are computed again that had been evicted.

    Both are fading shares with a lower threshold for going off than for going on. Until there is evidence holding is
    on, so that a cold fleet is not flooded before anything is known. Of returns there is evidence after some ten
    seconds. Of evictions there is none before the fleet has computed as much as its pools hold, and none from a
    fleet that holds requests, since what holding saves cannot be seen.
    """

    RETURN_ON, RETURN_OFF = 0.45, 0.35
    EVICTED_ON, EVICTED_OFF = 0.1, 0.03
    #: Seconds over which the share of evictions forgets half.
    EVICTED_HALVE_SECONDS = 120.0

    def __init__(self, returns: Returns | None = None) -> None:
        self.on = True
        self._returns = Returns() if returns is None else returns
        self._evicted_tokens = self._computed_tokens = 0.0
        self._ever_computed_tokens = 0
        self._computed_at = 0.0

    @property
    def return_ratio(self) -> float:
        """Share of conversations that ask again soon after their last answer."""
        return self._returns.ratio

    @property
    def evicted_ratio(self) -> float:
        """Share of computed prompt tokens that had been computed before; 1 while nothing is known."""
        return self._evicted_tokens / self._computed_tokens if self._computed_tokens else 1.0

    def arrived(self, conversation: Conversation, *, now: float) -> None:
        """A request of the conversation came."""
        self._returns.arrived(conversation, now=now)

    def left(self, conversation: Conversation, *, now: float) -> None:
        """It was answered, and nothing else of it runs."""
        self._returns.left(conversation, now=now)

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
        self._returns.give_up(now=now)
        if self.on:
            self.on = self.return_ratio > self.RETURN_OFF and self.evicted_ratio > self.EVICTED_OFF
        else:
            self.on = self.return_ratio > self.RETURN_ON and self.evicted_ratio > self.EVICTED_ON
        return self.on
