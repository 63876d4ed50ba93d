"""The admin API keeps what its OpenAPI document says, asked with much that nobody would ask."""

from __future__ import annotations

import io
import itertools

import httpx
import schemathesis
from fastapi import FastAPI
from hypothesis import HealthCheck, settings
from prometheus_client import CollectorRegistry
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
    unsupported_method,
)

from router.admin.api import create_admin
from router.fleet.fleet import Fleet
from router.fleet.registry import Registry
from router.settings import ProbeSettings, RoutingSettings
from router.telemetry.logging import make_logger
from router.telemetry.metrics import Metrics


def make_app() -> FastAPI:
    metrics = Metrics(CollectorRegistry())
    fleet = Fleet(RoutingSettings(), metrics, clock=lambda: 0.0)
    registry = Registry(
        fleet,
        ProbeSettings(),
        client=httpx.AsyncClient(),
        metrics=metrics,
        log=make_logger(level="error", form="json", stream=io.StringIO()),
        clock=lambda: 0.0,
        wall_clock=lambda: 0.0,
    )
    outcomes = itertools.cycle([[], ["server.port takes effect with a new process only"]])

    async def reload() -> list[str]:
        return next(outcomes)

    return create_admin(registry, fleet, metrics, policy=lambda: "affinity", version="0", reload=reload)


schema = schemathesis.openapi.from_asgi("/openapi.json", make_app())
CHECKS = (
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
    unsupported_method,
)


@schema.parametrize()
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
def test_answers_are_those_the_document_promises(case: schemathesis.Case) -> None:
    """No 500, only statuses, types and shapes that the document names."""
    case.call_and_validate(checks=list(CHECKS))
