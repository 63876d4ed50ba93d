"""Who reads a layer's part of a pool waits here until the loads into it have landed. Threads, no torch."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection

from engine_shim.cache.transfers import LoadError

#: A copy within one machine that takes longer than this hangs.
_PATIENCE_SECONDS = 60.0


def _nothing() -> None:
    pass


class LayerBarrier:
    """How far each load is, layer by layer in the model's order, and who waits for that.

    The runner says which loads a step depends on (``expect``), every accessor of a pool waits for its layer
    (``wait``), and the thread that copies tells what it has done (``begin``, ``advance``, ``fail``). ``advance`` may
    leave something to do for whoever waits, such as having its CUDA stream wait for an event.
    """

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._layers: dict[int, list[Callable[[], None]]] = {}
        self._failed: set[int] = set()
        self._expected: frozenset[int] = frozenset()
        self.waits = 0

    def begin(self, load: int) -> None:
        """A load has been submitted."""
        with self._condition:
            self._layers[load] = []

    def advance(self, load: int, *, then: Callable[[], None] = _nothing) -> None:
        """One more layer of a load is done; ``then`` is called by each who waited for it."""
        with self._condition:
            self._layers[load].append(then)
            self._condition.notify_all()

    def fail(self, load: int) -> None:
        """A load will bring no more."""
        with self._condition:
            self._failed.add(load)
            self._condition.notify_all()

    def forget(self, load: int) -> None:
        """Nobody will ask about a load any more."""
        with self._condition:
            self._layers.pop(load, None)
            self._failed.discard(load)

    def expect(self, loads: Collection[int]) -> None:
        """The step that begins now reads what these bring."""
        self._expected = frozenset(loads)

    def wait(self, layer: int) -> None:
        """Until the step's loads have brought what belongs to a layer.

        Raises ``LoadError`` where one does not, or hangs.
        """
        for load in self._expected & self._layers.keys():  # what has been noted as landed is not known any more
            with self._condition:
                self.waits += self._is_open(load, layer)
                arrived = self._condition.wait_for(lambda: not self._is_open(load, layer), _PATIENCE_SECONDS)  # noqa: B023
                if not arrived or load in self._failed:
                    raise LoadError(f"load {load} did not bring layer {layer}")
                then = self._layers[load][layer]
            then()

    def _is_open(self, load: int, layer: int) -> bool:
        return load not in self._failed and len(self._layers[load]) <= layer
