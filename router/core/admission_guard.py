"""Whether holding requests is of any use: learned from what comes back, and from what had to be computed again."""

from __future__ import annotations

from dataclasses import dataclass

from router.core.by_model import ByModel
from router.core.returns import Conversation, Returns


@dataclass(slots=True)
class _Use:
    """Of holding requests for one model: the verdict, and fading counts of what was computed."""

    on: bool = True
    evicted_tokens: float = 0.0
    computed_tokens: float = 0.0
    computed_at: float = 0.0
    ever_computed_tokens: int = 0

    @property
    def evicted_ratio(self) -> float:
        return self.evicted_tokens / self.computed_tokens if self.computed_tokens else 1.0


class Guard:
    """Holding is of use while conversations come back soon and prompts are computed again that had been evicted.

    Each model is judged by its own traffic, and by the conversations that have come back before: those have contexts to
    lose, whatever is asked once beside them. How much they have to lose the evictions tell, a share of all that is
    computed. Both are fading shares with a lower threshold for going off than for going on. Until there is evidence
    holding is on, so that a cold fleet is not flooded before anything is known. Of returns there is evidence after some
    ten seconds. Of evictions there is none before the ranks have computed as much as their pools hold, and none from
    ranks for which requests are held, since what holding saves cannot be seen.
    """

    RETURN_ON, RETURN_OFF = 0.4, 0.2
    EVICTED_ON, EVICTED_OFF = 0.1, 0.03
    #: Seconds over which the share of evictions forgets half.
    EVICTED_HALVE_SECONDS = 120.0

    def __init__(self, returns: Returns | None = None) -> None:
        self._returns = Returns() if returns is None else returns
        self._uses = ByModel(_Use)

    @property
    def is_any_on(self) -> bool:
        """Whether requests for some model are held when there is no room."""
        return not len(self._uses) or any(use.on for use in self._uses)

    def is_on(self, model: str) -> bool:
        """What was decided last."""
        use = self._uses.get(model)
        return use is None or use.on

    def return_ratio(self, model: str) -> float:
        """Of the model's conversations that have come back before, the share that ask again soon after an answer."""
        return self._returns.again_ratio(model)

    def evicted_ratio(self, model: str) -> float:
        """Share of computed prompt tokens that had been computed before; 1 while nothing is known."""
        use = self._uses.get(model)
        return 1.0 if use is None else use.evicted_ratio

    def arrived(self, conversation: Conversation, *, now: float) -> None:
        """A request of the conversation came."""
        self._returns.arrived(conversation, now=now)

    def left(self, conversation: Conversation, *, now: float) -> None:
        """It was answered, and nothing else of it runs."""
        self._returns.left(conversation, now=now)

    def computed(
        self, model: str, *, tokens: int, evicted_tokens: int, pool_tokens: int, is_holding: bool, now: float
    ) -> None:
        """A prompt needed so many tokens computed, of which so many had been computed before.

        ``pool_tokens`` is what all ranks of the model hold together; ``is_holding`` if requests wait at this moment for
        a rank like the one that computed it.
        """
        use = self._uses.heard(model, now=now)
        use.ever_computed_tokens += tokens
        if use.ever_computed_tokens <= pool_tokens or is_holding:
            return
        fade = 0.5 ** ((now - use.computed_at) / self.EVICTED_HALVE_SECONDS)
        use.computed_at = now
        use.computed_tokens = use.computed_tokens * fade + tokens
        use.evicted_tokens = use.evicted_tokens * fade + evicted_tokens

    def decide(self, model: str, *, now: float) -> bool:
        """Whether to hold requests for the model from now on."""
        self._returns.give_up(now=now)
        use, returns = self._uses.heard(model, now=now), self._returns.again_ratio(model)
        if use.on:
            use.on = returns > self.RETURN_OFF and use.evicted_ratio > self.EVICTED_OFF
        else:
            use.on = returns > self.RETURN_ON and use.evicted_ratio > self.EVICTED_ON
        return use.on
