"""Who may come in: keys, TLS, connection limits; and what of a caller's headers goes further."""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
from contextlib import AsyncExitStack, suppress
from pathlib import Path

import pytest

from router.core.keys import Key, Keyring, Role, digest_of
from router.errors import ConfigError
from router.proxy import server
from router.settings import ServerSettings, UpstreamSettings
from router.tls import Certificate
from tests.fakes.certificates import make_certificate, trusting
from tests.fakes.fault_worker import OK_BODY, FaultWorker, Script, chunk, stream_head
from tests.fakes.proxy_rig import CHAT, DELTA, rig, target, until

ASK = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


def ring() -> Keyring:
    return Keyring(
        [Key("team-a", digest_of(b"sk-a")), Key("ops", digest_of(b"sk-ops"), frozenset({Role.ADMIN}))], secret=b"s"
    )


# --- keys ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("headers", "status", "code"),
    [
        ({}, 401, "missing_api_key"),
        ({"authorization": "Bearer sk-b"}, 401, "invalid_api_key"),
        ({"authorization": "sk-a"}, 401, "missing_api_key"),
        ({"authorization": "Bearer sk-ops"}, 403, "key_not_allowed"),
        ({"x-api-key": "sk-b"}, 401, "invalid_api_key"),
    ],
)
@pytest.mark.parametrize("path", [CHAT, "/v1/messages", "/nowhere"])
async def test_without_a_good_key_nothing_is_answered(
    path: str, headers: dict[str, str], status: int, code: str
) -> None:
    """401 with a challenge, 403 for a key of the other plane, in the shape of the API asked; no worker hears of it."""
    async with FaultWorker() as worker, rig(target(worker.port), keyring=ring()) as it:
        answer = await it.ask(ASK, path=path, headers=headers)
        assert answer.status == status
        assert answer.error["code"] == code
        assert (answer.json.get("type") == "error") == (path == "/v1/messages")
        assert ("www-authenticate" in answer.headers) == (status == 401)
        assert it.brain.prepared == []
        assert worker.requests == []
        assert it.count("homing_errors_total", code=code) == 1


async def test_who_is_refused_is_not_waited_for_long() -> None:
    """However much of the body came with the head: not as long as the body of somebody else."""
    async with rig(keyring=ring(), server=ServerSettings(port=0, body_timeout_seconds=60)) as it:
        reader, writer = await asyncio.open_connection("127.0.0.1", it.port)
        writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: 9000000\r\n\r\n" + b"x" * 100_000)
        assert (await reader.read()).startswith(b"HTTP/1.1 401 ")
        await until(lambda: it.plane.open_connections == (0, 0))
        writer.close()


@pytest.mark.parametrize("headers", [{"authorization": "Bearer sk-a"}, {"x-api-key": "sk-a"}, {"api-key": "sk-a"}])
async def test_a_key_names_its_tenant_and_stays_here(headers: dict[str, str]) -> None:
    """Sessions are scoped by the key's tenant; the worker does not see the key."""
    async with FaultWorker() as worker, rig(target(worker.port), keyring=ring()) as it:
        answer = await it.ask(ASK, headers=headers)
        assert answer.body == OK_BODY
        assert it.brain.tenants == ["team-a"]
        assert b"sk-a" not in worker.requests[0].head


async def test_probes_need_no_key() -> None:
    """Load balancers have none; the list of models is not for them."""
    async with FaultWorker() as worker, rig(target(worker.port), keyring=ring()) as it:
        statuses = {
            path: (await it.ask(method="GET", path=path, body=b"")).status
            for path in ("/health", "/livez", "/readyz", "/v1/models", "/v1/models/m")
        }
        assert statuses == {"/health": 200, "/livez": 200, "/readyz": 200, "/v1/models": 401, "/v1/models/m": 401}


async def test_a_refused_key_leaves_the_connection_usable() -> None:
    """The next request on it may bring the right one."""
    async with FaultWorker() as worker, rig(target(worker.port), keyring=ring()) as it:
        client = await it.connect()
        await client.send(ASK, headers={"authorization": "Bearer no"})
        assert (await client.answer()).status == 401
        await client.send(ASK, headers={"authorization": "Bearer sk-a"})
        assert (await client.answer()).status == 200
        await client.close()


# --- headers -------------------------------------------------------------------------------------


async def test_an_operator_lists_what_goes_on() -> None:
    """With a list only what it names reaches the worker, besides what the body needs; credentials never do."""
    upstream = UpstreamSettings(forward_headers=("X-Kept", "authorization"), drop_headers=("x-dropped",))
    sent = {"x-kept": "1", "x-other": "2", "x-dropped": "3", "authorization": "Bearer x", "content-type": "a/json"}
    async with FaultWorker() as worker, rig(target(worker.port), upstream=upstream) as it:
        await it.ask(ASK, headers=sent)
        (received,) = worker.requests
        assert received.header("x-kept") == "1"
        assert received.header("content-type") == "a/json"
        assert received.header("x-request-id") is not None
        for name in ("x-other", "x-dropped", "authorization"):
            assert received.header(name) is None


# --- TLS -----------------------------------------------------------------------------------------


async def test_everything_works_over_tls(tmp_path: Path) -> None:
    """Requests one after another on a connection, a large body both ways, and refusals."""
    certificate = Certificate(*make_certificate(tmp_path))
    trust = trusting(tmp_path / "server.pem")
    async with FaultWorker() as worker, rig(target(worker.port), tls=certificate.context) as it:
        client = await it.connect(tls=trust)
        await client.send({**ASK, "padding": "x" * 3_000_000})
        assert (await client.answer()).body == OK_BODY
        await client.send(b"{")
        assert (await client.answer()).status == 400
        await client.send(ASK, headers={"connection": "close"})
        assert (await client.answer()).status == 200
        await client.close()
        assert len(worker.requests[0].body) > 3_000_000


async def last_words(port: int, trust: ssl.SSLContext, data: bytes, *, pause: float) -> None:
    """Shake hands, send ``data``, say goodbye ``pause`` seconds later, in the same piece of TCP if 0; then leave."""
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    tls = trust.wrap_bio(incoming, outgoing, server_hostname="127.0.0.1")
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    while True:
        with suppress(ssl.SSLWantReadError):
            tls.do_handshake()
            break
        writer.write(outgoing.read())
        incoming.write(await reader.read(65536))
    tls.write(data)
    if pause:
        writer.write(outgoing.read())
        await asyncio.sleep(pause)
    with suppress(ssl.SSLWantReadError, ssl.SSLError):
        tls.unwrap()
    writer.write(outgoing.read())
    with suppress(OSError):
        await reader.read()
    writer.close()


@pytest.mark.parametrize("answers", [True, False])
async def test_a_goodbye_over_tls_is_counted_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, *, answers: bool
) -> None:
    """A goodbye that is read only when the connection is closed ends no request a second time: behind more requests
    than are read, of which the first is answered until the close; behind one that is refused at once, and is the last.
    """
    certificate = Certificate(*make_certificate(tmp_path))
    trust = trusting(tmp_path / "server.pem")
    body = json.dumps({**ASK, "stream": True}).encode()
    version, connection, copies, pause = (b"1.0", b"keep-alive", 12, 0.05) if answers else (b"1.1", b"close", 2, 0)
    head = b"POST /v1/chat/completions HTTP/%b\r\nhost: a\r\nconnection: %b\r\ncontent-length: %d\r\n\r\n"
    data = (head % (version, connection, len(body)) + body) * copies
    script: Script = (stream_head(), chunk(DELTA), 0.1, chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")
    async with (
        FaultWorker([script]) as worker,
        rig(*[target(worker.port)] * answers, tls=certificate.context) as it,
    ):
        await last_words(it.port, trust, data, pause=pause)
        await until(lambda: it.count("homing_connections") == 0)
        assert it.count("homing_inflight_requests") == 0
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


async def test_plain_text_gets_no_answer_from_a_tls_door(tmp_path: Path) -> None:
    """The connection closes; the door stays open to others."""
    certificate = Certificate(*make_certificate(tmp_path))
    async with FaultWorker() as worker, rig(target(worker.port), tls=certificate.context) as it:
        reader, writer = await asyncio.open_connection("127.0.0.1", it.port)
        writer.write(b"GET /health HTTP/1.1\r\nhost: a\r\n\r\n")
        said = await reader.read()
        assert not said.startswith(b"HTTP")
        writer.close()
        client = await it.connect(tls=trusting(tmp_path / "server.pem"))
        await client.send(ASK)
        assert (await client.answer()).status == 200
        await client.close()


async def test_old_tls_is_refused(tmp_path: Path) -> None:
    """TLS 1.1 and before are broken."""
    certificate = Certificate(*make_certificate(tmp_path))
    assert certificate.context.minimum_version >= ssl.TLSVersion.TLSv1_2


async def test_a_certificate_is_renewed_while_running(tmp_path: Path) -> None:
    """New connections get the new one, old ones live on; files that do not fit change nothing."""
    files = make_certificate(tmp_path, name="first")
    certificate = Certificate(*files)
    first = trusting(files[0])
    async with FaultWorker() as worker, rig(target(worker.port), tls=certificate.context) as it:
        old = await it.connect(tls=first)
        (tmp_path / "other").mkdir()
        make_certificate(tmp_path, name="second")
        second = trusting(files[0])
        good_key = files[1].read_bytes()
        files[1].write_bytes(make_certificate(tmp_path / "other")[1].read_bytes())
        with pytest.raises(ConfigError, match="cannot be used"):
            certificate.reload()
        still = await it.connect(tls=first)
        files[1].write_bytes(good_key)
        certificate.reload()
        with pytest.raises(ssl.SSLCertVerificationError):
            await it.connect(tls=first)
        new = await it.connect(tls=second)
        for client in (old, still, new):
            await client.send(ASK)
            assert (await client.answer()).status == 200
            await client.close()


@pytest.mark.parametrize("damage", ["missing", "garbage", "encrypted"])
def test_files_that_cannot_be_used_refuse_to_start(damage: str, tmp_path: Path) -> None:
    """A sentence names the file."""
    certificate, key = make_certificate(tmp_path)
    if damage == "missing":
        key.unlink()
    elif damage == "garbage":
        key.write_text("-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n")
    else:
        lines = "Proc-Type: 4,ENCRYPTED\nDEK-Info: AES-128-CBC,00000000000000000000000000000000\n\nAAAA\n"
        key.write_text(f"-----BEGIN EC PRIVATE KEY-----\n{lines}-----END EC PRIVATE KEY-----\n")
    with pytest.raises(ConfigError, match="server.key" if damage == "missing" else "server.pem"):
        Certificate(certificate, key)


async def test_a_handshake_takes_a_place(tmp_path: Path) -> None:
    """Whoever connects and says nothing counts as a client does, and is given up in time."""
    certificate = Certificate(*make_certificate(tmp_path))
    trust = trusting(tmp_path / "server.pem")
    server = ServerSettings(port=0, max_connections=2, header_timeout_seconds=1.0)
    async with FaultWorker() as worker, rig(target(worker.port), tls=certificate.context, server=server) as it:
        silent = [await asyncio.open_connection("127.0.0.1", it.port) for _ in range(2)]
        await until(lambda: it.plane._limits._count == 2)
        with pytest.raises(ConnectionError):
            await it.connect(tls=trust)
        assert it.count("homing_errors_total", code="too_many_connections") == 1
        async with asyncio.timeout(20):
            for reader, writer in silent:
                with suppress(ConnectionError):
                    assert await reader.read() == b""
                writer.close()
        client = await it.connect(tls=trust)
        await client.send(ASK)
        assert (await client.answer()).status == 200
        await client.close()


# --- keys and bodies -----------------------------------------------------------------------------


async def test_who_has_no_key_need_not_send_a_body() -> None:
    """Refused at the head: nothing of the body is asked for or kept."""
    async with FaultWorker() as worker, rig(target(worker.port), keyring=ring()) as it:
        for headers in ("expect: 100-continue\r\n", ""):
            reader, writer = await asyncio.open_connection("127.0.0.1", it.port)
            writer.write(f"POST {CHAT} HTTP/1.1\r\nhost: a\r\n{headers}content-length: 60000000\r\n\r\n".encode())
            async with asyncio.timeout(20):
                said = await reader.read()
            assert said.startswith(b"HTTP/1.1 401 ")
            assert b"\r\nx-request-id: " in said
            writer.close()
        assert not worker.requests


# --- connections ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("total", "per_address", "status"), [(2, 0, 503), (0, 2, 429), (2, 2, 503)])
async def test_connections_beyond_the_limit_are_turned_away(total: int, per_address: int, status: int) -> None:
    """The one too many is told so and closed; when another leaves, its place is free."""
    server = ServerSettings(port=0, max_connections=total, max_connections_per_address=per_address)
    async with FaultWorker() as worker, rig(target(worker.port), server=server) as it:
        first, second = [await it.connect() for _ in range(2)]
        await until(lambda: it.count("homing_connections") == 2)
        reader, writer = await asyncio.open_connection("127.0.0.1", it.port)
        said = await reader.read()
        assert said.startswith(b"HTTP/1.1 %d " % status)
        assert b'"too_many_connections"' in said
        assert b"retry-after: 1\r\n" in said
        assert b"connection: close\r\n" in said
        writer.close()
        # Who speaks at once hears the answer all the same, not a reset.
        reader, writer = await asyncio.open_connection("127.0.0.1", it.port)
        writer.write(b"x" * 100_000)
        await asyncio.sleep(0.05)
        writer.write(b"x" * 100_000)
        assert (await reader.read()).startswith(b"HTTP/1.1 %d " % status)
        writer.close()
        assert it.count("homing_errors_total", code="too_many_connections") == 2
        assert it.count("homing_client_disconnects_total") == 0
        await first.close()
        await until(lambda: it.count("homing_connections") == 1)
        third = await it.connect()
        for client in (second, third):
            await client.send(ASK)
            assert (await client.answer()).status == 200
            await client.close()


async def test_no_more_than_a_few_who_are_turned_away_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """After its answer such a connection stays open for what the client may still be sending. A flood of them would
    take every file there is: 64 may stay, the others are closed with the answer.
    """
    monkeypatch.setattr(server, "_LINGER_SECONDS", 30.0)
    loop = asyncio.get_running_loop()
    async with rig(server=ServerSettings(port=0, max_connections=1)) as it, AsyncExitStack() as stack:
        first = await it.connect()
        await until(lambda: it.count("homing_connections") == 1)
        refused = [stack.enter_context(socket.socket()) for _ in range(80)]
        for client in refused:
            client.setblocking(False)
            await loop.sock_connect(client, ("127.0.0.1", it.port))
        for client in refused:
            said = b""
            while piece := await loop.sock_recv(client, 65536):
                said += piece
            assert said.startswith(b"HTTP/1.1 503 ")
            client.send(b"x")  # answered by a reset where nobody is left
        await asyncio.sleep(0.1)
        assert sum(_is_reset(client) for client in refused) == 16
        await first.close()
    await asyncio.sleep(0.1)  # until those are gone who waited


def _is_reset(client: socket.socket) -> bool:
    try:
        client.send(b"x")
    except ConnectionError:
        return True
    return False
