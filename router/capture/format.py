"""Recorded event streams and the requests beside them: the two files of a capture, read and written.

``NAME.jsonl`` holds one ZMQ message a line: ``t`` (arrival, seconds), ``socket_rank``, ``frames_hex`` (topic, sequence,
payload). ``NAME.requests.jsonl`` holds one record a line, told apart by ``kind``: ``request``, ``reset...``,
``restart...``, ``note``; others are passed over. Either may be gzipped (``.gz``).

Recorders have changed their words over time, so a fact may stand under several names; all are listed here.
"""

from __future__ import annotations

import gzip
import json
import math
import zlib
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from router.capture.notes import (
    adapters_of,
    block_tokens_of,
    first_number,
    geometry_of,
    mapping,
    max_running_of,
    merged,
    pool_blocks_of,
    pool_tokens_of,
    retention_tokens_of,
)
from router.core.types import Engine
from router.core.usable import Geometry
from router.errors import CaptureError, WireError
from router.wire.kv_events import EventBatch, decode_batch, decode_sequence

_FINISH_NAMES = ("finish_t", "finished_t", "done_t", "end_t", "abort_t", "aborted_t", "last_token_t")
_UNSCORED = ("aborted", "failed", "prior_request")
_REQUESTS_SUFFIX = ".requests.jsonl"
#: No worker has more (``WorkerSpec.dp_size``).
_MOST_RANKS = 1024


@dataclass(frozen=True, slots=True)
class Frame:
    """One message as it arrived; ``batch`` is None where it could not be decoded."""

    at: float
    rank: int
    sequence: int | None
    batch: EventBatch | None


@dataclass(frozen=True, slots=True)
class Sent:
    """One request. ``cached_tokens`` is the engine's own word; None where the request is not scored.

    ``rank`` is the rank that served it; None where nobody knows. ``prompt`` is empty where the record has no token ids.
    ``most_tokens`` is the bound of its answer, which goes on to that if ``is_whole``. ``is_cut``: the client left.
    """

    at: float
    first_token_at: float | None
    finished_at: float
    model: str
    tag: str
    prompt: array[int]
    output: array[int]
    rank: int | None
    cached_tokens: int | None
    is_failed: bool
    is_cut: bool
    fields: Mapping[str, Any]
    most_tokens: int | None = None
    is_whole: bool = False


@dataclass(frozen=True, slots=True)
class Reset:
    """The caches were emptied through the router, or the engine was started anew."""

    at: float
    is_restart: bool = False


@dataclass(frozen=True, slots=True)
class Capture:
    """A capture, each part in the order of its time. ``requests`` is None for a lone file of frames."""

    name: str
    engine: Engine
    frames: Sequence[Frame]
    requests: Sequence[Sent] | None
    resets: Sequence[Reset]
    geometry: Geometry = field(default_factory=Geometry)
    block_tokens: int | None = None
    pool_tokens: int | None = None
    pool_blocks: int | None = None
    prefill_chunk_tokens: int | None = None
    max_running_requests: int | None = None
    retention_tokens: int | None = None
    adapters: frozenset[str] = frozenset()


def find_captures(paths: Sequence[Path]) -> list[tuple[Path, Path | None]]:
    """The frames file and requests file of each capture named, either of which (or both) may be given.

    Raises ``CaptureError`` for a file that does not exist.
    """
    found: dict[str, tuple[Path, Path | None]] = {}
    for path in paths:
        stem = str(path).removesuffix(".gz").removesuffix(_REQUESTS_SUFFIX).removesuffix(".jsonl")
        frames, requests = _existing(stem + ".jsonl"), _existing(stem + _REQUESTS_SUFFIX)
        if not path.exists() and frames is None:
            raise CaptureError(f"{path}: no such file")
        if frames is None:
            raise CaptureError(f"{path}: its frames are missing; they should be in {stem}.jsonl or {stem}.jsonl.gz")
        found[stem] = (frames, requests)
    return list(found.values())


def _existing(name: str) -> Path | None:
    return next((path for path in (Path(name), Path(name + ".gz")) if path.exists()), None)


def find_files(folder: Path, name: str) -> list[Path]:
    """What is there of a capture of that name."""
    stem = str(folder / name)
    return [found for suffix in (".jsonl", _REQUESTS_SUFFIX) if (found := _existing(stem + suffix)) is not None]


def read_capture(frames: Path, requests: Path | None) -> Capture:
    """Read both files whole. Raises ``CaptureError``."""
    messages = [_frame(place, record) for place, record in _records(frames)]
    name = frames.name.removesuffix(".gz").removesuffix(".jsonl")
    records = list(_records(requests)) if requests is not None else []
    engine = _engine(records, messages)
    settings = merged([record for _, record in records if record.get("kind") == "note"])
    metrics = [str(record.get("text", "")) for _, record in records if record.get("kind") == "metrics"]
    sent = [_request(place, record, engine) for place, record in records if _is_request(record)]
    resets = [reset for place, record in records if (reset := _reset(place, record)) is not None]
    return Capture(
        name=name,
        engine=engine,
        frames=sorted(messages, key=lambda message: message.at),
        requests=sorted(sent, key=lambda request: request.at) if requests is not None else None,
        resets=sorted(resets, key=lambda reset: reset.at),
        geometry=geometry_of(settings),
        block_tokens=block_tokens_of(settings, metrics),
        pool_tokens=pool_tokens_of(settings, metrics),
        pool_blocks=pool_blocks_of(settings, metrics, ranks=1 + max((message.rank for message in messages), default=0)),
        prefill_chunk_tokens=first_number(settings, "chunked_prefill_size"),
        max_running_requests=max_running_of(settings),
        retention_tokens=retention_tokens_of(settings, metrics),
        adapters=adapters_of(settings),
    )


def _records(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each line's record, with the place that an error should name."""
    number = 0
    try:
        opened = gzip.open if path.suffix == ".gz" else open
        with opened(path, "rt", encoding="utf-8-sig") as lines:
            for number, line in enumerate(lines, 1):
                if not line.strip():
                    continue
                record = _parsed(line)
                if not isinstance(record, dict):
                    raise CaptureError(f"{path}:{number}: a record is a JSON object")
                yield f"{path}:{number}", record
    except (OSError, EOFError, UnicodeDecodeError, zlib.error) as error:
        raise CaptureError(f"{path}:{number + 1}: cannot be read: {error}") from error
    except (ValueError, RecursionError) as error:  # what is nested too deep, and numbers too long, too
        raise CaptureError(f"{path}:{number}: not JSON: {error}") from error


def _parsed(line: str) -> object:
    """A line's JSON. Halves of a character, which JSON can write and no text can hold, become question marks."""
    record: object = json.loads(line)
    if "\\ud" not in line and "\\uD" not in line:
        return record
    return json.loads(json.dumps(record, ensure_ascii=False).encode(errors="replace"))


# --- frames -----------------------------------------------------------------------------------------


def _frame(place: str, record: Mapping[str, Any]) -> Frame:
    try:
        at, rank = _finite(float(record["t"])), _socket_rank(record.get("socket_rank", 0))
        parts = [bytes.fromhex(part) for part in record["frames_hex"]]
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise CaptureError(f"{place}: a frame has t, socket_rank and frames_hex: {error!r}") from error
    if len(parts) < 2:
        raise CaptureError(f"{place}: a message has a topic, a sequence number and a payload")
    try:
        sequence = decode_sequence(parts[-2])
    except WireError:
        return Frame(at, rank, None, None)
    try:
        return Frame(at, rank, sequence, decode_batch(parts[-1]))
    except WireError:
        return Frame(at, rank, sequence, None)


def _socket_rank(value: object) -> int:
    rank = _known_rank(value)
    if rank is None:
        raise ValueError(f"socket_rank {value!r}")
    return rank


def frame_record(at: float, rank: int, parts: Sequence[bytes]) -> dict[str, Any]:
    """A message as a line of the frames file."""
    record: dict[str, Any] = {"t": at, "socket_rank": rank, "frames_hex": [part.hex() for part in parts]}
    if len(parts) == 3 and len(parts[1]) == 8:
        record["seq"] = int.from_bytes(parts[1], "big")
    return record


# --- requests ---------------------------------------------------------------------------------------


def _is_request(record: Mapping[str, Any]) -> bool:
    return record.get("kind") in ("request", *_UNSCORED)


def _request(place: str, record: Mapping[str, Any], engine: Engine) -> Sent:
    fields = _fields(record)
    response = mapping(record.get("response"))
    try:
        sent_at, first_at = _number(record.get("sent_t")), _number(record.get("first_token_t"))
        finished_at = _finish(record)
        rank = _rank(record, fields, engine)
    except (ValueError, OverflowError) as error:
        raise CaptureError(f"{place}: {error}") from error
    if finished_at is None:
        raise CaptureError(f"{place}: a request without a time: sent_t, and one of {', '.join(_FINISH_NAMES)} or t")
    status = record.get("status")
    is_failed = bool(record.get("failed")) or (isinstance(status, int) and status >= 400)
    is_scored = (
        sent_at is not None
        and not is_failed
        and record["kind"] == "request"
        and not any(record.get(name) for name in _UNSCORED)
    )
    try:
        prompt, output = _prompt(record, fields, response), _output(record, response)
    except (TypeError, ValueError, OverflowError) as error:
        raise CaptureError(f"{place}: token ids are non-negative integers: {error}") from error
    sampling = {**fields, **mapping(fields.get("sampling_params"))}
    is_known = not (record.get("prior_request") or record["kind"] == "prior_request")
    return Sent(
        at=sent_at if sent_at is not None else finished_at,
        first_token_at=first_at,
        finished_at=finished_at,
        model=str(fields.get("model") or record.get("model") or ""),
        tag=str(record.get("tag", "")),
        prompt=prompt if is_known and sent_at is not None else array("I"),
        output=output,
        rank=rank,
        cached_tokens=_cached(response) if is_scored else None,
        is_failed=is_failed,
        is_cut=bool(record.get("aborted")) or record["kind"] == "aborted",
        fields=fields,
        most_tokens=first_number(sampling, "max_new_tokens", "max_completion_tokens", "max_tokens"),
        is_whole=sampling.get("ignore_eos") is True,
    )


def _fields(record: Mapping[str, Any]) -> Mapping[str, Any]:
    """The request's body; where it was not kept, the record stands for it: salts and LoRA names are in one of them."""
    request = mapping(record.get("request"))
    return next((body for name in ("json", "body") if (body := mapping(request.get(name)))), request) or record


def _prompt(record: Mapping[str, Any], fields: Mapping[str, Any], response: Mapping[str, Any]) -> array[int]:
    choice = _choice(response)
    for found in (
        record.get("prompt_token_ids"),
        response.get("prompt_token_ids"),
        choice.get("prompt_token_ids"),
        fields.get("input_ids"),
        record.get("tokenize_ids"),
        fields.get("prompt"),
    ):
        if isinstance(found, list) and len(found) == 1 and isinstance(found[0], list):
            return array("I", found[0])
        if isinstance(found, list) and found and isinstance(found[0], int | float):
            return array("I", found)
    return array("I")


def _output(record: Mapping[str, Any], response: Mapping[str, Any]) -> array[int]:
    for found in (record.get("output_token_ids"), _choice(response).get("token_ids"), response.get("output_ids")):
        if isinstance(found, list):
            return array("I", found)
    return array("I")


def _cached(response: Mapping[str, Any]) -> int | None:
    details = mapping(mapping(response.get("usage")).get("prompt_tokens_details"))
    for found in (details.get("cached_tokens"), mapping(response.get("meta_info")).get("cached_tokens")):
        if found is not None:  # else nothing was cached, or nothing is told
            return found if isinstance(found, int) and not isinstance(found, bool) and found >= 0 else None
    return 0 if "usage" in response and "prompt_tokens_details" in mapping(response["usage"]) else None


def _rank(record: Mapping[str, Any], fields: Mapping[str, Any], engine: Engine) -> int | None:
    """The rank that served, else the one asked for; engines of one rank have no other."""
    headers = {str(name).lower(): value for name, value in mapping(record.get("headers")).items()}
    meta = mapping(mapping(record.get("response")).get("meta_info"))
    asked = headers.get("x-data-parallel-rank") if engine is not Engine.SGLANG else fields.get("routed_dp_rank")
    for found in (record.get("served_rank"), meta.get("dp_rank"), asked, record.get("rank")):
        if (rank := _known_rank(found)) is not None:
            return rank
    return None


def _known_rank(value: object) -> int | None:
    """A rank, by its number or the digits of it; None for what is none. Raises ``ValueError`` for one too high."""
    number = int(value) if isinstance(value, str) and value.isdecimal() else value
    if not isinstance(number, int) or isinstance(number, bool) or number < 0:
        return None
    if number >= _MOST_RANKS:
        raise ValueError(f"rank {number}, where ranks go up to {_MOST_RANKS - 1}")
    return number


def _finish(record: Mapping[str, Any]) -> float | None:
    for name in _FINISH_NAMES:
        if (found := _number(record.get(name))) is not None:
            return found
    finish = record.get("finish")
    if isinstance(finish, Mapping):
        times = [time for name in ("t", "time", *_FINISH_NAMES) if (time := _number(finish.get(name))) is not None]
        if times:
            return times[0]
    return _number(finish) if _number(finish) is not None else _number(record.get("t"))


def _reset(place: str, record: Mapping[str, Any]) -> Reset | None:
    """A reset that the engine refused is none: it answers 400, or 200 with ``success: false``."""
    kind = str(record.get("kind", ""))
    if not kind.startswith(("reset", "restart")):
        return None
    try:
        times = [time for name in ("done_t", "t", "sent_t") if (time := _number(record.get(name))) is not None]
    except (ValueError, OverflowError) as error:
        raise CaptureError(f"{place}: {error}") from error
    if not times:
        raise CaptureError(f"{place}: a {kind} without its time t")
    status = record.get("status", 200)
    answer = json.dumps(record.get("response", record.get("text", ""))).replace(" ", "").replace("\\", "")
    if (isinstance(status, int) and status >= 400) or '"success":false' in answer or record.get("success") is False:
        return None
    return Reset(times[0], is_restart=kind.startswith("restart"))


def _engine(records: Sequence[tuple[str, Mapping[str, Any]]], frames: Sequence[Frame]) -> Engine:
    """Told by the notes, else by the shape of the events: only vLLM and the shim name a group's kind."""
    for _, record in records:
        if record.get("kind") == "note":
            named = str(record.get("engine", "")).lower()
            for engine in Engine:
                if engine in named:
                    return engine
            if "kv_event_sources" in record:
                return Engine.SHIM if "homing-shim" in json.dumps(record["kv_event_sources"]) else Engine.VLLM
            info = mapping(record.get("info"))
            if "page_size" in info or "kv_events" in info:
                return Engine.SGLANG
    if any(frame.batch is not None and frame.batch.epoch for frame in frames):
        return Engine.SHIM
    kinds = {event.kind for frame in frames if frame.batch for event in frame.batch.events if hasattr(event, "kind")}
    return Engine.VLLM if any(kinds) or not frames else Engine.SGLANG


def _choice(response: Mapping[str, Any]) -> Mapping[str, Any]:
    choices = response.get("choices")
    return mapping(choices[0]) if isinstance(choices, list) and choices else {}


def _number(value: object) -> float | None:
    """A time; None for what is no number. Raises ``ValueError`` or ``OverflowError`` for one that is no time."""
    return _finite(float(value)) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _finite(at: float) -> float:
    if not math.isfinite(at):
        raise ValueError(f"{at} is no time")
    return at
