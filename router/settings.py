"""Every knob of the router, with its unit and default. Read in ``app`` only and passed down in slices.

Order of precedence: command line, environment (``HOMING__``, nested by ``__``), YAML file, default.
An unknown key or a bad value refuses to start.
"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field


class Policy(StrEnum):
    """How a rank is chosen."""

    AFFINITY = "affinity"
    ROUND_ROBIN = "round_robin"
    LEAST_LOADED = "least_loaded"
    SESSION_HASH = "session_hash"


class _Slice(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class WorkerSpec(_Slice):
    """One worker as an operator names it. Only ``url`` is needed: the rest is asked of the worker."""

    url: str
    id: str | None = Field(default=None, description="Name in metrics and headers; default: host:port.")
    engine: Annotated[str | None, Field(pattern="^(vllm|sglang|shim)$")] = None
    dp_size: Annotated[int | None, Field(ge=1, le=1024)] = None
    models: tuple[str, ...] = ()
    kv_events: str | None = Field(
        None, description="ZMQ endpoint of rank 0 (tcp://host:port); ranks count up from it. Default: asked."
    )
    kv_replay: str | None = Field(default=None, description="Replay endpoint of rank 0, like kv_events.")


class ModelSpec(_Slice):
    """What the router must know of a model to key prompts exactly. Default: asked of its workers."""

    name: str
    tokenizer: Path | None = Field(
        None, description="Directory with tokenizer.json and a chat template, or a tokenizer.json."
    )
    aliases: tuple[str, ...] = ()


class ServerSettings(_Slice):
    """The data plane's door."""

    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535)] = 8000
    max_body_bytes: Annotated[int, Field(ge=1024)] = 64 * 1024 * 1024
    max_header_bytes: Annotated[int, Field(ge=1024)] = 64 * 1024
    max_headers: Annotated[int, Field(ge=8)] = 128
    header_timeout_seconds: Annotated[float, Field(gt=0)] = 10.0
    body_timeout_seconds: Annotated[float, Field(gt=0)] = 60.0
    keepalive_seconds: Annotated[float, Field(gt=0)] = 75.0
    shutdown_seconds: Annotated[float, Field(ge=0)] = 30.0


class AdminSettings(_Slice):
    """The admin plane's door: metrics, workers, explain."""

    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535)] = 8001


class UpstreamSettings(_Slice):
    """Connections to workers."""

    connect_seconds: Annotated[float, Field(gt=0)] = 2.0
    first_byte_seconds: Annotated[float, Field(gt=0)] = 600.0
    idle_seconds: Annotated[float, Field(gt=0)] = 300.0
    keepalive_seconds: Annotated[float, Field(gt=0)] = Field(
        4.0,
        description="Shorter than the engines' own (uvicorn: 5), so that no request meets a closing socket.",
    )
    max_attempts: Annotated[int, Field(ge=1, le=10)] = 3


class RoutingSettings(_Slice):
    """How ranks are chosen."""

    policy: Policy = Policy.AFFINITY
    seed: int = 0
    move_weight: Annotated[float, Field(ge=0)] = Field(
        16.0, description="Leaving a warm home costs this many times the seconds that home saves."
    )
    prefill_tokens_per_second: Annotated[float, Field(gt=0)] = Field(
        20_000.0, description="What a rank is assumed to prefill before it has shown its speed."
    )
    session_idle_seconds: Annotated[float, Field(gt=0)] = 14_400.0
    max_sessions: Annotated[int, Field(ge=1)] = 200_000
    max_index_blocks: Annotated[int, Field(ge=1024)] = 8_000_000
    session_headers: tuple[str, ...] = Field((), description="Headers that name a session, before all others.")


class ProbeSettings(_Slice):
    """How workers are watched."""

    interval_seconds: Annotated[float, Field(gt=0)] = 2.0
    timeout_seconds: Annotated[float, Field(gt=0)] = 5.0
    failures: Annotated[int, Field(ge=1)] = 3
    parity: bool = Field(True, description="Check tokenizer, template and event stream when a worker registers.")


class Settings(_Slice):
    """The whole tree."""

    workers: tuple[WorkerSpec, ...] = ()
    models: tuple[ModelSpec, ...] = ()
    server: ServerSettings = ServerSettings()
    admin: AdminSettings = AdminSettings()
    upstream: UpstreamSettings = UpstreamSettings()
    routing: RoutingSettings = RoutingSettings()
    probes: ProbeSettings = ProbeSettings()
    log_level: Annotated[str, Field(pattern="^(debug|info|warning|error)$")] = "info"
    log_format: Annotated[str, Field(pattern="^(json|console)$")] = "console"
