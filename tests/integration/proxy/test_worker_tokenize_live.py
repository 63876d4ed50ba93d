"""A router that asks its worker for token ids, as processes: tests of the parts leave out who runs them."""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Event, Thread
from typing import Any

import httpx
import pytest

from tests.integration.control.test_router_process import Running, router, until

LIMIT_SECONDS = 0.5
#: An answer beyond it has waited for more than the limit, on a busy machine too.
PATIENCE_SECONDS = 4.0
#: Where what the worker says is tested, and not how soon.
LONG_SECONDS = 10.0
TROUBLES = {
    "says-nothing": None,
    "trickles": None,
    "fails": (500, b"{}"),
    "has-none": (404, b'{"detail": "Not Found"}'),
    "sends-away": (307, b""),
    "no-json": (200, b"<html>"),
    "no-ids": (200, b'{"count": 3}'),
    "no-list": (200, b'{"tokens": {"a": 1}}'),
    "nothing": (200, b'{"tokens": []}'),
    "negative": (200, b'{"tokens": [1, -1]}'),
    "huge": (200, b'{"tokens": [1' + b"0" * 40 + b"]}"),
    "deep": (200, b'{"tokens": [1], "x": ' + b"[" * 50_000),
    "endless": (200, b'{"tokens": [1' + b", 1" * (1 << 20) + b"]}"),
    "refuses": (400, b'{"error": {}}'),
}
MODELS = ["m", *TROUBLES]
SAID = [{"role": "user", "content": "hello"}]


class TokenWorker(ThreadingHTTPServer):
    """A worker of many models, of which each tokenizes in a way of its own, and ``m`` as it should."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.asked: list[dict[str, Any]] = []
        self.served: list[bytes] = []
        self.lost = 0
        self.over = Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def handle_error(self, request: object, client_address: object) -> None:
        """Whoever waits no longer has gone."""


class _Handler(BaseHTTPRequestHandler):
    server: TokenWorker
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the library's name
        """Nothing."""

    def do_GET(self) -> None:
        cards = [{"id": name, "object": "model", "max_model_len": 1024} for name in MODELS]
        known = {"/health": b"", "/v1/models": json.dumps({"object": "list", "data": cards}).encode()}
        body = known.get(self.path)
        self._answer(404 if body is None else 200, body or b"")

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        if self.path != "/tokenize":
            self.server.served.append(body)
            usage = {"prompt_tokens": 3, "completion_tokens": 1, "total_tokens": 4}
            return self._answer(200, json.dumps({"choices": [], "usage": usage}).encode())
        asked = json.loads(body)
        self.server.asked.append(asked)
        model = asked["model"]
        if model == "trickles":
            return self._trickle()
        if model == "says-nothing":
            self.connection.settimeout(60)
            self.server.lost += self.rfile.read(1) == b""
            return None
        return self._answer(*(TROUBLES.get(model) or (200, json.dumps({"tokens": _ids(asked)}).encode())))

    def _answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _trickle(self) -> None:
        """Each byte comes in time, and the last never."""
        self.send_response(200)
        self.send_header("content-length", "1000")
        self.end_headers()
        while not self.server.over.wait(LIMIT_SECONDS / 5):
            self.wfile.write(b" ")
            self.wfile.flush()


def _ids(asked: dict[str, Any]) -> list[int]:
    """A token a character."""
    return [ord(char) for char in json.dumps(asked.get("messages") or asked.get("prompt"))]


@pytest.fixture(scope="module")
def worker() -> Iterator[TokenWorker]:
    with TokenWorker() as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.over.set()
        server.shutdown()


@contextlib.contextmanager
def _router(worker: TokenWorker, limit_seconds: float) -> Iterator[tuple[Running, httpx.Client, httpx.Client]]:
    limit = ("--routing.worker-tokenize-seconds", str(limit_seconds))
    with router("--worker", worker.url, "--probes.parity", "false", *limit) as (running, data, admin):
        until(lambda: data.get("/readyz").status_code == 200)
        yield running, data, admin


@pytest.fixture(scope="module")
def doors(worker: TokenWorker) -> Iterator[tuple[httpx.Client, httpx.Client]]:
    """The two doors of a router that waits for long."""
    with _router(worker, LONG_SECONDS) as (running, data, admin):
        yield data, admin
        status, errors = running.stop()
    assert (status, "Traceback" in errors) == (0, False)


@pytest.fixture(scope="module")
def hasty_doors(worker: TokenWorker) -> Iterator[tuple[httpx.Client, httpx.Client]]:
    """Of one that does not."""
    with _router(worker, LIMIT_SECONDS) as (_, data, admin):
        yield data, admin


def _chat(model: str, text: str = "hello") -> dict[str, Any]:
    return {"model": model, "messages": [{"role": "user", "content": text}]}


def _explained(admin: httpx.Client, answer: httpx.Response) -> dict[str, Any]:
    assert answer.status_code == 200, answer.text
    told: dict[str, Any] = admin.get("/admin/explain", params={"request_id": answer.headers["x-request-id"]}).json()
    return told


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("chat/completions", {"messages": SAID}),
        ("completions", {"prompt": "hello"}),
        ("responses", {"input": "hello"}),
        ("messages", {"messages": SAID, "max_tokens": 1}),
    ],
)
def test_prompts_are_keyed_by_the_ids_of_the_worker(
    worker: TokenWorker, doors: tuple[httpx.Client, httpx.Client], path: str, fields: dict[str, Any]
) -> None:
    """The worker is asked, and what it says counts."""
    data, admin = doors
    worker.asked.clear()
    answer = data.post(f"/v1/{path}", json={"model": "m", **fields})

    told = _explained(admin, answer)
    (asked,) = worker.asked
    assert asked.get("messages", asked.get("prompt")) == (SAID if path != "completions" else "hello")
    assert (told["keyed"], told["prompt_tokens"]) == ("worker", len(_ids(asked)))


def test_a_question_about_a_request_is_answered_so_too(doors: tuple[httpx.Client, httpx.Client]) -> None:
    """``POST /admin/explain``."""
    told = doors[1].post("/admin/explain", json={"body": _chat("m", "another")}).json()
    assert told["keyed"] == "worker"


def test_a_prompt_with_more_ids_than_fit_is_served_all_the_same(doors: tuple[httpx.Client, httpx.Client]) -> None:
    """By load alone: the worker judges it."""
    told = _explained(doors[1], doors[0].post("/v1/chat/completions", json=_chat("m", "long " * 400)))
    assert told["keyed"] == "none"


@pytest.mark.parametrize("model", TROUBLES)
def test_what_the_worker_does_amiss_costs_the_limit_at_most(
    hasty_doors: tuple[httpx.Client, httpx.Client], model: str
) -> None:
    """The prompt is then keyed by its text."""
    data, admin = hasty_doors
    started = time.monotonic()
    answer = data.post("/v1/chat/completions", json=_chat(model))
    seconds = time.monotonic() - started

    assert _explained(admin, answer)["keyed"] == "text"
    assert seconds < PATIENCE_SECONDS


def test_many_at_once(doors: tuple[httpx.Client, httpx.Client]) -> None:
    """Whoever the worker is not asked about is keyed by text."""
    data, admin = doors
    with ThreadPoolExecutor(32) as threads:
        answers = list(
            threads.map(lambda at: data.post("/v1/chat/completions", json=_chat("m", f"many {at}")), range(64))
        )
    assert {_explained(admin, answer)["keyed"] for answer in answers} in ({"worker"}, {"worker", "text"})


def test_a_client_that_leaves_ends_the_question(worker: TokenWorker, doors: tuple[httpx.Client, httpx.Client]) -> None:
    """Its connection to the worker is closed, and nothing of it is left."""
    data, admin = doors
    lost, asked = worker.lost, len(worker.asked)
    body = json.dumps(_chat("says-nothing")).encode()
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\ncontent-length: %d\r\n\r\n" % len(body)
    with socket.create_connection((data.base_url.host, data.base_url.port), timeout=10) as client:
        client.sendall(head + body)
        until(lambda: len(worker.asked) > asked)
    until(lambda: worker.lost == lost + 1, seconds=0.8 * LONG_SECONDS)
    until(lambda: "homing_inflight_requests 0.0" in admin.get("/metrics").text)
