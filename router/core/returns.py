"""Whether conversations come back soon, as it is learned: agents do, readers do not."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from router.core.by_model import ByModel
from router.core.types import SessionKey

#: A model's name and who asks it.
Conversation = tuple[str, SessionKey]

#: The prior: so many returns of as many departures.
_PRIOR_RETURNS = 10.0


@dataclass(slots=True)
class _Share:
    """Fading counts of one model's conversations."""

    returned: float = _PRIOR_RETURNS
    departed: float = _PRIOR_RETURNS


class Returns:
    """Hears of conversations' requests: that one has ``arrived``, and that one has ``left``, when nothing else of its
    conversation runs. Either may be told twice; what failed has not left, so that trying again is no return. One
    thread, one monotonic clock.
    """

    #: An agent's next request comes within seconds (half of them within ten), a reader's next message after minutes.
    SOON_SECONDS = 10.0
    #: Observations of a model over which its share forgets half.
    HALVE = 200

    def __init__(self) -> None:
        self._fade = 0.5 ** (1 / self.HALVE)
        self._left: OrderedDict[Conversation, float] = OrderedDict()
        self._shares = ByModel(_Share)

    def ratio(self, model: str) -> float:
        """Share of the model's conversations that ask again soon after their last answer; 1 while nothing is known."""
        share = self._shares.get(model)
        return 1.0 if share is None else share.returned / share.departed

    def arrived(self, conversation: Conversation, *, now: float) -> None:
        """A request of the conversation came."""
        self.give_up(now=now)
        if self._left.pop(conversation, None) is not None:
            self._count(conversation, returned=1.0, now=now)

    def left(self, conversation: Conversation, *, now: float) -> None:
        """It was answered, and nothing else of it runs."""
        self.give_up(now=now)
        self._left[conversation] = now
        self._left.move_to_end(conversation)

    def give_up(self, *, now: float) -> None:
        """Who has been away for longer has not come back soon."""
        while self._left:
            conversation, left_at = next(iter(self._left.items()))
            if now - left_at <= self.SOON_SECONDS:
                return
            del self._left[conversation]
            self._count(conversation, returned=0.0, now=now)

    def _count(self, conversation: Conversation, *, returned: float, now: float) -> None:
        share = self._shares.heard(conversation[0], now=now)
        share.returned = share.returned * self._fade + returned
        share.departed = share.departed * self._fade + 1.0
