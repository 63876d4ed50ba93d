"""The admin plane: a FastAPI app over registry and fleet. Errors have the shape of the data plane's."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection
from http import HTTPStatus
from importlib.resources import files
from typing import Annotated
from urllib.parse import urlsplit

from fastapi import Depends, FastAPI, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, PlainTextResponse
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.exceptions import HTTPException

from router.admin.explain import Explainer, explain_routes
from router.admin.gate import HostGate, KeyGate, error_response
from router.admin.reference import Complaints, document, errors, reference_page
from router.admin.views import Json, fleet_view, sessions_view, worker_view, workers_view
from router.core.keys import Keyring
from router.errors import BadRequest, MethodNotAllowed, NotFound, RequestError, UpstreamFailed, WorkerError
from router.fleet.fleet import Fleet
from router.fleet.registry import Registry
from router.plain_words import what_is_allowed
from router.settings import WorkerSpec
from router.telemetry.metrics import Metrics


def create_admin(
    registry: Registry,
    fleet: Fleet,
    metrics: Metrics,
    *,
    policy: Callable[[], str],
    version: str,
    reload: Callable[[], Awaitable[list[str]]] | None = None,
    keyring: Keyring | None = None,
    explainer: Explainer | None = None,
    names: Collection[str] | None = None,
) -> FastAPI:
    """The admin app. Its handlers run on the event loop that owns the fleet.

    ``keyring`` None: it asks for no key, and answers to ``names``, ``localhost`` and addresses (None: to any name).
    """
    page = (files("router.admin") / "console.html").read_text(encoding="utf-8")
    app = FastAPI(
        title="Homing admin",
        version=version,
        description="Workers, cache state and metrics of a running Homing router.",
        dependencies=[Depends(_same_origin)],
        docs_url=None,  # FastAPI's own pages load scripts from elsewhere
        redoc_url=None,
        openapi_url=None,
        responses={} if keyring is None else errors(401, 403),
    )
    _add_error_handlers(app)
    if keyring is not None:
        app.add_middleware(KeyGate, keyring=keyring)
    elif names is not None:
        app.add_middleware(HostGate, names=names)

    def ranks_by_slot(name: str) -> Json:
        return worker_view(registry.worker(name), {rank.slot: rank for rank in fleet.ranks()})

    @app.get("/", response_class=HTMLResponse, include_in_schema=False)
    async def console() -> str:
        return page

    @app.get("/docs", response_class=HTMLResponse, include_in_schema=False)
    async def reference() -> str:
        return reference_page(document(app))

    @app.get("/openapi.json", include_in_schema=False)
    async def openapi() -> Json:
        return document(app)

    @app.get("/health", summary="The admin plane answers.")
    async def health() -> Json:
        return {"status": "ok"}

    @app.get("/metrics", summary="Prometheus metrics.", response_class=PlainTextResponse)
    async def prometheus() -> Response:
        return Response(generate_latest(metrics.registry), media_type=CONTENT_TYPE_LATEST)

    @app.get("/admin/workers", summary="All workers with their ranks.")
    async def list_workers() -> Json:
        return {"workers": workers_view(registry, fleet)}

    @app.post(
        "/admin/workers",
        status_code=202,
        summary="Register a worker; it is asked in the background.",
        responses=errors(400, 409),
    )
    async def add_worker(spec: WorkerSpec) -> Json:
        worker = await registry.join(spec)
        return ranks_by_slot(worker.name)

    @app.get("/admin/workers/{name}", summary="One worker.", responses=errors(404))
    async def show_worker(name: str) -> Json:
        return ranks_by_slot(name)

    @app.delete(
        "/admin/workers/{name}",
        status_code=204,
        summary="Forget a worker; requests on it may finish.",
        responses=errors(400, 404),
    )
    async def remove_worker(name: str) -> None:
        await registry.remove(name)

    @app.post(
        "/admin/workers/{name}/drain",
        summary="Give a worker no new sessions, and let its own move with their next turns, one after another.",
        responses=errors(400, 404),
    )
    async def drain_worker(name: str) -> Json:
        registry.drain(name)
        return ranks_by_slot(name)

    @app.post("/admin/workers/{name}/undrain", summary="Take a drain back.", responses=errors(400, 404))
    async def undrain_worker(name: str) -> Json:
        registry.undrain(name)
        return ranks_by_slot(name)

    @app.post(
        "/admin/workers/{name}/reset_cache", summary="Empty a worker's prefix cache.", responses=errors(400, 404, 502)
    )
    async def reset_worker(name: str) -> Json:
        await registry.reset_cache(name)
        return ranks_by_slot(name)

    if reload is not None:

        @app.post(
            "/admin/reload",
            summary="Take over keys, certificates, workers and policy as they are now; "
            "409 with a sentence for each part that could not be: there the old stays in force.",
            responses={409: {"model": Complaints, "description": HTTPStatus.CONFLICT.phrase}},
        )
        async def reload_all(response: Response) -> Complaints:
            complaints = await reload()
            if complaints:
                response.status_code = HTTPStatus.CONFLICT
            return Complaints(complaints=complaints)

    @app.get(
        "/admin/sessions",
        summary="Sessions with a home, the most recently used first; the total counts those, too, whose rank has gone.",
        responses=errors(400),
    )
    async def list_sessions(limit: Annotated[int, Query(ge=1, le=10_000)] = 100) -> Json:
        return {"sessions": sessions_view(fleet, limit=limit), "total": len(fleet.sessions)}

    @app.get("/admin/fleet", summary="What the console page shows.")
    async def show_fleet() -> Json:
        return fleet_view(registry, fleet, metrics, policy=policy())

    if explainer is not None:
        app.include_router(explain_routes(explainer))
    return app


async def _same_origin(request: Request) -> None:
    """A page of another site, open in an operator's browser, may not change anything here."""
    origin = request.headers.get("origin")
    if request.method != "GET" and origin is not None and urlsplit(origin).netloc != request.headers.get("host"):
        raise BadRequest("This request comes from a page of another site.", code="cross_origin")


# --- errors ---------------------------------------------------------------------------------------

Handler = Callable[[Request, Exception], Awaitable[Response]]


def _add_error_handlers(app: FastAPI) -> None:
    handlers: dict[type[Exception], Callable[[Exception], Exception]] = {
        RequestError: lambda error: error,
        WorkerError: lambda error: UpstreamFailed(str(error)),
        RequestValidationError: _from_validation,
        HTTPException: _from_http,
        Exception: lambda error: error,
    }
    for kind, translate in handlers.items():
        app.add_exception_handler(kind, _handler(translate))


def _handler(translate: Callable[[Exception], Exception]) -> Handler:
    async def handle(_: Request, error: Exception) -> Response:
        return error_response(translate(error))

    return handle


def _from_validation(error: Exception) -> RequestError:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    if first["type"] == "json_invalid":
        return BadRequest("The body is not valid JSON.", code="invalid_json")
    param = ".".join(str(part) for part in first["loc"][1:]) or None
    if param is None and first["type"] == "model_attributes_type":  # curl calls JSON a form unless told otherwise
        return BadRequest("The body: a JSON object is needed, sent with content-type: application/json")
    return BadRequest(f"{param or 'The body'}: {what_is_allowed(first)}", param=param)


def _from_http(error: Exception) -> RequestError:
    assert isinstance(error, HTTPException)
    match error.status_code:
        case 404:
            return NotFound("The admin plane has no such path; /docs lists them.")
        case 405:
            refusal = MethodNotAllowed("This path does not take that method; /docs lists what it takes.")
            refusal.headers = tuple((name.lower(), value) for name, value in (error.headers or {}).items())
            return refusal
        case _:
            return BadRequest(str(error.detail))
