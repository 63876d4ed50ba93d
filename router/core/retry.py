"""How much may be tried again: a share of what clients send, and a few besides.

When a whole fleet fails, each request tried three times is three times the load on it. So retries are paid from a
budget into which each request puts a fraction (Finagle's retry budget; Envoy and gRPC have the same).
"""

from __future__ import annotations


class RetryBudget:
    """A balance of retries. Starts full, so that a quiet router may try again."""

    __slots__ = ("_balance", "_ratio", "_reserve")

    def __init__(self, *, ratio: float, reserve: int) -> None:
        """``ratio``: retries a request earns. ``reserve``: the most that is saved, and at hand in the beginning."""
        self._ratio = ratio
        self._reserve = float(reserve)
        self._balance = float(reserve)

    @property
    def balance(self) -> float:
        """Retries that may be made now."""
        return self._balance

    def earn(self) -> None:
        """A client's request has come."""
        self._balance = min(self._reserve, self._balance + self._ratio)

    def give_back(self) -> None:
        """A retry for which there was no rank."""
        self._balance = min(self._reserve, self._balance + 1.0)

    def spend(self) -> bool:
        """One retry, if there is one left."""
        if self._balance < 1.0:
            return False
        self._balance -= 1.0
        return True
