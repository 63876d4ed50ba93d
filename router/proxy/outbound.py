"""A request as workers are sent it, and what the client is told of where it went."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, TypeVar

from router.core.types import Decision, Engine, RankId, Reason
from router.fleet.target import Target
from router.wire import handover
from router.wire import headers as names
from router.wire.openai import InferenceRequest

K = TypeVar("K")
V = TypeVar("V")

#: Workers come and go; heads of so many are kept, the earliest written forgotten first.
_MAX_KEPT: Final = 4096


class Outbound:
    """What every attempt of a request sends alike: its target, header lines, body."""

    __slots__ = ("inference", "lines", "target")

    def __init__(self, inference: InferenceRequest, target: bytes, lines: bytes) -> None:
        self.inference = inference
        self.target = target
        self.lines = lines


class Writer:
    """Writes heads, of which most is the same for every request to a rank and is written once."""

    def __init__(self, own_lines: Callable[[], bytes] | None = None) -> None:
        """``own_lines`` are header lines of the router's own with every request, as of the moment of sending."""
        self._own_lines = own_lines
        self._heads: dict[Target, tuple[bytes, bytes]] = {}
        self._places: dict[tuple[RankId, Reason], bytes] = {}

    def message(self, outbound: Outbound, target: Target, *, body: bytes | None = None) -> tuple[bytes, bytes]:
        """Head and body as sent to ``target``, its rank named the way its engine wants; ``body``: of a pair's leg."""
        if body is None:
            body = handover.alone_body(outbound.inference, rank=rank_in_body(target))
        head = self._heads.get(target)
        if head is None:
            head = _head(target)
            _keep(self._heads, target, head)
        before, after = head
        own_lines = b"" if self._own_lines is None else self._own_lines()
        parts = (before, outbound.target, after, outbound.lines, own_lines, len(body))
        return b"%b%b%b%b%bcontent-length: %d\r\n\r\n" % parts, body

    def decision_lines(self, decision: Decision, *, attempt: int, id_line: bytes) -> bytes:
        """The ``x-homing-*`` headers and the request's id."""
        key = (decision.id, decision.reason)
        place = self._places.get(key)
        if place is None:
            place = _place(decision)
            _keep(self._places, key, place)
        lines = b"%b%b%d\r\n%b: %d\r\n" % (id_line, place, decision.expected_cached_tokens, names.ATTEMPTS, attempt)
        if decision.prefill is not None:
            lines += b"%b: %b\r\n" % (names.PREFILL_RANK, str(decision.prefill.id).encode())
        return lines


def rank_in_body(target: Target) -> int | None:
    """The rank that a body names; vLLM reads it in a header, and a worker with one rank needs none."""
    return target.rank if target.dp_size > 1 and target.engine is not Engine.VLLM else None


def _keep(kept: dict[K, V], key: K, value: V) -> None:
    if len(kept) >= _MAX_KEPT:
        del kept[next(iter(kept))]
    kept[key] = value


def _head(target: Target) -> tuple[bytes, bytes]:
    """What comes before a request's path and query, which are the client's, and what comes after them."""
    host = f"[{target.host}]" if ":" in target.host else target.host
    after = b" HTTP/1.1\r\nhost: %b:%d\r\n" % (host.encode(), target.port)
    if target.dp_size > 1 and target.engine is not Engine.SGLANG:
        after += b"%b: %d\r\n" % (names.DP_RANK, target.rank)
    return b"POST " + target.base_path.encode(), after


def _place(decision: Decision) -> bytes:
    return b"%b: %b\r\n%b: %d\r\n%b: %b\r\n%b: " % (
        names.WORKER,
        decision.id.worker.encode(),
        names.RANK,
        decision.id.rank,
        names.REASON,
        decision.reason.encode(),
        names.EXPECTED_CACHED_TOKENS,
    )
