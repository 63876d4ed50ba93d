"""How engines are asked to compute a prompt on one rank and its answer on another: the fields of both contracts.

*SGLang*: the same body goes to both ranks at once. ``bootstrap_host`` and ``bootstrap_port`` say where the decode rank
finds the prefill worker, ``bootstrap_room`` is where the two meet: a number that no other request may have, congruent
to the prefill rank modulo the worker's ranks. In a batch each prompt has a room of its own. ``routed_dp_rank`` names
the rank that each leg is for, ``disagg_prefill_dp_rank`` tells the decode rank of its partner.

*vLLM*: the prefill rank is asked first, for one token, with ``kv_transfer_params`` that announce another rank. Those of
its answer go verbatim into the decode rank's body. They are those of one prompt with one answer.

Whatever a client sends in these fields is overwritten or made null, for whatever worker: rooms that meet twice have
brought engines down.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from router.wire.openai import Endpoint, InferenceRequest, with_fields

RANK_FIELD: Final = "routed_dp_rank"
_PREFILL_RANK_FIELD: Final = "disagg_prefill_dp_rank"
_PARAMS_FIELD: Final = "kv_transfer_params"
#: Fields by which a client could choose its rank, or send one elsewhere for what it should compute.
_OURS: Final = (
    RANK_FIELD,
    "data_parallel_rank",  # the same, in older versions of SGLang and for those who still write it
    "bootstrap_host",
    "bootstrap_port",
    "bootstrap_room",
    "bootstrap_pair_key",
    _PREFILL_RANK_FIELD,
    _PARAMS_FIELD,
)
#: vLLM's NIXL connector wants all of them.
_TO_BE_FETCHED: Final[Mapping[str, object]] = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
_LENGTHS: Final = ("max_tokens", "max_completion_tokens", "max_output_tokens")
#: Endpoints whose answers are generated token by token.
_GENERATING: Final = frozenset({Endpoint.CHAT, Endpoint.COMPLETIONS, Endpoint.RESPONSES, Endpoint.MESSAGES})


def suits_bootstrap(request: InferenceRequest) -> bool:
    """Whether SGLang takes this kind of request in two legs."""
    return request.endpoint in _GENERATING and request.endpoint is not Endpoint.MESSAGES


def suits_params(request: InferenceRequest) -> bool:
    """Whether vLLM takes it in two legs: one prompt, one answer."""
    return request.endpoint in _GENERATING and _prompt_count(request) == 1 and not _asks_for_several(request)


def room_count(request: InferenceRequest) -> int:
    """How many rooms are named. SGLang gives several answers to a prompt rooms of its own, counting up from the one."""
    return 1 if _asks_for_several(request) else _prompt_count(request)


def _prompt_count(request: InferenceRequest) -> int:
    prompt = request.prompt
    return len(prompt) if isinstance(prompt, list) and prompt and type(prompt[0]) is not int else 1


def _asks_for_several(request: InferenceRequest) -> bool:
    return any(request.fields.get(name) not in (None, 1) for name in ("n", "best_of"))


def alone_body(request: InferenceRequest, *, rank: int | None) -> bytes:
    """For a rank that does all of it; ``rank`` as its body names it, if it does. Bytes that say nothing of other ranks
    are the client's own.
    """
    values = _struck(request)
    if rank is not None:
        values[RANK_FIELD] = rank
    return with_fields(request, values) if values else request.body


# --- SGLang ---------------------------------------------------------------------------------------


class Bootstrap(msgspec.Struct, frozen=True):
    """Where the two ranks of a pair meet. ``prefill_rank`` None: the prefill worker has one rank only."""

    host: str
    port: int | None
    rooms: Sequence[int]
    prefill_rank: int | None


def bootstrap_body(request: InferenceRequest, meeting: Bootstrap, *, rank: int | None, decodes: bool) -> bytes:
    """The body of either leg; ``rank`` None: the worker has one rank only."""
    count = len(meeting.rooms)
    values = _struck(request) | {
        "bootstrap_host": meeting.host if count == 1 else [meeting.host] * count,
        "bootstrap_port": meeting.port if count == 1 else [meeting.port] * count,
        "bootstrap_room": meeting.rooms[0] if count == 1 else list(meeting.rooms),
    }
    if rank is not None:
        values[RANK_FIELD] = rank
    if decodes and meeting.prefill_rank is not None:
        values[_PREFILL_RANK_FIELD] = meeting.prefill_rank
    return with_fields(request, values)


# --- vLLM -----------------------------------------------------------------------------------------


def prefill_body(request: InferenceRequest, *, rank: int | None) -> bytes:
    """The prefill leg's body: one token, in one piece, and the announcement that another rank will go on."""
    values = _struck(request) | {"stream": False, _PARAMS_FIELD: _TO_BE_FETCHED}
    lengths = [name for name in _LENGTHS if name in request.fields]
    if not lengths:
        lengths = ["max_output_tokens" if request.endpoint is Endpoint.RESPONSES else "max_tokens"]
    values |= dict.fromkeys(lengths, 1)
    if "min_tokens" in request.fields:
        values["min_tokens"] = 1
    if "stream_options" in request.fields:
        values["stream_options"] = None
    if rank is not None:
        values[RANK_FIELD] = rank
    return with_fields(request, values)


def decode_body(request: InferenceRequest, params: msgspec.Raw | None, *, rank: int | None) -> bytes:
    """The decode leg's body with what the prefill rank answered; None: it handed nothing over."""
    values = _struck(request) | ({} if params is None else {_PARAMS_FIELD: params})
    if rank is not None:
        values[RANK_FIELD] = rank
    return with_fields(request, values)


class _HandedOver(msgspec.Struct):
    kv_transfer_params: msgspec.Raw = msgspec.Raw(b"null")


def handed_over(answer: bytes) -> msgspec.Raw | None:
    """``kv_transfer_params`` of a prefill rank's answer, as they stand there; None without any."""
    try:
        params = msgspec.json.decode(answer, type=_HandedOver).kv_transfer_params
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return None
    return None if bytes(params) == b"null" else params


def _struck(request: InferenceRequest) -> dict[str, Any]:
    """What a client has no say in."""
    return {name: None for name in _OURS if name in request.fields}
