"""What is learned of each model apart: traffic of one says nothing of another's."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

Learned = TypeVar("Learned")


class ByModel(Generic[Learned]):
    """One value a model, the model heard of longest ago first; bounded, and forgetful of models that are gone: nobody
    asks for them any more. A model that is not known, or not any more, begins as ``new``. One monotonic clock.
    """

    MOST_MODELS = 1024
    IDLE_SECONDS = 3600.0

    def __init__(self, new: Callable[[], Learned]) -> None:
        self._new = new
        self._learned: OrderedDict[str, Learned] = OrderedDict()
        self._heard_at: dict[str, float] = {}

    def __len__(self) -> int:
        return len(self._learned)

    def __iter__(self) -> Iterator[Learned]:
        return iter(self._learned.values())

    def get(self, model: str) -> Learned | None:
        """What is known of it."""
        return self._learned.get(model)

    def heard(self, model: str, *, now: float) -> Learned:
        """Something happens with the model: what is known of it, to be changed."""
        learned = self._learned.get(model)
        if learned is None:
            learned = self._learned[model] = self._new()
        self._learned.move_to_end(model)
        self._heard_at[model] = now
        while len(self) > self.MOST_MODELS or now - self._heard_at[next(iter(self._learned))] > self.IDLE_SECONDS:
            gone, _ = self._learned.popitem(last=False)
            del self._heard_at[gone]
        return learned
