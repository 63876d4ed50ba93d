"""The admin plane behind keys, and its page of paths: over ASGI, without a socket."""

from __future__ import annotations

import base64
import io
import re
from collections.abc import AsyncIterator, Collection

import httpx
import pytest
from fastapi import FastAPI
from prometheus_client import CollectorRegistry

from router.admin.api import create_admin
from router.core.keys import Key, Keyring, Role, digest_of
from router.fleet.fleet import Fleet
from router.fleet.registry import Registry
from router.settings import ProbeSettings, RoutingSettings
from router.telemetry.logging import make_logger
from router.telemetry.metrics import Metrics


def admin_app(http: httpx.AsyncClient, *, keyring: Keyring | None, names: Collection[str] | None = None) -> FastAPI:
    metrics = Metrics(CollectorRegistry())
    fleet = Fleet(RoutingSettings(), metrics, clock=lambda: 0.0)
    log = make_logger(level="error", form="json", stream=io.StringIO())
    registry = Registry(
        fleet, ProbeSettings(), client=http, metrics=metrics, log=log, clock=lambda: 0.0, wall_clock=lambda: 0.0
    )
    return create_admin(
        registry, fleet, metrics, policy=lambda: "affinity", version="1.2.3", keyring=keyring, names=names
    )


@pytest.fixture
async def app() -> AsyncIterator[FastAPI]:
    keyring = Keyring(
        [Key("ops", digest_of(b"sk-ops"), frozenset({Role.ADMIN})), Key("team", digest_of(b"sk-team"))], secret=b"s"
    )
    async with httpx.AsyncClient() as workers:
        yield admin_app(workers, keyring=keyring)


def client(app: FastAPI, headers: dict[str, str] | None = None) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://admin", headers=headers)


def basic(password: str) -> str:
    return "Basic " + base64.b64encode(f"anybody:{password}".encode()).decode()


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1:8001", 200),
        ("[::1]:8001", 200),
        ("localhost", 200),
        ("LOCALHOST:1", 200),
        ("router.localhost:8001", 200),
        ("ops.example", 200),
        ("evil.example:8001", 403),
        ("127.0.0.1.evil.example", 403),
        ("", 403),
        ("[::1", 403),
    ],
)
async def test_a_door_on_this_machine_answers_to_its_own_names(host: str, status: int) -> None:
    """A page whose name is made to lead here is at home as far as a browser knows, and reaches nothing."""
    async with httpx.AsyncClient() as workers:
        app = admin_app(workers, keyring=None, names=("ops.example",))
        async with client(app, {"host": host, "origin": f"http://{host}"}) as http:
            assert (await http.get("/admin/workers")).status_code == status
            answer = await http.post("/admin/workers", json={"url": "http://127.0.0.1:1"})
    assert (answer.status_code == 403) == (status == 403)
    if status == 403:
        assert answer.json()["error"]["code"] == "unknown_host"


async def test_nothing_is_reached_without_a_key(app: FastAPI) -> None:
    """Every path the app has, and those it has not, answers 401 with a challenge; only the probe is open."""
    paths = {str(route.path) for route in app.routes}  # type: ignore[attr-defined]
    assert {"/metrics", "/admin/workers", "/", "/docs", "/openapi.json", "/health"} <= paths
    async with client(app) as http:
        for path in sorted(paths | {"/nowhere", "/docs/oauth2-redirect", "/redoc"}):
            for method in ("GET", "POST", "DELETE", "OPTIONS", "HEAD"):
                answer = await http.request(method, path.replace("{name}", "x"))
                if path == "/health":
                    assert answer.status_code in (200, 405)
                    continue
                assert answer.status_code == 401, (method, path)
                challenges = answer.headers.get_list("www-authenticate")
                assert [challenge.split()[0] for challenge in challenges] == ["Bearer", "Basic"]
                if method != "HEAD":
                    assert answer.json()["error"]["code"] == "missing_api_key"


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"authorization": "Bearer sk-ops"}, 200),
        ({"authorization": basic("sk-ops")}, 200),
        ({"x-api-key": "sk-ops"}, 200),
        ({"authorization": "Bearer sk-team"}, 403),
        ({"authorization": basic("sk-team")}, 403),
        ({"authorization": basic("nothing")}, 401),
        ({"authorization": "Bearer nothing"}, 401),
        ({"cookie": "key=sk-ops"}, 401),
    ],
)
async def test_who_gets_in(app: FastAPI, headers: dict[str, str], status: int) -> None:
    """An admin key, as a bearer token, a password or in a header; a key of the data plane is not enough."""
    async with client(app, headers) as http:
        for path in ("/metrics", "/admin/fleet", "/"):
            assert (await http.get(path)).status_code == status


async def test_the_page_of_paths_is_whole_and_loads_nothing(app: FastAPI) -> None:
    """Every path of the OpenAPI document stands on /docs, which needs no network."""
    async with client(app, {"authorization": "Bearer sk-ops"}) as http:
        page = (await http.get("/docs")).text
        document = (await http.get("/openapi.json")).json()
    for path, methods in document["paths"].items():
        for method in methods:
            assert f"<h2>{method.upper()} {path}</h2>" in page
    assert not re.search(r"<script|<link|src=|@import|url\(|https?://", page)
    assert "kv_replay" in page, "the body of POST /admin/workers is described"
