"""Structured logs on stderr, as lines for people or as JSON. No credentials, whatever a caller hands in."""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Mapping, MutableMapping
from typing import Any, TextIO

import structlog
from structlog.typing import FilteringBoundLogger, Processor

REDACTED = "[redacted]"
_SECRET_NAMES = re.compile(r"authorization|api[-_]?key|cookie|password|secret|access[-_]?token", re.IGNORECASE)
_BEARER = re.compile(r"(?i)\b(bearer|basic)\s+[A-Za-z0-9._~+/=-]{6,}")


def make_logger(*, level: str, form: str, stream: TextIO | None = None) -> FilteringBoundLogger:
    """A logger of its own: ``form`` is ``json`` or ``console``. Fields bound by ``structlog.contextvars`` are added."""
    out = stream or sys.stderr
    renderer: Processor = (
        structlog.processors.JSONRenderer()
        if form == "json"
        else structlog.dev.ConsoleRenderer(colors=out.isatty(), pad_event_to=0)
    )
    processors: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        redact,
        structlog.processors.format_exc_info,
        renderer,
    ]
    logger: FilteringBoundLogger = structlog.wrap_logger(
        structlog.PrintLogger(out),
        processors=processors,
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level.upper()]),
        context_class=dict,
    )
    return logger.bind()


def redact(_: object, __: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Blank what is named like a credential, at any depth, and bearer tokens inside strings."""
    for name, value in event.items():
        event[name] = _clean(name, value)
    return event


def _clean(name: str, value: object) -> object:
    if _SECRET_NAMES.search(name):
        return REDACTED
    if isinstance(value, Mapping):
        return {key: _clean(str(key), item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        if len(value) == 2 and isinstance(value[0], str) and _SECRET_NAMES.search(value[0]):
            return (value[0], REDACTED)  # a header as a pair
        return [_clean("", item) for item in value]
    return _BEARER.sub(rf"\1 {REDACTED}", value) if isinstance(value, str) else value
