"""What the admin API says of itself: the errors in its OpenAPI document, and ``/docs``, that document as a plain page.

The page loads nothing from elsewhere.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from html import escape
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel

Json = Mapping[str, Any]


class ErrorDetail(BaseModel):
    """What went wrong. ``code`` is stable, ``message`` is for people."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """Every error's body, here and on the data plane."""

    error: ErrorDetail


class Complaints(BaseModel):
    """What a reload could not take over, a sentence each."""

    complaints: list[str]


def errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """A route's ``responses``: the errors it may answer with."""
    return {status: {"model": ErrorBody, "description": HTTPStatus(status).phrase} for status in statuses}


def document(app: FastAPI) -> dict[str, Any]:
    """The app's OpenAPI document, without the 422 that FastAPI adds where it checks parameters: here that is a 400."""
    described = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
    for methods in described["paths"].values():
        for operation in methods.values():
            operation["responses"].pop("422", None)
    for name in ("HTTPValidationError", "ValidationError"):
        described["components"]["schemas"].pop(name, None)
    return described


_PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><title>{title}</title>
<style>
body {{ font: 15px/1.5 system-ui, sans-serif; max-width: 56rem; margin: 2rem auto; padding: 0 1rem }}
section {{ border-top: 1px solid #8884; padding: .6rem 0 }}
h2 {{ font: 600 15px/1.5 ui-monospace, monospace; margin: 0 }}
p {{ margin: .2rem 0 }} pre {{ background: #8881; padding: .6rem; overflow: auto }}
:root {{ color-scheme: light dark }}
</style>
<h1>{title}</h1><p>{description} The same for machines: <a href="/openapi.json">/openapi.json</a>.</p>
{sections}
</html>
"""


def reference_page(described: Json) -> str:
    """The page for an OpenAPI document."""
    info = described["info"]
    title = escape(f"{info['title']} {info['version']}")
    sections = "\n".join(
        _section(method.upper(), path, operation, described)
        for path, methods in described["paths"].items()
        for method, operation in methods.items()
    )
    return _PAGE.format(title=title, description=escape(info.get("description", "")), sections=sections)


def _section(method: str, path: str, operation: Json, described: Json) -> str:
    lines = [f"<h2>{method} {escape(path)}</h2>", f"<p>{escape(operation.get('summary', ''))}</p>"]
    for parameter in operation.get("parameters", ()):
        place, needed = parameter["in"], "" if parameter.get("required") else ", optional"
        limits = {name: value for name, value in parameter["schema"].items() if name != "title"}
        lines.append(f"<p><code>{escape(parameter['name'])}</code> ({place}{needed}): {escape(json.dumps(limits))}</p>")
    body = operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema")
    if body is not None:
        schema = escape(json.dumps(_resolved(body, described), indent=2))
        lines.append(f"<p>Body, with content-type: application/json:</p><pre>{schema}</pre>")
    statuses = ", ".join(sorted(operation.get("responses", {})))
    lines.append(f"<p>Answers {escape(statuses)}.</p>")
    return f"<section>{''.join(lines)}</section>"


def _resolved(schema: Json, described: Json) -> Json:
    """A schema itself where only its name is given."""
    reference = schema.get("$ref")
    return schema if reference is None else described["components"]["schemas"][reference.rsplit("/", 1)[-1]]
