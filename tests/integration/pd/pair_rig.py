"""A router before two prefill and two decode workers, each of which plays a script for each request."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

from router.core.breaker import BreakerState
from router.core.types import Handover, Part, WorkerRole
from router.settings import RoutingSettings
from tests.fakes.fault_worker import OK, FaultWorker, Move, Received, Script, answer, chunk, event, stream_head
from tests.fakes.fleet_rig import FleetRig
from tests.fakes.proxy_rig import until

BUSY: Script = (answer(503, b'{"busy": 1}', headers={"Retry-After": "7"}),)
BROKEN: Script = (answer(500, b'{"broken": 1}'),)
BAD: Script = (answer(400, b'{"bad": 1}'),)
SILENT: Script = (Move.STALL,)
RESET: Script = (Move.RESET,)
DELTA = chunk(event({"choices": [{"delta": {"content": "a"}}]}))
END = chunk(b"data: [DONE]\n\n") + chunk(b"")
STREAM: Script = (stream_head(), DELTA, 0.1, DELTA, END)
BREAKS: Script = (stream_head(), DELTA, 0.05, Move.RESET)
#: How SGLang ends a stream that it cannot go on with: its head was good.
FAILS: Script = (stream_head(), chunk(event({"error": {"message": "KVTransferError", "code": 500}})), END)
HANDED = {"do_remote_prefill": True, "remote_request_id": "r1", "remote_block_ids": [1, 2], "remote_port": 5}
PARAMS: Script = (answer(200, json.dumps({"choices": [], "kv_transfer_params": HANDED}).encode()),)
#: SGLang's prefill ranks answer once the decode rank has it all.
LATE: Script = (0.03, *OK)


def told(code: int) -> Script:
    """An error with a good head."""
    return (stream_head(), chunk(event({"error": {"message": "no", "code": code}})), END)


class Pool:
    """Two workers of one role that play one list of scripts between them, in the order in which they are asked."""

    def __init__(self, scripts: Sequence[Script]) -> None:
        self.requests: list[Received] = []
        self.workers = [FaultWorker(scripts=list(scripts), requests=self.requests) for _ in range(2)]
        self.slots: list[int] = []

    @property
    def bodies(self) -> list[dict[str, object]]:
        return [json.loads(received.body) for received in self.requests]

    @property
    def open(self) -> int:
        return sum(worker.open for worker in self.workers)


@dataclass
class Pairs:
    """A router before two prefill and two decode workers."""

    world: FleetRig
    prefill: Pool
    decode: Pool

    def outcomes(self, pool: Pool) -> dict[str, int]:
        """How the attempts on a pool's ranks ended."""
        found: Counter[str] = Counter()
        for metric in self.world.metrics.attempts.collect():
            for sample in metric.samples:
                if sample.name.endswith("_total") and sample.labels["worker"] in {f"w{slot}" for slot in pool.slots}:
                    found[sample.labels["outcome"]] += int(sample.value)
        return {outcome: count for outcome, count in found.items() if count}

    def failing(self, pool: Pool) -> int:
        """Ranks of a pool whose breaker has opened, which one failure does here."""
        fleet = self.world.fleet
        states = [fleet.breakers.state(slot, now=fleet.clock()) for slot in pool.slots]
        return sum(state is BreakerState.OPEN for state in states)

    def assert_nothing_left(self) -> None:
        """No load, no session at work, no request under way."""
        fleet = self.world.fleet
        for slot in (*self.prefill.slots, *self.decode.slots):
            load = fleet.loads.load(slot)
            assert (load.inflight, load.inflight_tokens, load.waiting, load.waiting_tokens) == (0, 0, 0, 0)
        for table in (fleet.sessions, fleet.prompts):
            assert all(binding.inflight == 0 for _, binding in table.recent())
        assert self.world.count("homing_inflight_requests") == 0

    async def until_quiet(self) -> None:
        pools = (*self.prefill.slots, *self.decode.slots)
        await until(
            lambda: (
                not any(self.world.fleet.loads.load(slot).inflight for slot in pools)
                and not self.world.count("homing_inflight_requests")
            )
        )
        self.assert_nothing_left()


@asynccontextmanager
async def pairs(
    prefill: Sequence[Script],
    decode: Sequence[Script],
    *,
    handover: Handover = Handover.BOOTSTRAP,
    first_byte_seconds: float = 20.0,
) -> AsyncIterator[Pairs]:
    routing = RoutingSettings(breaker_failures=1, breaker_seconds=60, breaker_max_ratio=1.0)
    world = FleetRig(routing=routing, first_byte_seconds=first_byte_seconds)
    pools = Pool(prefill), Pool(decode)
    async with AsyncExitStack() as stack:
        for pool, role in zip(pools, (WorkerRole.PREFILL, WorkerRole.DECODE), strict=True):
            for worker in pool.workers:
                await stack.enter_async_context(worker)
                part = Part(role, handover, is_self_sufficient=False)
                pool.slots.append(world.add_rank(worker.port, part=part))
        await world.start()
        try:
            found = Pairs(world, *pools)
            yield found
            await found.until_quiet()
        finally:
            await world.plane.drain(0)
