"""What the two ranks of a pair are sent, and what of their answers counts."""

from __future__ import annotations

import json

import pytest
from pair_rig import DELTA, END, HANDED, LATE, PARAMS, SILENT, STREAM, pairs

from router.core.types import Handover
from tests.fakes.fault_worker import OK, Move, Script, answer, chunk, event, stream_head
from tests.fakes.fleet_rig import ASK


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
