"""The admin API over a registry that is not running: shapes, statuses and errors, without a socket."""

from __future__ import annotations

import io
import json
import re
from collections.abc import AsyncIterator

import httpx
import pytest
from prometheus_client import CollectorRegistry

from router.admin.api import create_admin
from router.core.types import Engine, RankId, RankStatus, SessionKey
from router.fleet.decisions import session_hash
from router.fleet.fleet import Fleet
from router.fleet.registry import Registry
from router.fleet.target import Target
from router.proxy.brain import RouterBrain
from router.settings import ProbeSettings, RoutingSettings, WorkerSpec
from router.telemetry.logging import make_logger
from router.telemetry.metrics import Metrics

NOW = 1000.0


class Plane:
    """Admin app, with the parts behind it."""

    def __init__(self, workers: httpx.AsyncClient) -> None:
        self.metrics = Metrics(CollectorRegistry())
        self.fleet = Fleet(RoutingSettings(), self.metrics, clock=lambda: NOW)
        self.registry = Registry(
            self.fleet,
            ProbeSettings(),
            client=workers,
            metrics=self.metrics,
            log=make_logger(level="error", form="json", stream=io.StringIO()),
            clock=lambda: NOW,
            wall_clock=lambda: NOW,
        )
        brain = RouterBrain(self.fleet, settings=RoutingSettings(), metrics=self.metrics)
        app = create_admin(
            self.registry, self.fleet, self.metrics, policy=lambda: "affinity", version="1.2.3", explainer=brain
        )
        self.http = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://admin")

    def enter_rank(self, name: str) -> int:
        worker = self.registry.worker(name)
        target = Target(host="w", port=1, rank=0, dp_size=1, engine=Engine.SHIM)
        slot = self.fleet.add_rank(
            RankId(name, 0), target=target, models=frozenset({"m"}), block_tokens=16, pool_tokens=1600
        )
        worker.slots, worker.status = (slot,), RankStatus.READY
        self.fleet.set_status(slot, RankStatus.READY)
        return slot


@pytest.fixture
async def plane() -> AsyncIterator[Plane]:
    async with httpx.AsyncClient() as workers:
        plane = Plane(workers)
        async with plane.http:
            yield plane


async def test_a_worker_is_added_listed_and_removed(plane: Plane) -> None:
    """202 with its state, the same in the list, 204, then 404."""
    added = await plane.http.post("/admin/workers", json={"url": "http://a:1", "id": "first"})
    assert added.status_code == 202
    assert added.json() == {
        "id": "first",
        "url": "http://a:1",
        "status": "pending",
        "reason": "not asked yet",
        "draining": False,
        "leaves_after": None,
        "ranks": [],
    }
    assert (await plane.http.get("/admin/workers")).json() == {"workers": [added.json()]}
    assert (await plane.http.get("/admin/workers/first")).json() == added.json()
    assert (await plane.http.delete("/admin/workers/first")).status_code == 204
    assert (await plane.http.get("/admin/workers/first")).status_code == 404


@pytest.mark.parametrize("again", [{"url": "http://a:1"}, {"url": "http://b:1", "id": "a:1"}])
async def test_a_duplicate_is_a_conflict(plane: Plane, again: dict[str, str]) -> None:
    """The same address or the same name twice: 409, and nothing changes."""
    await plane.http.post("/admin/workers", json={"url": "http://a:1"})
    answer = await plane.http.post("/admin/workers", json=again)
    assert answer.status_code == 409
    assert answer.json()["error"]["code"] == "conflict"
    assert len(plane.registry.workers()) == 1


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "code", "param"),
    [
        ("POST", "/admin/workers", b"{", 400, "invalid_json", None),
        ("POST", "/admin/workers", b"{}", 400, "invalid_request", "url"),
        ("POST", "/admin/workers", b'{"url": "a"}', 400, "invalid_request", "url"),
        ("POST", "/admin/workers", b'{"url": "http://a", "urk": 1}', 400, "invalid_request", "urk"),
        ("POST", "/admin/workers", b'{"url": "http://a", "dp_size": 0}', 400, "invalid_request", "dp_size"),
        ("GET", "/admin/sessions?limit=0", b"", 400, "invalid_request", "limit"),
        ("GET", "/nope", b"", 404, "unknown_url", None),
        ("PUT", "/admin/workers", b"", 405, "method_not_allowed", None),
        ("DELETE", "/admin/workers/x", b"", 404, "worker_not_found", "id"),
        ("POST", "/admin/workers/x/drain", b"", 404, "worker_not_found", "id"),
        ("POST", "/admin/workers/x/reset_cache", b"", 404, "worker_not_found", "id"),
    ],
)
async def test_errors_have_the_openai_shape(
    plane: Plane, method: str, path: str, body: bytes, status: int, code: str, param: str | None
) -> None:
    """Whoever finds the mistake, the client reads one shape."""
    answer = await plane.http.request(method, path, content=body, headers={"content-type": "application/json"})
    assert answer.status_code == status
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["code"], error["param"]) == (code, param)


async def test_a_body_that_is_not_called_json_is_told_to_be(plane: Plane) -> None:
    """What is called a form, as curl does unless told otherwise, is refused with the remedy."""
    form = {"content-type": "application/x-www-form-urlencoded"}
    answer = await plane.http.post("/admin/workers", content=b'{"url": "http://a:1"}', headers=form)
    assert answer.status_code == 400
    assert "content-type: application/json" in answer.json()["error"]["message"]
    assert not plane.registry.workers()


async def test_draining_and_taking_it_back_reach_the_ranks(plane: Plane) -> None:
    """A drained worker's ranks are DRAINING in the view that decisions see, and READY again after."""
    plane.registry.add(WorkerSpec(url="http://a:1"))
    slot = plane.enter_rank("a:1")
    drained = (await plane.http.post("/admin/workers/a:1/drain")).json()
    assert (drained["status"], drained["draining"], drained["ranks"][0]["status"]) == ("draining", True, "draining")
    assert plane.fleet.member(slot).status is RankStatus.DRAINING
    undrained = (await plane.http.post("/admin/workers/a:1/undrain")).json()
    assert (undrained["status"], undrained["draining"]) == ("ready", False)
    assert plane.fleet.member(slot).status is RankStatus.READY


async def test_the_fleet_answer_adds_up(plane: Plane) -> None:
    """Sums by rank and in total come from the counters, reasons from the decisions."""
    plane.registry.add(WorkerSpec(url="http://a:1"))
    plane.enter_rank("a:1")
    for tokens, cached in ((100, 40), (60, 56)):
        plane.metrics.prompt_tokens.labels("a:1", "0").inc(tokens)
        plane.metrics.cached_tokens.labels("a:1", "0").inc(cached)
    plane.metrics.decisions.labels("affinity", "home").inc(3)
    plane.metrics.decisions.labels("affinity", "cold").inc()
    shown = (await plane.http.get("/admin/fleet")).json()
    assert shown["policy"] == "affinity"
    assert shown["totals"]["prompt_tokens"] == 160
    assert shown["totals"]["cached_tokens"] == 96
    assert shown["ranks"][0]["rank"] == "a:1/0"
    assert shown["ranks"][0]["cached_tokens"] == 96
    assert shown["reasons"] == {"cold": 1, "home": 3}


async def test_sessions_show_their_home(plane: Plane) -> None:
    """The most recent first, as many as asked for, and how many there are; by the names of the decision log alone."""
    plane.registry.add(WorkerSpec(url="http://a:1"))
    slot = plane.enter_rank("a:1")
    keys = [SessionKey("t", f"secret{number}", "secret" * (number % 2)) for number in range(3)]
    for number, key in enumerate(keys):
        plane.fleet.sessions.start("m", key, slot=slot, now=NOW - 10 + number)
    answer = await plane.http.get("/admin/sessions?limit=2")
    assert answer.json() == {
        "total": 3,
        "sessions": [
            {
                "model": "m",
                "tenant": "t",
                "session_hash": session_hash(keys[number]),
                "is_subagent": bool(number % 2),
                "home": "a:1/0",
                "idle_seconds": 10.0 - number,
            }
            for number in (2, 1)
        ],
    }
    assert "secret" not in answer.text


async def test_metrics_are_prometheus_text(plane: Plane) -> None:
    """The registry's own metrics, in the text form that Prometheus reads."""
    plane.metrics.client_disconnects.inc(2)
    answer = await plane.http.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain")
    assert "homing_client_disconnects_total 2.0" in answer.text


@pytest.mark.parametrize(
    ("question", "sentence"),
    [
        (
            {"model": "m", "messages": [{"role": "user", "content": "hello"}]},
            'The body: the request belongs under "body": {"body": {"model": ...}, "headers": {...}}',
        ),
        ({"headers": {}}, "body: it is missing"),
    ],
)
async def test_a_request_to_be_explained_belongs_under_body(
    plane: Plane, question: dict[str, object], sentence: str
) -> None:
    """What a client would send to the data plane is told how to ask here."""
    answer = await plane.http.post("/admin/explain", json=question)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"] == sentence


async def test_the_console_page_needs_nothing_from_elsewhere(plane: Plane) -> None:
    """One page that loads no script, style, font or picture, and reads only paths the admin plane has."""
    page = (await plane.http.get("/")).text
    assert "http://" not in page.replace("http://www.w3.org/2000/svg", "")
    assert not re.search(r"https://|<link|src=|@import|url\(", page)
    for path in re.findall(r'(?:fetch\(|href=)"(/[^"]*)"', page):
        assert (await plane.http.get(path)).status_code == 200


async def test_a_page_of_another_site_changes_nothing(plane: Plane) -> None:
    """A browser tells where a request comes from; only the console's own pages may post."""
    post = plane.http.post
    assert (await post("/admin/workers", json={"url": "http://a:1"}, headers={"origin": "http://x"})).status_code == 400
    assert not plane.registry.workers()
    ours = {"origin": "http://admin"}
    assert (await post("/admin/workers", json={"url": "http://a:1"}, headers=ours)).status_code == 202


async def test_the_description_lists_every_path(plane: Plane) -> None:
    """The OpenAPI document, which /docs shows, knows the admin paths."""
    paths = json.loads((await plane.http.get("/openapi.json")).text)["paths"]
    assert {"/metrics", "/health", "/admin/workers", "/admin/fleet", "/admin/sessions"} <= set(paths)
