"""A data plane on a real socket, with a brain that takes ranks in order, and an h11 client to ask it."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

import h11
import structlog
from prometheus_client import CollectorRegistry

from router.core.keys import Keyring
from router.core.types import Decision, Engine, RankId, Reason
from router.errors import NotFound, NoWorker
from router.fleet.target import Target
from router.proxy.plane import DataPlane
from router.proxy.types import Attempt, Outcome
from router.settings import QueueSettings, ServerSettings, UpstreamSettings
from router.telemetry.metrics import Metrics
from router.telemetry.tracing import Tracing
from router.wire.openai import InferenceRequest
from router.wire.usage import Usage
from tests.fakes.fault_worker import event


async def until(condition: Callable[[], bool], *, seconds: float = 10.0) -> None:
    """Wait for something that announces itself to nobody."""
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.002)


@dataclass
class FakeLease:
    """Remembers what became of it."""

    first_bytes: int = 0
    closed: list[tuple[Outcome, Usage | None]] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    heard_ids: int = 0
    words: str | None = None
    answers: bool | None = None
    slots: frozenset[int] = frozenset()

    def beside(self) -> frozenset[int]:
        return self.slots

    def worker_answers(self) -> bool | None:
        return self.answers

    def first_byte(self, generated: Callable[[], int] | None = None) -> None:
        self.first_bytes += 1

    def handed(self) -> None:
        """Nothing is measured."""

    def generated(self, ids: Sequence[int]) -> None:
        self.heard_ids = len(ids)

    def close(
        self,
        outcome: Outcome,
        usage: Usage | None,
        *,
        output: Sequence[int] = (),
        first_words: Callable[[], str] | None = None,
    ) -> None:
        self.closed.append((outcome, usage))
        self.ids = list(output)
        self.words = None if first_words is None else first_words()


@dataclass(frozen=True)
class FakePrepared:
    model: str
    told_model: str
    is_splittable: bool = False


@dataclass
class FakeBrain:
    """Chooses the first target that has not failed. Knows the model ``m``, also as ``alias``."""

    targets: Sequence[Target]
    leases: list[FakeLease] = field(default_factory=list)
    prepared: list[tuple[InferenceRequest, Mapping[str, str]]] = field(default_factory=list)
    tenants: list[str] = field(default_factory=list)
    preparing: asyncio.Event | None = None
    #: Whether workers answer probes.
    answers: bool | None = None

    async def prepare(
        self, request: InferenceRequest, headers: Mapping[str, str], *, tenant: str, request_id: str
    ) -> FakePrepared:
        self.prepared.append((request, headers))
        self.tenants.append(tenant)
        if self.preparing is not None:
            await self.preparing.wait()
        if request.model == "bug":
            raise ZeroDivisionError
        if request.model not in ("m", "alias"):
            raise NotFound(f"The model '{request.model}' does not exist.", code="model_not_found", param="model")
        return FakePrepared("m", "m")

    def hold(self, prepared: FakePrepared, go: Callable[[], None], *, exclude: frozenset[int] = frozenset()) -> None:
        """Nothing is held."""

    def choose(self, prepared: FakePrepared, *, exclude: frozenset[int] = frozenset()) -> Attempt:
        for slot, target in enumerate(self.targets):
            if slot not in exclude:
                place = target[:2]
                beside = frozenset(slot for slot, other in enumerate(self.targets) if other[:2] == place)
                self.leases.append(FakeLease(answers=self.answers, slots=beside))
                rank = RankId(f"w{slot}", target.rank)
                decision = Decision(slot, rank, Reason.COLD, 16 * slot, 16 * slot, 0.0)
                return Attempt(target, decision, self.leases[-1])
        raise NoWorker("No rank can take the request now.")

    def full(self) -> frozenset[int]:
        return frozenset()

    def model_list(self) -> bytes:
        return b'{"object": "list", "data": []}'

    def model_card(self, name: str) -> bytes:
        if name != "m":
            raise NotFound(f"The model '{name}' does not exist.", code="model_not_found", param="model")
        return b'{"id": "m"}'

    def ready(self) -> bool:
        return bool(self.targets)

    @property
    def outcomes(self) -> list[str]:
        """How each attempt ended. An attempt whose lease was not closed once shows as such."""
        return [lease.closed[0][0].value if len(lease.closed) == 1 else f"{lease.closed}" for lease in self.leases]


def target(port: int, *, rank: int = 0, dp_size: int = 1, engine: Engine = Engine.SHIM) -> Target:
    return Target("127.0.0.1", port, rank, dp_size, engine)


@dataclass
class Rig:
    """A running data plane and all that a test looks at."""

    plane: DataPlane
    brain: FakeBrain
    metrics: Metrics
    port: int

    def count(self, name: str, **labels: str) -> float:
        """A metric's value now, 0 where it has none."""
        return self.metrics.registry.get_sample_value(name, labels) or 0.0

    async def connect(self, *, tls: ssl.SSLContext | None = None) -> Client:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port, ssl=tls)
        return Client(reader, writer)

    async def ask(self, body: object, **options: object) -> RawAnswer:
        """One request on a connection of its own."""
        client = await self.connect()
        try:
            await client.send(body, **options)  # type: ignore[arg-type]
            return await client.answer()
        finally:
            await client.close()

    async def until_quiet(self) -> None:
        """Wait until no client is connected and no request served."""
        await until(lambda: not self.count("homing_connections") and not self.count("homing_inflight_requests"))


@asynccontextmanager
async def rig(
    *targets: Target,
    server: ServerSettings | None = None,
    upstream: UpstreamSettings | None = None,
    keyring: Keyring | None = None,
    tls: ssl.SSLContext | None = None,
    tracing: Tracing | None = None,
    queue: QueueSettings | None = None,
    worker_key_line: Callable[[], bytes] | None = None,
) -> AsyncIterator[Rig]:
    """A data plane before ``targets``. It must be quiet in the end, and leave no connection and no task."""
    before = asyncio.all_tasks()
    brain = FakeBrain(targets)
    metrics = Metrics(CollectorRegistry())
    log = structlog.wrap_logger(structlog.ReturnLogger(), wrapper_class=structlog.make_filtering_bound_logger(0))
    settings = server or ServerSettings(port=0)
    plane = DataPlane(
        brain,
        metrics,
        settings,
        upstream or UpstreamSettings(),
        log,
        keyring=keyring,
        tls=tls,
        tracing=tracing,
        queue_settings=queue,
        worker_key_line=worker_key_line,
    )
    port = await plane.start()
    try:
        yield Rig(plane, brain, metrics, port)
        await until(lambda: plane.open_connections[0] == 0)
        names = ("UpstreamPool.connect", "_go_on")
        # A task that was cancelled takes a turn or two of the loop to end.
        await until(lambda: not any(name in repr(task) for task in asyncio.all_tasks() - before for name in names))
        assert all(len(lease.closed) == 1 for lease in brain.leases), brain.outcomes
        assert metrics.registry.get_sample_value("homing_inflight_requests") == 0
    finally:
        await plane.drain(0)
    await until(lambda: plane.open_connections == (0, 0))


@dataclass
class RawAnswer:
    """An answer as h11 understands it. ``complete``: it ended as HTTP says."""

    status: int
    headers: dict[str, str]
    body: bytes
    complete: bool

    @property
    def json(self) -> dict[str, object]:
        value = json.loads(self.body)
        assert isinstance(value, dict)
        return value

    @property
    def error(self) -> dict[str, object]:
        error = self.json["error"]
        assert isinstance(error, dict)
        return error


CHAT = "/v1/chat/completions"
ASK = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
STREAM = {**ASK, "stream": True}
DELTA = event({"choices": [{"delta": {"content": "a"}}]})


def raw(body: object = ASK, *, path: str = CHAT, extra: str = "") -> bytes:
    data = json.dumps(body).encode()
    return f"POST {path} HTTP/1.1\r\nhost: a\r\n{extra}content-length: {len(data)}\r\n\r\n".encode() + data


class Client:
    """One connection to the router."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer
        self._h11 = h11.Connection(h11.CLIENT)

    async def send(
        self,
        body: object = b"",
        *,
        method: str = "POST",
        path: str = CHAT,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """A request; a body that is not bytes is sent as JSON."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        fields = {"host": "router", "content-length": str(len(data)), **(headers or {})}
        request = h11.Request(method=method, target=path, headers=list(fields.items()))
        out = self._h11.send(request) or b""
        out += self._h11.send(h11.Data(data=data)) or b"" if data else b""
        out += self._h11.send(h11.EndOfMessage()) or b""
        self.writer.write(out)
        await self.writer.drain()

    async def head(self) -> h11.Response:
        """The next answer's head; its body is read by ``rest``."""
        head = await self._event()
        assert isinstance(head, h11.Response), head
        return head

    async def piece(self) -> bytes | None:
        """The next piece of the body, None at its end."""
        event = await self._event()
        return bytes(event.data) if isinstance(event, h11.Data) else None

    async def answer(self) -> RawAnswer:
        """The next answer, as far as it comes."""
        head = await self.head()
        body = b""
        complete = True
        try:
            while (piece := await self.piece()) is not None:
                body += piece
        except (h11.RemoteProtocolError, ConnectionError):
            complete = False
        if complete and self._h11.our_state is h11.DONE and self._h11.their_state is h11.DONE:
            self._h11.start_next_cycle()
        headers = {name.decode(): value.decode() for name, value in head.headers}
        return RawAnswer(head.status_code, headers, body, complete)

    async def _event(self) -> object:
        while True:
            event = self._h11.next_event()
            if event is not h11.NEED_DATA:
                return event
            self._h11.receive_data(await self.reader.read(65536))

    async def close(self) -> None:
        self.writer.close()
        with suppress(ConnectionError):
            await self.writer.wait_closed()
