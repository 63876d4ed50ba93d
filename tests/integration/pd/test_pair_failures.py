"""What becomes of a request on two ranks when either fails, the client leaves, or time is over."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field

import pytest

from router.core.breaker import BreakerState
from router.core.types import Handover, Part, WorkerRole
from router.settings import RoutingSettings
from tests.fakes.fault_worker import OK, OK_BODY, FaultWorker, Move, Received, Script, answer, chunk, event, stream_head
from tests.fakes.fleet_rig import ASK, FleetRig
from tests.fakes.proxy_rig import RawAnswer, until

BUSY: Script = (answer(503, b'{"busy": 1}', headers={"Retry-After": "7"}),)
BROKEN: Script = (answer(500, b'{"broken": 1}'),)
BAD: Script = (answer(400, b'{"bad": 1}'),)
SILENT: Script = (Move.STALL,)
RESET: Script = (Move.RESET,)
DELTA = chunk(event({"choices": [{"delta": {"content": "a"}}]}))
END = chunk(b"data: [DONE]\n\n") + chunk(b"")
STREAM: Script = (stream_head(), DELTA, 0.1, DELTA, END)
BREAKS: Script = (stream_head(), DELTA, 0.05, Move.RESET)
HANDED = {"do_remote_prefill": True, "remote_request_id": "r1", "remote_block_ids": [1, 2], "remote_port": 5}
PARAMS: Script = (answer(200, json.dumps({"choices": [], "kv_transfer_params": HANDED}).encode()),)
#: SGLang's prefill ranks answer once the decode rank has it all.
LATE: Script = (0.03, *OK)


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
            assert all(binding.inflight == 0 for _, binding in table.items())
        assert self.world.count("homing_inflight_requests") == 0

    async def until_quiet(self) -> None:
        pools = (*self.prefill.slots, *self.decode.slots)
        await until(lambda: not any(self.world.fleet.loads.load(slot).inflight for slot in pools))
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


@dataclass(frozen=True)
class Case:
    """Scripts by order of request, what the client gets, and how the attempts on either pool end."""

    name: str
    prefill: tuple[Script, ...]
    decode: tuple[Script, ...]
    status: int
    prefill_ends: dict[str, int]
    decode_ends: dict[str, int]
    handover: Handover = Handover.BOOTSTRAP
    body: bytes | None = None
    code: str | None = None
    failing: tuple[int, int] = (0, 0)
    asked: tuple[int, int] | None = field(default=None)


P = Handover.PARAMS
CASES = (
    Case("healthy", (LATE,), (OK,), 200, {"ok": 1}, {"ok": 1}, body=OK_BODY),
    Case(
        "prefill resets",
        (RESET, LATE),
        (SILENT, OK),
        200,
        {"reset": 1, "ok": 1},
        {"abandoned": 1, "ok": 1},
        failing=(1, 0),
    ),
    Case(
        "prefill closes",
        ((Move.CLOSE,), LATE),
        (SILENT, OK),
        200,
        {"reset": 1, "ok": 1},
        {"abandoned": 1, "ok": 1},
        failing=(1, 0),
    ),
    Case(
        "prefill 500",
        (BROKEN, LATE),
        (SILENT, OK),
        200,
        {"server_error": 1, "ok": 1},
        {"abandoned": 1, "ok": 1},
        failing=(1, 0),
    ),
    Case("prefill full", (BUSY, LATE), (SILENT, OK), 200, {"pushback": 1, "ok": 1}, {"abandoned": 1, "ok": 1}),
    Case(
        "prefill talks rubbish",
        ((b"220 mail ESMTP\r\n",), LATE),
        (SILENT, OK),
        200,
        {"protocol": 1, "ok": 1},
        {"abandoned": 1, "ok": 1},
        failing=(1, 0),
    ),
    Case(
        "prefill is silent",
        (SILENT, LATE),
        ((0.5, Move.STALL), OK),
        200,
        {"timeout": 1, "ok": 1},
        {"abandoned": 1, "ok": 1},
        failing=(1, 0),
    ),
    Case(
        "prefill refuses the request", (BAD,), (SILENT,), 400, {"client_error": 1}, {"abandoned": 1}, body=b'{"bad": 1}'
    ),
    Case(
        "prefill dies after the first byte",
        ((0.05, Move.RESET),),
        (STREAM,),
        200,
        {"reset": 1},
        {"ok": 1},
        failing=(1, 0),
    ),
    Case(
        "decode resets",
        (SILENT, LATE),
        (RESET, OK),
        200,
        {"abandoned": 1, "ok": 1},
        {"reset": 1, "ok": 1},
        failing=(0, 1),
    ),
    Case(
        "decode resets after a head",
        (SILENT, LATE),
        ((stream_head(), 0.02, Move.RESET), OK),
        200,
        {"abandoned": 1, "ok": 1},
        {"reset": 1, "ok": 1},
        failing=(0, 1),
    ),
    Case(
        "decode 500",
        (SILENT, LATE),
        (BROKEN, OK),
        200,
        {"abandoned": 1, "ok": 1},
        {"server_error": 1, "ok": 1},
        failing=(0, 1),
    ),
    Case("decode full", (SILENT, LATE), (BUSY, OK), 200, {"abandoned": 1, "ok": 1}, {"pushback": 1, "ok": 1}),
    Case(
        "decode refuses the request", (SILENT,), (BAD,), 400, {"abandoned": 1}, {"client_error": 1}, body=b'{"bad": 1}'
    ),
    Case(
        "decode breaks in mid-stream",
        (LATE,),
        ((0.06, *BREAKS),),
        200,
        {"ok": 1},
        {"reset": 1},
        code="upstream_failed",
        failing=(0, 1),
    ),
    Case(
        "decode breaks, prefill at work",
        (SILENT,),
        (BREAKS,),
        200,
        {"abandoned": 1},
        {"reset": 1},
        code="upstream_failed",
        failing=(0, 1),
    ),
    Case("both 500, then good", (BROKEN, LATE), (BROKEN, OK), 200, {}, {}),
    Case(
        "prefill full everywhere",
        (BUSY,) * 2,
        (SILENT,) * 2,
        503,
        {"pushback": 2},
        {"abandoned": 2},
        body=b'{"busy": 1}',
    ),
    Case(
        "prefill down everywhere",
        (RESET,) * 2,
        (SILENT,) * 2,
        502,
        {"reset": 2},
        {"abandoned": 2},
        code="upstream_failed",
        failing=(2, 0),
    ),
    Case(
        "decode down everywhere",
        (SILENT,) * 3,
        (RESET,) * 2,
        502,
        {"abandoned": 2},
        {"reset": 2},
        code="upstream_failed",
        failing=(0, 2),
    ),
    Case("vLLM: healthy", (PARAMS,), (OK,), 200, {"ok": 1}, {"ok": 1}, P, body=OK_BODY),
    Case("vLLM: nothing handed over", (OK,), (OK,), 200, {"ok": 1}, {"ok": 1}, P, body=OK_BODY),
    Case(
        "vLLM: prefill resets",
        (RESET, PARAMS),
        (OK,),
        200,
        {"reset": 1, "ok": 1},
        {"abandoned": 1, "ok": 1},
        P,
        failing=(1, 0),
        asked=(2, 1),
    ),
    Case(
        "vLLM: prefill 500",
        (BROKEN, PARAMS),
        (OK,),
        200,
        {"server_error": 1, "ok": 1},
        {"abandoned": 1, "ok": 1},
        P,
        failing=(1, 0),
        asked=(2, 1),
    ),
    Case(
        "vLLM: prefill refuses the request",
        (BAD,),
        (OK,),
        400,
        {"client_error": 1},
        {"abandoned": 1},
        P,
        body=b'{"bad": 1}',
        asked=(1, 0),
    ),
    Case(
        "vLLM: prefill is silent",
        (SILENT, PARAMS),
        (OK,),
        200,
        {"timeout": 1, "ok": 1},
        {"abandoned": 1, "ok": 1},
        P,
        failing=(1, 0),
    ),
    Case(
        "vLLM: decode resets",
        (PARAMS, PARAMS),
        (RESET, OK),
        200,
        {"ok": 2},
        {"reset": 1, "ok": 1},
        P,
        failing=(0, 1),
        asked=(2, 2),
    ),
    Case(
        "vLLM: decode breaks in mid-stream",
        (PARAMS,),
        (BREAKS,),
        200,
        {"ok": 1},
        {"reset": 1},
        P,
        code="upstream_failed",
        failing=(0, 1),
    ),
    Case(
        "vLLM: prefill full everywhere",
        (BUSY,) * 2,
        (OK,),
        503,
        {"pushback": 2},
        {"abandoned": 2},
        P,
        body=b'{"busy": 1}',
        asked=(2, 0),
    ),
)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
async def test_either_leg_may_fail(case: Case) -> None:
    """The client is answered by another pair if there is one; the rank at fault alone is held to account for it."""
    patience = 0.2 if "silent" in case.name else 20.0
    async with pairs(case.prefill, case.decode, handover=case.handover, first_byte_seconds=patience) as found:
        got = await found.world.ask("s")
        assert got.status == case.status
        assert got.complete
        if case.body is not None:
            assert got.body == case.body
        if case.code is not None:
            assert case.code in _error_of(got)
        await found.until_quiet()
        if case.prefill_ends or case.decode_ends:
            assert (found.outcomes(found.prefill), found.outcomes(found.decode)) == (
                case.prefill_ends,
                case.decode_ends,
            )
            assert (found.failing(found.prefill), found.failing(found.decode)) == case.failing
        if case.asked is not None:
            assert (len(found.prefill.requests), len(found.decode.requests)) == case.asked


def _error_of(got: RawAnswer) -> str:
    if got.headers["content-type"].startswith("text/event-stream"):
        last = [part for part in got.body.split(b"\n\n") if part][-1]
        return str(json.loads(last.removeprefix(b"data: "))["error"]["code"])
    return str(got.error["code"])


async def test_another_pair_is_another_pair() -> None:
    """A retry takes neither rank of the pair that failed, whichever was at fault, while there are others."""
    for prefill, decode in (((RESET, LATE), (SILENT, OK)), ((SILENT, LATE), (RESET, OK))):
        async with pairs(prefill, decode) as found:
            assert (await found.world.ask("s")).status == 200
            for pool in (found.prefill, found.decode):
                assert [worker.connections for worker in pool.workers] == [1, 1]


async def test_a_lone_decode_rank_is_tried_with_another_prefill_rank() -> None:
    """With one decode rank left, its partner's failure does not rule it out."""
    async with pairs((RESET, LATE), (SILENT, OK)) as found:
        found.world.fleet.remove_rank(found.decode.slots.pop())
        assert (await found.world.ask("s")).status == 200
        assert found.decode.workers[0].connections == 2


async def test_prefill_workers_that_are_down() -> None:
    """No connection to either prefill worker: 502, and the decode ranks are let go."""
    async with pairs((OK,), (SILENT,)) as found:
        for worker in found.prefill.workers:
            worker.stop_listening()
        got = await found.world.ask("s")
        assert (got.status, got.error["code"]) == (502, "upstream_failed")
        assert found.outcomes(found.prefill) == {"connect": 2}


async def test_a_pool_without_its_other_half() -> None:
    """Prefill workers alone answer nobody, nor do SGLang's decode workers: 503, and the missing half is named."""
    async with pairs((OK,), (OK,)) as found:
        fleet = found.world.fleet
        for slot in found.decode.slots:
            fleet.remove_rank(slot)
        found.decode.slots.clear()
        got = await found.world.ask("s")
        assert (got.status, got.error["code"]) == (503, "no_decode_worker")
        assert not found.world.brain.ready()
        for slot in found.prefill.slots:
            fleet.remove_rank(slot)
        found.prefill.slots.clear()
        part = Part(WorkerRole.DECODE, Handover.BOOTSTRAP, is_self_sufficient=False)
        slot = found.world.add_rank(found.decode.workers[0].port, part=part)
        got = await found.world.ask("s")
        assert (got.status, got.error["code"]) == (503, "no_prefill_worker")
        fleet.remove_rank(slot)


@pytest.mark.parametrize(
    ("handover", "prefill", "decode"),
    [
        (Handover.BOOTSTRAP, SILENT, SILENT),
        (Handover.BOOTSTRAP, SILENT, (stream_head(), DELTA, Move.STALL)),
        (Handover.PARAMS, SILENT, OK),
        (Handover.PARAMS, PARAMS, SILENT),
        (Handover.PARAMS, PARAMS, (stream_head(), DELTA, Move.STALL)),
    ],
)
async def test_a_client_that_leaves(handover: Handover, prefill: Script, decode: Script) -> None:
    """Both workers see it within 0.2 seconds, at whatever point, and nothing is left."""
    async with pairs((prefill,), (decode,), handover=handover) as found:
        client = await found.world.connect()
        await client.send({**ASK, "stream": True})
        busy = 1 if prefill is SILENT and handover is Handover.PARAMS else 2
        await until(lambda: len(found.prefill.requests) + len(found.decode.requests) == busy)
        await asyncio.sleep(0.05)
        await client.close()
        left = time.monotonic()
        await until(lambda: not _at_work(found))
        assert time.monotonic() - left < 0.2
        await found.until_quiet()
        ends = found.outcomes(found.prefill) | found.outcomes(found.decode)
        assert set(ends) <= {"client_gone", "ok"}
        assert (found.failing(found.prefill), found.failing(found.decode)) == (0, 0)


def _at_work(found: Pairs) -> int:
    """Connections on which a worker is in the middle of something; a kept one may stay."""
    kept = len(found.prefill.requests) if found.outcomes(found.prefill).get("ok") else 0
    return found.prefill.open + found.decode.open - kept


async def test_the_clients_own_time() -> None:
    """At its end both legs are given up: 504."""
    async with pairs((SILENT,), (SILENT,)) as found:
        client = await found.world.connect()
        await client.send(ASK, headers={"x-request-timeout": "0.1"})
        got = await client.answer()
        await client.close()
        assert (got.status, got.error["code"]) == (504, "deadline")
        await found.until_quiet()
        assert found.outcomes(found.prefill) == found.outcomes(found.decode) == {"deadline": 1}


async def test_a_prefill_leg_that_never_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """When the answer is over its prefill leg may still say a last word; then it is ended, and held against nobody."""
    monkeypatch.setattr("router.proxy.pair._LATE_SECONDS", 0.1)
    async with pairs((SILENT,), (OK,)) as found:
        assert (await found.world.ask("s")).body == OK_BODY
        await found.until_quiet()
        assert found.outcomes(found.prefill) == found.outcomes(found.decode) == {"ok": 1}
        await until(lambda: found.prefill.open == 0)


async def test_usage_of_the_prefill_leg() -> None:
    """What a prefill rank reports, whole or in a stream, is what the hit rate counts; the decode rank's word is not."""
    usage = {"prompt_tokens": 40, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 16}}
    streamed: Script = (0.03, stream_head(), DELTA, chunk(event({"choices": [], "usage": usage})), END)
    for prefill in (streamed, (0.03, answer(200, json.dumps({"choices": [], "usage": usage}).encode()))):
        async with pairs((prefill,), (OK,)) as found:
            assert (await found.world.ask("s")).status == 200
            await found.until_quiet()
            counted = [
                sum(
                    found.world.count(f"homing_{name}_total", worker=f"w{slot}", rank="0")
                    for slot in found.prefill.slots + found.decode.slots
                )
                for name in ("prompt_tokens", "cached_tokens")
            ]
            assert counted == [40, 16]


@pytest.mark.parametrize("is_prefill", [True, False])
async def test_a_stale_connection_never_brings_a_room_twice(*, is_prefill: bool) -> None:
    """A kept connection that proves closed costs nothing; the ranks are asked again, to meet in another room."""
    stale, other = (LATE, (Move.CLOSE,), LATE), (OK, SILENT, OK)
    scripts = (stale, other) if is_prefill else ((LATE, SILENT, LATE), (OK, (Move.CLOSE,), OK))
    async with pairs(*scripts) as found:
        for pool in (found.prefill, found.decode):
            found.world.fleet.remove_rank(pool.slots.pop())
        assert (await found.world.ask("s")).status == 200
        await found.until_quiet()
        assert (await found.world.ask("s")).status == 200
        await found.until_quiet()
        assert found.outcomes(found.prefill) == found.outcomes(found.decode) == {"ok": 2}
        rooms = [body["bootstrap_room"] for body in found.prefill.bodies]
        assert len(set(rooms)) == 3
        assert [body["bootstrap_room"] for body in found.decode.bodies] == rooms


async def test_sglangs_legs_on_the_wire() -> None:
    """Both ranks get the client's own body with the same room, host and port, whatever the client says of them."""
    async with pairs((LATE,), (OK,)) as found:
        mine = {"bootstrap_room": 7, "bootstrap_host": "evil", "kv_transfer_params": {"remote_host": "evil"}, "foo": 1}
        client = await found.world.connect()
        headers = {"x-override-bootstrap-room": "7", "x-override-routed-dp-rank": "3"}
        await client.send({**ASK, **mine}, headers=headers)
        got = await client.answer()
        await client.close()
        (prefill,), (decode,) = found.prefill.bodies, found.decode.bodies
        assert prefill == decode
        assert isinstance(room := prefill["bootstrap_room"], int)
        assert 7 != room < 2**63
        assert prefill == ASK | mine | {
            "bootstrap_room": room,
            "bootstrap_host": "127.0.0.1",
            "bootstrap_port": 8998,
            "kv_transfer_params": None,
        }
        for received in (*found.prefill.requests, *found.decode.requests):
            assert b"x-override" not in received.head
            assert received.header("x-request-id") == got.headers["x-request-id"]
        assert got.headers["x-homing-prefill-rank"] in {f"w{slot}/0" for slot in found.prefill.slots}
        assert got.headers["x-homing-worker"] in {f"w{slot}" for slot in found.decode.slots}


async def test_vllms_legs_on_the_wire() -> None:
    """Prefill is asked for one token in one piece; decode gets the client's own body and what prefill answered."""
    asked = {**ASK, "max_tokens": 50, "min_tokens": 5, "stream": True, "stream_options": {"include_usage": True}}
    async with pairs((PARAMS,), (STREAM,), handover=Handover.PARAMS) as found:
        client = await found.world.connect()
        await client.send({**asked, "kv_transfer_params": {"remote_host": "evil"}, "bootstrap_room": 1})
        assert (await client.answer()).complete
        await client.close()
        (prefill,), (decode,) = found.prefill.bodies, found.decode.bodies
        assert prefill == asked | {
            "max_tokens": 1,
            "min_tokens": 1,
            "stream": False,
            "stream_options": None,
            "bootstrap_room": None,
            "kv_transfer_params": {
                "do_remote_decode": True,
                "do_remote_prefill": False,
                "remote_engine_id": None,
                "remote_block_ids": None,
                "remote_host": None,
                "remote_port": None,
            },
        }
        assert decode == asked | {"kv_transfer_params": HANDED, "bootstrap_room": None}
