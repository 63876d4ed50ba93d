"""The router as an operator runs it: a process with a ready line, signals and an exit status, before a real shim."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.fakes.ports import reserve

SHIM = ("shim", "--runner", "sim", "--model", "needle")
#: 408 tokens: 25 whole blocks of 16 and a half one, so that the same prompt again reuses 400.
PROMPT = " ".join(f"key-{number:04d} val-{number:04d}" for number in range(204))


class Running:
    """A process, the words of its ready line, and what it has written to stderr, which is read as it comes."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.words: dict[str, str] = {}
        self.errors = ""
        self._reading = threading.Thread(target=self._read, daemon=True)
        self._reading.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.errors += line

    def stop(self, number: signal.Signals = signal.SIGTERM) -> tuple[int, str]:
        """Exit status and what it wrote to stderr."""
        self.process.send_signal(number)
        return self.wait()

    def wait(self) -> tuple[int, str]:
        """The same, once it ends by itself."""
        status = self.process.wait(timeout=60)
        self._reading.join()
        return status, self.errors


@contextlib.contextmanager
def homing(*arguments: str) -> Iterator[Running]:
    """Start a part and wait until it says that it is ready."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HOMING")}
    process = subprocess.Popen(
        [sys.executable, "-m", "router.cli", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment | {"OMP_NUM_THREADS": "1"},
    )
    running = Running(process)
    timer = threading.Timer(100, process.kill)
    timer.start()
    with process:  # which closes its pipes
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            timer.cancel()
            assert " ready " in line, line + running.wait()[1]
            running.words = dict(word.split("=", 1) for word in line.split() if "=" in word)
            yield running
        finally:
            timer.cancel()
            process.kill()
            running.wait()


@contextlib.contextmanager
def router(*arguments: str) -> Iterator[tuple[Running, httpx.Client, httpx.Client]]:
    """A router with a client for each of its doors."""
    ports = ("--port", "0", "--admin-port", "0", "--probes.interval-seconds", "0.2")
    with (
        homing("router", *ports, *arguments) as running,
        httpx.Client(base_url=running.words["data"], timeout=60) as data,
        httpx.Client(base_url=running.words["admin"], timeout=60) as admin,
    ):
        yield running, data, admin


@contextlib.contextmanager
def shim(*arguments: str, ports: tuple[str, str, str] = ("0", "0", "0")) -> Iterator[tuple[Running, str]]:
    """A shim and its URL."""
    named = zip(("--port", "--kv-events-port", "--replay-port"), ports, strict=True)
    with homing(*SHIM, *(word for pair in named for word in pair), *arguments) as running:
        yield running, "http://" + running.words["http"].removeprefix("http://")


@contextlib.contextmanager
def reserved(*ports: str) -> Iterator[None]:
    """Nobody else gets these ports of this machine, on which nobody listens."""
    with contextlib.ExitStack() as stack:
        for port in ports:
            stack.enter_context(reserve(int(port)))
        yield


def until(holds: Callable[[], bool], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "did not become true in time"
        time.sleep(0.05)


def is_shut(door: httpx.Client) -> bool:
    """Nobody new is let in."""
    try:
        httpx.get(door.base_url.join("/livez"))
    except httpx.ConnectError:
        return True
    return False


def workers(admin: httpx.Client) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = admin.get("/admin/workers").json()["workers"]
    return found


def blocks(admin: httpx.Client) -> list[int]:
    return [rank["resident_blocks"] for worker in workers(admin) for rank in worker["ranks"]]


def ask(data: httpx.Client, prompt: str = PROMPT, session: str = "s") -> httpx.Response:
    body = {"model": "needle", "prompt": prompt, "max_tokens": 2}
    answer = data.post("/v1/completions", json=body, headers={"x-session-id": session})
    assert answer.status_code == 200, answer.text
    return answer


def cached(answer: httpx.Response) -> int:
    tokens: int = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    return tokens


def test_a_router_without_workers_is_up_but_not_ready() -> None:
    """Alive, not ready, and gone without a trace on Ctrl-C."""
    with router() as (running, data, admin):
        assert admin.get("/health").json() == {"status": "ok"}
        assert data.get("/livez").status_code == 200
        assert data.get("/readyz").status_code == 503
        status, errors = running.stop(signal.SIGINT)
    assert status == 0
    assert "Traceback" not in errors
    assert errors.count("no worker is named") == 1


@pytest.mark.parametrize("option", ["--port", "--admin-port"])
def test_a_taken_port_is_told_in_one_line(option: str) -> None:
    """Exit status 1; the address and the option that changes it."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        other = "--admin-port" if option == "--port" else "--port"
        command = [sys.executable, "-m", "router.cli", "router", option, port, other, "0"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 1
    assert done.stderr == (
        f"homing router: cannot listen on 127.0.0.1:{port}: the port is in use; choose another with {option}\n"
    )
    assert done.stdout == ""


def test_settings_from_all_sources_reach_the_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers of a YAML file are registered; one that is down is reported and harms nothing."""
    file = tmp_path / "router.yaml"
    file.write_text("workers: [{url: 'http://127.0.0.1:9', id: gone}]\nlog_format: json\n")
    with router("--config", str(file), "--policy", "round_robin") as (running, data, admin):
        until(lambda: workers(admin)[0]["status"] == "down")
        assert workers(admin)[0]["reason"] == "nothing listens at http://127.0.0.1:9/v1/models"
        assert admin.get("/admin/fleet").json()["policy"] == "round_robin"
        assert data.get("/readyz").status_code == 503
        refused = data.post("/v1/completions", json={"model": "m", "prompt": "x"})
        assert refused.status_code == 503
        assert refused.json()["error"]["message"] == "No worker is up: the only one is down."
        status, errors = running.stop()
    assert status == 0
    assert '"worker": "gone"' in errors
    assert "no worker is named" not in errors


def test_a_shim_added_at_run_time_serves_from_its_cache() -> None:
    """Registered over the API, tokenizer learned, second turn home, and the promise equals what the engine reports."""
    with shim("--dp-size", "2") as (_, url), router("--probes.parity", "false") as (running, data, admin):
        assert admin.post("/admin/workers", json={"url": url, "id": "w"}).status_code == 202
        until(lambda: workers(admin)[0]["status"] == "ready")
        again = admin.post("/admin/workers", json={"url": url.replace("127.0.0.1", "localhost")})
        assert again.status_code == 409
        assert "is the same server as worker 'w'" in again.json()["error"]["message"]
        assert data.get("/v1/models").json() == httpx.get(url + "/v1/models").json()
        first, second = ask(data), ask(data, PROMPT + " key-0001")
        assert first.headers["x-homing-reason"] == "cold"
        assert second.headers["x-homing-reason"] == "home"
        assert second.headers["x-homing-rank"] == first.headers["x-homing-rank"]
        assert cached(second) == int(second.headers["x-homing-expected-cached-tokens"]) == 400
        until(lambda: min(blocks(admin)) == 0 < max(blocks(admin)))
        assert admin.get("/admin/sessions").json()["sessions"][0]["home"] == f"w/{first.headers['x-homing-rank']}"
        until(lambda: max(blocks(admin)) == 25)  # nothing more is to come
        assert admin.post("/admin/workers/w/reset_cache").status_code == 200
        assert blocks(admin) == [0, 0]
        assert cached(ask(data)) == 0
        assert admin.delete("/admin/workers/w").status_code == 204
        refused = data.post("/v1/completions", json={"model": "needle", "prompt": "x"})
        assert refused.status_code == 503
        status, errors = running.stop()
    assert status == 0
    assert "Traceback" not in errors


def test_a_router_that_joins_late_knows_what_is_warm() -> None:
    """A first router warms one rank and goes; a second one finds the prefix there without having sent it."""
    with shim("--dp-size", "2") as (_, url):
        with router("--worker", url) as (_, data, admin):
            until(lambda: data.get("/readyz").status_code == 200)
            warm_rank = ask(data).headers["x-homing-rank"]
        with router("--worker", url) as (_, data, admin):
            until(lambda: data.get("/readyz").status_code == 200 and sum(blocks(admin)) >= 25)
            answer = ask(data, session="another")
            assert answer.headers["x-homing-rank"] == warm_rank
            assert int(answer.headers["x-homing-expected-cached-tokens"]) == cached(answer) == 400


def test_a_shim_that_restarts_is_trusted_with_nothing_old() -> None:
    """The same ports, a new process: no block of the old one is believed, and requests go on."""
    with shim() as (old, url), router("--worker", url) as (_, data, admin):
        until(lambda: data.get("/readyz").status_code == 200)
        ask(data)
        until(lambda: sum(blocks(admin)) > 0)
        http, events, replay = (old.words[name].rsplit(":", 1)[-1] for name in ("http", "events", "replay"))
        assert old.stop()[0] == 0
        with reserved(http, events, replay):
            until(lambda: workers(admin)[0]["status"] == "down")
        with shim(ports=(http, events, replay)):
            until(lambda: workers(admin)[0]["status"] == "ready")
            until(lambda: sum(blocks(admin)) == 0)
            answer = ask(data)
            assert cached(answer) == 0
            assert answer.headers["x-homing-expected-cached-tokens"] == "0"


def test_sigterm_lets_a_running_answer_end() -> None:
    """A stream of some seconds is under way: not ready at once, the stream complete, exit status 0."""
    with shim("--sim-decode-step", "20") as (_, url), router("--worker", url) as (running, data, _):
        until(lambda: data.get("/readyz").status_code == 200)
        body = {"model": "needle", "prompt": PROMPT, "max_tokens": 60, "ignore_eos": True, "stream": True}
        with data.stream("POST", "/v1/completions", json=body) as answer:
            lines = answer.iter_lines()
            first = next(lines)
            running.process.terminate()
            rest = [line for line in lines if line]
        assert first.startswith("data: ")
        assert rest[-1] == "data: [DONE]"
        assert running.wait()[0] == 0


def test_a_second_signal_stops_at_once() -> None:
    """A stream of a minute is under way: the first signal would wait for it, the second ends it with an error frame."""
    with shim("--sim-decode-step", "20") as (_, url), router("--worker", url) as (running, data, _):
        until(lambda: data.get("/readyz").status_code == 200)
        body = {"model": "needle", "prompt": PROMPT, "max_tokens": 3000, "ignore_eos": True, "stream": True}
        with data.stream("POST", "/v1/completions", json=body) as answer:
            lines = answer.iter_lines()
            next(lines)
            running.process.terminate()
            until(lambda: is_shut(data))  # it has heard the first
            assert running.process.poll() is None
            running.process.terminate()
            rest = [line for line in lines if line]
        assert '"error"' in rest[-1]
        status, errors = running.wait()
    assert status == 0
    assert "Traceback" not in errors
