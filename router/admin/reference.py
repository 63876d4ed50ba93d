"""``/docs``: the paths of the admin API on a plain page, made from its OpenAPI document. It loads nothing else."""

from __future__ import annotations

import json
from collections.abc import Mapping
from html import escape
from typing import Any

Json = Mapping[str, Any]

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


def reference_page(document: Json) -> str:
    """The page for an OpenAPI document."""
    info = document["info"]
    title = escape(f"{info['title']} {info['version']}")
    sections = "\n".join(
        _section(method.upper(), path, operation, document)
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    )
    return _PAGE.format(title=title, description=escape(info.get("description", "")), sections=sections)


def _section(method: str, path: str, operation: Json, document: Json) -> str:
    lines = [f"<h2>{method} {escape(path)}</h2>", f"<p>{escape(operation.get('summary', ''))}</p>"]
    for parameter in operation.get("parameters", ()):
        place, needed = parameter["in"], "" if parameter.get("required") else ", optional"
        limits = {name: value for name, value in parameter["schema"].items() if name != "title"}
        lines.append(f"<p><code>{escape(parameter['name'])}</code> ({place}{needed}): {escape(json.dumps(limits))}</p>")
    body = operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema")
    if body is not None:
        lines.append(f"<p>Body:</p><pre>{escape(json.dumps(_resolved(body, document), indent=2))}</pre>")
    statuses = ", ".join(sorted(operation.get("responses", {})))
    lines.append(f"<p>Answers {escape(statuses)}.</p>")
    return f"<section>{''.join(lines)}</section>"


def _resolved(schema: Json, document: Json) -> Json:
    """A schema itself where only its name is given."""
    reference = schema.get("$ref")
    return schema if reference is None else document["components"]["schemas"][reference.rsplit("/", 1)[-1]]
