"""Whether conversations come back soon, as it is learned: agents do, readers do not."""

from __future__ import annotations

from collections import OrderedDict

from router.core.types import SessionKey

#: A model's name and who asks it.
Conversation = tuple[str, SessionKey]


class Returns:
    """Hears of conversations' requests: that one has ``arrived``, and that one has ``left``, when nothing else of its
    conversation runs. Either may be told twice; what failed has not left, so that trying again is no return. One
    thread, one monotonic clock.
    """

    #: An agent's next request comes within seconds (half of them within ten), a reader's next message after minutes.
    SOON_SECONDS = 10.0
    #: Observations over which the share forgets half.
    HALVE = 200
    #: The prior: so many returns of as many departures.
    PRIOR_RETURNS = 10.0

    def __init__(self) -> None:
        self._fade = 0.5 ** (1 / self.HALVE)
        self._left: OrderedDict[Conversation, float] = OrderedDict()
        self._returned = self._departed = self.PRIOR_RETURNS

    @property
    def ratio(self) -> float:
        """Share of conversations that ask again soon after their last answer."""
        return self._returned / self._departed

    def arrived(self, conversation: Conversation, *, now: float) -> None:
        """A request of the conversation came."""
        self.give_up(now=now)
        if self._left.pop(conversation, None) is not None:
            self._count(returned=1.0)

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
            self._count(returned=0.0)

    def _count(self, *, returned: float) -> None:
        self._returned = self._returned * self._fade + returned
        self._departed = self._departed * self._fade + 1.0
