"""Whether conversations come back soon, as it is learned: agents do, readers do not, single questions never."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from router.core.by_model import ByModel
from router.core.types import SessionKey

#: A model's name and who asks it.
Conversation = tuple[str, SessionKey]

#: The prior: so many returns of as many departures.
_PRIOR_RETURNS = 10.0
#: What is known of all conversations counts for as much as so many departures of those that have come back before.
_FEW_DEPARTURES = 5.0


@dataclass(slots=True)
class _Shares:
    """Fading counts of one model's departures: of all, and of conversations that had come back before."""

    returned: float = _PRIOR_RETURNS
    departed: float = _PRIOR_RETURNS
    again_returned: float = 0.0
    again_departed: float = 0.0
    counted_at: float = 0.0


class Returns:
    """Hears of conversations' requests: that one has ``arrived``, and that one has ``left``, when nothing else of its
    conversation runs. Either may be told twice; what failed has not left, so that trying again is no return. One
    thread, one monotonic clock.
    """

    #: An agent's next request comes within seconds (half of them within ten), a reader's next message after minutes.
    SOON_SECONDS = 10.0
    #: Departures over which the share of all of a model forgets half.
    HALVE = 200
    #: Seconds over which that of who has come back before does: it must not matter how much else is asked meanwhile.
    AGAIN_HALVE_SECONDS = 120.0
    #: So many conversations are known when they come back, those that left last.
    MOST_REMEMBERED = 20_000

    def __init__(self) -> None:
        self._fade = 0.5 ** (1 / self.HALVE)
        self._left: OrderedDict[Conversation, float] = OrderedDict()
        self._has_come_back: OrderedDict[Conversation, bool] = OrderedDict()
        self._shares = ByModel(_Shares)

    def ratio(self, model: str) -> float:
        """Share of the model's conversations that ask again soon after an answer; 1 while nothing is known."""
        shares = self._shares.get(model)
        return 1.0 if shares is None else shares.returned / shares.departed

    def again_ratio(self, model: str) -> float:
        """The same of those alone that had come back before, however late: single questions, however many, say nothing
        of the agents beside them. While hardly any are known it is the share of all.
        """
        ratio, shares = self.ratio(model), self._shares.get(model)
        if shares is None:
            return ratio
        return (shares.again_returned + _FEW_DEPARTURES * ratio) / (shares.again_departed + _FEW_DEPARTURES)

    def arrived(self, conversation: Conversation, *, now: float) -> None:
        """A request of the conversation came."""
        self.give_up(now=now)
        if self._left.pop(conversation, None) is not None:
            self._count(conversation, returned=1.0, now=now)
        if conversation in self._has_come_back:
            self._has_come_back[conversation] = True

    def left(self, conversation: Conversation, *, now: float) -> None:
        """It was answered, and nothing else of it runs."""
        self.give_up(now=now)
        self._left[conversation] = now
        self._left.move_to_end(conversation)
        self._has_come_back.setdefault(conversation, False)
        self._has_come_back.move_to_end(conversation)
        if len(self._has_come_back) > self.MOST_REMEMBERED:
            self._has_come_back.popitem(last=False)

    def give_up(self, *, now: float) -> None:
        """Who has been away for longer has not come back soon."""
        while self._left:
            conversation, left_at = next(iter(self._left.items()))
            if now - left_at <= self.SOON_SECONDS:
                return
            del self._left[conversation]
            self._count(conversation, returned=0.0, now=now)

    def _count(self, conversation: Conversation, *, returned: float, now: float) -> None:
        shares = self._shares.heard(conversation[0], now=now)
        shares.returned = shares.returned * self._fade + returned
        shares.departed = shares.departed * self._fade + 1.0
        fade = 0.5 ** ((now - shares.counted_at) / self.AGAIN_HALVE_SECONDS)
        shares.counted_at = now
        shares.again_returned *= fade
        shares.again_departed *= fade
        if self._has_come_back.get(conversation, False):
            shares.again_returned += returned
            shares.again_departed += 1.0
