"""What becomes of a request on two ranks when either fails."""

from __future__ import annotations

import json
from dataclasses import dataclass, field

import pytest
from pair_rig import BAD, BREAKS, BROKEN, BUSY, FAILS, LATE, PARAMS, RESET, SILENT, STREAM, pairs, told

from router.core.types import Handover
from tests.fakes.fault_worker import OK, OK_BODY, Move, Script, answer, stream_head
from tests.fakes.proxy_rig import RawAnswer


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
    Case(
        "prefill tells by an event that it failed",
        (FAILS, LATE),
        (SILENT, OK),
        200,
        {"server_error": 1, "ok": 1},
        {"abandoned": 1, "ok": 1},
        body=OK_BODY,
        failing=(1, 0),
    ),
    Case(
        "prefill tells in its answer that it failed",
        ((answer(200, b'{"error": {"message": "bootstrap timed out"}}'),), LATE),
        (SILENT, OK),
        200,
        {"server_error": 1, "ok": 1},
        {"abandoned": 1, "ok": 1},
        body=OK_BODY,
        failing=(1, 0),
    ),
    Case(
        "prefill tells by an event that it is full",
        (told(503), LATE),
        (SILENT, OK),
        200,
        {"pushback": 1, "ok": 1},
        {"abandoned": 1, "ok": 1},
    ),
    Case(
        "prefill tells by an event that the request is bad",
        (told(400),),
        (SILENT,),
        400,
        {"client_error": 1},
        {"abandoned": 1},
        body=b'{"error": {"message": "no", "code": 400}}',
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
        (SILENT, OK),
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
        ((0.5, Move.RESET),),
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
    Case(
        "decode tells by its first event that it failed",
        (SILENT, LATE),
        (FAILS, STREAM),
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
    patience = 1.2 if "silent" in case.name else 20.0
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
