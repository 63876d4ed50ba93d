"""Recording: a worker's event streams, and the requests that pass by, into the two files of a capture."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TextIO

import httpx
import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

from router.capture.format import frame_record
from router.core.types import Engine
from router.errors import WorkerError
from router.fleet.worker_api import WorkerInfo
from router.wire import sse
from router.wire.kv_events import EventSource

#: Headers that are written down; credentials never are.
KEPT_HEADERS = ("x-data-parallel-rank", "x-session-id", "x-request-id")
_PROMPTS = ("/v1/chat/completions", "/v1/completions", "/generate", "/inference/v1/generate")
_RESETS = ("/reset_prefix_cache", "/flush_cache")
_SETTLE_SECONDS = 2.0
#: A publisher that is there takes a subscriber within milliseconds, however busy its engine is.
_CONNECT_SECONDS = 5.0

OnHead = Callable[[int, httpx.Headers], None]


class Tape:
    """The two files, written line by line as things happen; made with the first line."""

    def __init__(self, name: str, folder: Path, *, clock: Callable[[], float] = time.time) -> None:
        self.clock = clock
        self.frames = self.requests = 0
        self._folder = folder
        self._name = name
        self._files: list[TextIO] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for file in self._files:
            file.close()

    def frame(self, rank: int, parts: list[bytes]) -> None:
        """A message has arrived."""
        self.frames += 1
        self._write(0, frame_record(self.clock(), rank, parts))

    def note(self, kind: str, **record: object) -> None:
        """Something happened, or is to be known of the engine."""
        self._write(1, {"t": self.clock(), "kind": kind, **record})

    def request(self, record: Mapping[str, object]) -> None:
        """A request has ended."""
        self.requests += 1
        self._write(1, {"t": self.clock(), "kind": "request", **record})

    def _write(self, number: int, record: Mapping[str, object]) -> None:
        if not self._files:
            self._folder.mkdir(parents=True, exist_ok=True)
            names = (f"{self._name}{suffix}" for suffix in (".jsonl", ".requests.jsonl"))
            self._files = [(self._folder / name).open("w") for name in names]
        file = self._files[number]
        file.write(json.dumps(record) + "\n")
        file.flush()


async def follow(
    source: EventSource, tape: Tape, context: zmq.asyncio.Context, *, is_heard: asyncio.Future[None]
) -> None:
    """Write one rank's messages as they come, until cancelled. ``is_heard`` is done once there is a publisher."""
    subscriber = context.socket(zmq.SUB)
    subscriber.rcvhwm = 100_000
    subscriber.subscribe(source.topic.encode())
    monitor = subscriber.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
    try:
        subscriber.connect(source.endpoint)
        await recv_monitor_message(monitor)
        is_heard.set_result(None)
        while True:
            tape.frame(source.rank, await subscriber.recv_multipart())
    finally:
        subscriber.disable_monitor()
        subscriber.close(linger=0)


@asynccontextmanager
async def following(info: WorkerInfo, tape: Tape) -> AsyncIterator[None]:
    """All of a worker's streams on the tape; a little longer than the body, since events come late.

    Raises ``WorkerError`` where nobody publishes, alone or in a group.
    """
    loop = asyncio.get_running_loop()
    sources = [(source, loop.create_future()) for source in info.sources if source]
    if not sources:
        raise WorkerError(f"{info.url} tells of no cache events: start it with --kv-events-config, or give --kv-events")
    context = zmq.asyncio.Context()
    try:
        async with asyncio.TaskGroup() as tasks:
            streams = [tasks.create_task(follow(source, tape, context, is_heard=heard)) for source, heard in sources]
            await asyncio.wait([heard for _, heard in sources], timeout=_CONNECT_SECONDS)
            if silent := [source.endpoint for source, heard in sources if not heard.done()]:
                raise WorkerError(f"nobody publishes cache events at {', '.join(silent)}")
            await asyncio.sleep(0.3)  # a publisher learns of its subscribers a moment after they connect
            yield
            await asyncio.sleep(_SETTLE_SECONDS)
            for stream in streams:
                stream.cancel()
    finally:
        context.destroy(linger=0)


@dataclass(slots=True)
class Exchange:
    """One request on its way through: what goes to the worker, and what is written down of it.

    Ids of tokens are asked for, since only they make a capture exact; answers then have more fields than without.
    """

    tape: Tape
    info: WorkerInfo
    path: str
    headers: Mapping[str, str]
    body: bytes
    tag: str = ""
    sent_at: float = 0.0
    first_at: float | None = None
    _fields: dict[str, Any] = field(default_factory=dict)
    _pieces: list[bytes] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.is_prompt:
            try:
                fields = json.loads(self.body)
            except ValueError:
                return
            if isinstance(fields, dict):
                self._fields = fields
                self.body = json.dumps(self._with_ids(fields)).encode()

    @property
    def output(self) -> list[int]:
        """Ids of the tokens that have come."""
        return self._answer().output

    @property
    def is_prompt(self) -> bool:
        """Whether the request runs a model."""
        return self.path.endswith(_PROMPTS)

    def _with_ids(self, fields: Mapping[str, Any]) -> Mapping[str, Any]:
        if self.info.engine is Engine.SGLANG:
            return fields
        options = {"stream_options": {**(fields.get("stream_options") or {}), "include_usage": True}}
        return {**fields, "return_token_ids": True, **(options if fields.get("stream") else {})}

    async def run(
        self, client: httpx.AsyncClient, answer: Callable[[int, httpx.Headers], None]
    ) -> AsyncGenerator[bytes, None]:
        """Send, yield the answer's bytes as they come, write the record. ``answer`` is called with the head first.

        Closing the iterator early, or cancelling, aborts the request and is written down as that.
        """
        status, is_whole = None, False
        self.sent_at = self.tape.clock()
        url, hooks = self.info.url + self.path, {"trace": self._watch}
        try:
            async with client.stream("POST", url, headers=self.headers, content=self.body, extensions=hooks) as got:
                status = got.status_code
                answer(status, got.headers)
                async for piece in got.aiter_raw():
                    if self.first_at is None:
                        self.first_at = self.tape.clock()
                    self._pieces.append(piece)
                    yield piece
            is_whole = True
        finally:
            self._write(status, is_whole=is_whole)

    async def _watch(self, event: str, _: object) -> None:
        """It is sent once there is a connection for it: others may overtake it until then (httpcore's trace)."""
        if event.endswith("send_request_headers.started"):
            self.sent_at = self.tape.clock()

    def _write(self, status: int | None, *, is_whole: bool) -> None:
        finished_at = self.tape.clock()
        if self.path.split("?")[0] in _RESETS:
            if status is None:  # whether it was done nobody knows
                return
            self.tape.note("reset", status=status, text=b"".join(self._pieces).decode(errors="replace"))
            return
        if not self.is_prompt:
            return
        answer = self._answer()
        headers = {name: value for name, value in self.headers.items() if name.lower() in KEPT_HEADERS}
        rank, source = self._rank(headers, answer.response)
        self.tape.request(
            {
                "tag": self.tag,
                "path": self.path,
                "sent_t": self.sent_at,
                "first_token_t": self.first_at if self._fields.get("stream") else None,
                "finish_t": finished_at,
                "headers": headers,
                "request": self._fields,
                "status": status,
                "response": answer.response,
                "prompt_token_ids": answer.prompt or self._fields.get("input_ids"),
                "output_token_ids": answer.output,
                "served_rank": rank,
                "served_rank_source": source,
                "aborted": not is_whole,
                "failed": status is None or status >= 400,
            }
        )

    def _answer(self) -> _Answer:
        return _Answer.of(b"".join(self._pieces), is_stream=bool(self._fields.get("stream")))

    def _rank(self, headers: Mapping[str, str], response: Mapping[str, Any]) -> tuple[int | None, str]:
        if self.info.dp_size == 1:
            return 0, "only one"
        reported = (response.get("meta_info") or {}).get("dp_rank")
        if isinstance(reported, int):
            return reported, "reported"
        asked = {name.lower(): value for name, value in headers.items()}.get("x-data-parallel-rank")
        asked = asked if self.info.engine is not Engine.SGLANG else self._fields.get("routed_dp_rank")
        return (int(asked), "asked") if asked is not None and str(asked).isdecimal() else (None, "unknown")


@dataclass(slots=True)
class _Answer:
    """What is kept of an answer: its last word on usage, and ids of tokens."""

    response: dict[str, Any]
    prompt: list[int] | None
    output: list[int]

    @classmethod
    def of(cls, body: bytes, *, is_stream: bool) -> _Answer:
        documents = [sse.event_data(event) for event in sse.events(body)] if is_stream else [body]
        answer = cls({}, None, [])
        for document in documents:
            try:
                part = json.loads(document)
            except ValueError:
                continue  # [DONE], or an event cut off by an abort
            if isinstance(part, dict):
                answer._take(part)
        return answer

    def _take(self, part: Mapping[str, Any]) -> None:
        for name in ("usage", "meta_info"):
            if part.get(name):
                self.response[name] = part[name]
        choices = part.get("choices") or [{}]
        self.prompt = self.prompt or part.get("prompt_token_ids") or choices[0].get("prompt_token_ids")
        if isinstance(ids := part.get("output_ids"), list):  # SGLang repeats what came before
            self.output = ids
        self.output += choices[0].get("token_ids") or []
