"""The engines of one process, as the server chooses among them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from engine_shim.api import ApiError
from engine_shim.engine import Engine
from engine_shim.events import BUFFER_BATCHES, HIGH_WATER_MARK, TOPIC


class Ranks:
    """The engines, and which of them takes a request that names none: the least loaded, equals in turn."""

    def __init__(self, engines: Sequence[Engine]) -> None:
        self.engines = tuple(engines)
        self._turns = itertools.count()

    def choose(self, wanted: int | None) -> Engine:
        """The engine for a request. Raises ``ApiError`` 503 when it, or each of them, takes none."""
        if wanted is not None:
            candidates = [self.engines[wanted]]
        else:
            turn = next(self._turns) % len(self.engines)
            candidates = [*self.engines[turn:], *self.engines[:turn]]
        working = [engine for engine in candidates if engine.accepts]
        if not working:
            raise ApiError("The engine takes no requests now.", status=503, code="engine_unavailable")
        return min(working, key=lambda engine: engine.load)


def event_source(engine: Engine) -> dict[str, object]:
    """Where a rank publishes, in the shape of vLLM's ``/kv_event_sources``."""
    publisher = engine.publisher
    if publisher is None:
        return {"enable_kv_cache_events": False, "publisher": "null", "engine": "homing-shim"}
    return {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": publisher.endpoints.live,
        "replay_endpoint": publisher.endpoints.replay,
        "buffer_steps": BUFFER_BATCHES,
        "hwm": HIGH_WATER_MARK,
        "max_queue_size": HIGH_WATER_MARK,
        "topic": TOPIC,
        "epoch": publisher.epoch,
        "snapshot_path": f"/kv_snapshot?dp_rank={engine.rank}",
        "block_size": engine.layout.page_tokens,
        "engine": "homing-shim",
    }
