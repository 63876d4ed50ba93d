"""Pairs where ranks are missing, and clients who leave or have no more time."""

from __future__ import annotations

import pytest
from pair_rig import DELTA, LATE, PARAMS, RESET, SILENT, Pairs, pairs

from router.core.types import Handover, Part, WorkerRole
from tests.fakes.fault_worker import OK, OK_BODY, Move, Script, stream_head
from tests.fakes.fleet_rig import ASK
from tests.fakes.proxy_rig import until


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
    """Both workers see it at once, at whatever point, and nothing is left."""
    async with pairs((prefill,), (decode,), handover=handover) as found:
        client = await found.world.connect()
        await client.send({**ASK, "stream": True})
        busy = 1 if prefill is SILENT and handover is Handover.PARAMS else 2
        await until(lambda: len(found.prefill.requests) + len(found.decode.requests) == busy)
        if DELTA in decode:
            await client.head()
            assert await client.piece()
        await client.close()
        await until(lambda: not _at_work(found), seconds=4)  # before anything else would end them
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
        await client.send(ASK, headers={"x-request-timeout": "1"})
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
