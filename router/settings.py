"""Every knob of the router, with its unit and default. Read in ``app`` only and passed down in slices.

``settings_sources`` reads them from the command line, the environment and a file.
"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Protocol, TypeVar
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, field_validator, model_validator

from router.addresses import has_http_address, is_redis_address
from router.core.session import session_header


class Policy(StrEnum):
    """How a rank is chosen."""

    AFFINITY = "affinity"
    ROUND_ROBIN = "round_robin"
    LEAST_LOADED = "least_loaded"
    SESSION_HASH = "session_hash"


class _Slice(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class _HasTls(Protocol):
    @property
    def tls_certificate(self) -> Path | None: ...

    @property
    def tls_key(self) -> Path | None: ...


_WithTls = TypeVar("_WithTls", bound=_HasTls)


def _check_tls(door: _WithTls) -> _WithTls:
    if door.tls_key is not None and door.tls_certificate is None:
        raise ValueError("tls_key is of no use without tls_certificate")
    return door


class WorkerSpec(_Slice):
    """One worker as an operator names it. Only ``url`` is needed: the rest is asked of the worker."""

    url: str = Field(description="Scheme, host and port, without /v1; and a path, if its API is not at the root.")
    id: Annotated[str | None, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._:-]{0,127}$")] = Field(
        default=None, description="Name in metrics and headers; default: host:port."
    )
    engine: Annotated[str | None, Field(pattern="^(vllm|sglang|shim)$")] = Field(
        None, description="What it is: vllm, sglang or shim. Default: asked."
    )
    dp_size: Annotated[int | None, Field(ge=1, le=1024)] = Field(
        None, description="Its data-parallel ranks. Default: asked."
    )
    models: tuple[str, ...] = Field((), description="Names of what it serves. Default: asked.")
    kv_events: str | None = Field(
        None, description="ZMQ endpoint of rank 0 (tcp://host:port); ranks count up from it. Default: asked."
    )
    kv_replay: str | None = Field(default=None, description="Replay endpoint of rank 0, like kv_events.")
    role: Annotated[str | None, Field(pattern="^(unified|prefill|decode)$")] = Field(
        None, description="What it does: unified, prefill or decode. Default: asked (SGLang, shim), else unified."
    )
    handover: Annotated[str | None, Field(pattern="^(bootstrap|params)$")] = Field(
        None, description="How prompts go from prefill to decode. Default: bootstrap, SGLang's way; vLLM: params."
    )
    bootstrap_port: Annotated[int | None, Field(ge=1, le=65535)] = Field(
        None, description="Where decode workers meet this prefill worker. Default: asked."
    )

    @model_validator(mode="before")
    @classmethod
    def _from_url(cls, value: object) -> object:
        return {"url": value} if isinstance(value, str) else value

    @field_validator("url")
    @classmethod
    def _plain_url(cls, url: str) -> str:
        if not has_http_address(url):
            raise ValueError("a worker's URL looks like http://host:port")
        parts = urlsplit(url)
        if parts.username or parts.query or parts.fragment:
            raise ValueError("a worker's URL holds no credentials, query or fragment")
        if parts.path.rstrip("/").endswith("/v1"):  # as clients are given it; the router would ask for /v1/v1/models
            raise ValueError("a worker's URL ends before /v1")
        return url.rstrip("/")

    @field_validator("kv_events", "kv_replay")
    @classmethod
    def _zmq_endpoint(cls, endpoint: str | None) -> str | None:
        if endpoint is not None:
            parts = urlsplit(endpoint)
            if parts.scheme != "tcp" or not parts.hostname or parts.port is None:
                raise ValueError("an event endpoint looks like tcp://host:port")
        return endpoint

    @property
    def name(self) -> str:
        """The id, or host:port of the URL."""
        return self.id or urlsplit(self.url).netloc


class ModelSpec(_Slice):
    """What the router must know of a model to key prompts exactly. Default: asked of its workers."""

    name: str = Field(description="As its workers call it.")
    tokenizer: Path | None = Field(
        None, description="Directory with tokenizer.json and a chat template, or a tokenizer.json."
    )
    aliases: tuple[str, ...] = Field((), description="Other names that clients may use for it.")
    adapters: tuple[str, ...] = Field(
        (), description="LoRA adapters over this model, by the names clients use; they have its tokenizer."
    )
    chunk_tokens: Annotated[int | None, Field(ge=1)] = Field(
        None, description="Chunk of chunked local attention: no event stream carries it."
    )
    eagle: bool = Field(False, description="The engine drafts with EAGLE or MTP, whose prefix hits end elsewhere.")


class ServerSettings(_Slice):
    """The data plane's door."""

    host: str = Field("127.0.0.1", description="Address that clients connect to; 0.0.0.0: from everywhere.")
    port: Annotated[int, Field(ge=0, le=65535)] = Field(
        8000, description="Port for clients. 0: any; the ready line tells."
    )
    max_body_bytes: Annotated[int, Field(ge=1024)] = Field(64 << 20, description="Larger bodies are refused: 413.")
    max_header_bytes: Annotated[int, Field(ge=1024)] = Field(64 << 10, description="Larger heads are refused: 431.")
    max_headers: Annotated[int, Field(ge=8)] = Field(128, description="Heads of more lines are refused: 431.")
    header_timeout_seconds: Annotated[float, Field(gt=0)] = Field(10.0, description="Within so long a head must come.")
    body_timeout_seconds: Annotated[float, Field(gt=0)] = Field(
        60.0, description="Within so long a body must come, or another 64 KiB of it; in ten times that all of it."
    )
    keepalive_seconds: Annotated[float, Field(gt=0)] = Field(75.0, description="So long an idle connection stays open.")
    unready_seconds: Annotated[float, Field(ge=0)] = Field(
        0.0,
        description="After SIGTERM /readyz says no and all are still served, one answer a connection, for so long.",
    )
    shutdown_seconds: Annotated[float, Field(ge=0)] = Field(
        30.0, description="Then no more come in, and answers may end for so long."
    )
    max_connections: Annotated[int, Field(ge=0)] = Field(
        0, description="Clients connected at once; more are refused. 0: half of the files the process may open."
    )
    max_connections_per_address: Annotated[int, Field(ge=0)] = Field(
        0, description="The same from one address. 0: no limit, as behind a load balancer."
    )
    tls_certificate: Path | None = Field(
        None, description="PEM file with certificate and chain: serve HTTPS. Read again on SIGHUP."
    )
    tls_key: Path | None = Field(None, description="PEM file with its key, if not in the same file.")

    _key_has_certificate = model_validator(mode="after")(_check_tls)


class AdminSettings(_Slice):
    """The admin plane's door: metrics, workers, explain."""

    host: str = Field("127.0.0.1", description="Address of the admin plane; beyond this machine set auth.keys_file.")
    port: Annotated[int, Field(ge=0, le=65535)] = Field(8001, description="Port of the admin plane. 0: any.")
    names: tuple[str, ...] = Field(
        (),
        description="Names beside localhost that it may be asked by while it listens on this machine alone and asks "
        "for no key; any other is taken for a page that would reach it through somebody's browser.",
    )
    tls_certificate: Path | None = Field(None, description="As server.tls_certificate.")
    tls_key: Path | None = Field(None, description="As server.tls_key.")

    _key_has_certificate = model_validator(mode="after")(_check_tls)


class AuthSettings(_Slice):
    """Who may come in."""

    keys_file: Path | None = Field(
        None,
        description="YAML or JSON file of API keys (see the README): without one of them neither plane answers more "
        "than probes. Read again on SIGHUP. Default: everybody may come in.",
    )


class TracingSettings(_Slice):
    """OpenTelemetry spans."""

    endpoint: str | None = Field(
        None, description="Where spans go by OTLP over HTTP, such as http://collector:4318/v1/traces. Default: none."
    )
    sample_ratio: Annotated[float, Field(ge=0, le=1)] = Field(
        1.0, description="Share of requests traced, where the caller has not decided."
    )

    @field_validator("endpoint")
    @classmethod
    def _is_http(cls, endpoint: str | None) -> str | None:
        if endpoint is not None and not has_http_address(endpoint):
            raise ValueError("it looks like http://collector:4318/v1/traces")
        return endpoint


class QueueSettings(_Slice):
    """Requests under way, and those that wait. A place is asked for by tenant and by ``x-request-priority``."""

    max_inflight: Annotated[int, Field(ge=0)] = Field(
        0,
        description="Requests under way at once; more wait for their turn. 0: no limit. What is held for want of cache "
        "does not count, and goes on when there is room for it, in excess if need be.",
    )
    max_queued: Annotated[int, Field(ge=0)] = Field(1000, description="Requests that may wait; more are refused.")
    queue_seconds: Annotated[float, Field(gt=0)] = Field(30.0, description="The longest wait for a turn.")
    hold_seconds: Annotated[float, Field(gt=0)] = Field(
        300.0, description="The longest wait for room in the caches (routing.admission)."
    )
    max_held: Annotated[int, Field(ge=0)] = Field(
        1000, description="Requests that may wait for room in the caches; more are refused."
    )
    comment_seconds: Annotated[float, Field(gt=0)] = Field(
        15.0, description="Streams that wait for room get a comment so often, so that nothing cuts them for silence."
    )


class UpstreamSettings(_Slice):
    """Connections to workers."""

    connect_seconds: Annotated[float, Field(gt=0)] = Field(2.0, description="Within so long a worker must be reached.")
    first_byte_seconds: Annotated[float, Field(gt=0)] = Field(
        600.0, description="Of a stream. An answer that comes whole is awaited while its worker answers probes."
    )
    idle_seconds: Annotated[float, Field(gt=0)] = Field(300.0, description="The longest silence within an answer.")
    answer_seconds: Annotated[float, Field(gt=0)] = Field(
        3600.0, description="The longest that an answer which comes whole may take, all attempts together."
    )
    keepalive_seconds: Annotated[float, Field(gt=0)] = Field(
        4.0, description="Shorter than the engines' own (uvicorn: 5), so that no request meets a closing socket."
    )
    max_attempts: Annotated[int, Field(ge=1, le=10)] = Field(
        3,
        description="Attempts that may fail before the client is told. A rank that answers 408, 429 or 503 is full and "
        "has not failed: each is asked once, but for those that have said so within the last second.",
    )
    retry_ratio: Annotated[float, Field(ge=0, le=1)] = Field(
        0.2, description="Retries as a share of requests; with the reserve used up, no more are made."
    )
    retry_reserve: Annotated[int, Field(ge=0)] = Field(
        1000, description="Retries at hand after a quiet time: what one worker may have in hand when it dies."
    )
    api_key_file: Path | None = Field(
        None,
        description="File with the key that workers ask for (vLLM's and SGLang's --api-key): shown to all of them, by "
        "probes and by every request whose client's own authorization does not go on. Read again on SIGHUP.",
    )
    forward_credentials: bool = Field(
        default=False, description="Send the client's authorization, cookie and API key headers on to workers."
    )
    forward_headers: tuple[str, ...] = Field(
        (), description="Only these of a client's headers go on to workers. Default: all but the connection's own."
    )
    drop_headers: tuple[str, ...] = Field((), description="These never go on to workers.")


class RoutingSettings(_Slice):
    """How ranks are chosen."""

    policy: Policy = Field(Policy.AFFINITY, description="How ranks are chosen: affinity is the router's own way.")
    seed: int = Field(0, description="Of the draws between equal ranks: the same seed and inputs decide the same.")
    move_weight: Annotated[float, Field(ge=0)] = Field(
        16.0, description="Leaving a warm home costs this many times the seconds that home saves."
    )
    prefill_tokens_per_second: Annotated[float, Field(gt=0)] = Field(
        20_000.0, description="What a rank is assumed to prefill before it has shown its speed."
    )
    transfer_tokens_per_second: Annotated[float, Field(gt=0)] = Field(
        200_000.0, description="What a decode rank is assumed to fetch from a prefill rank before it has shown it."
    )
    session_idle_seconds: Annotated[float, Field(gt=0)] = Field(
        14_400.0, description="A session that has not asked for so long is forgotten."
    )
    max_sessions: Annotated[int, Field(ge=1)] = Field(200_000, description="Of more, the longest idle are forgotten.")
    max_index_blocks: Annotated[int, Field(ge=1024)] = Field(
        8_000_000,
        description="Blocks remembered of all models together, 130 bytes each; those of windows, copies and further "
        "names count, too. Beyond, what was used longest ago is forgotten.",
    )
    admission: Annotated[str, Field(pattern="^(off|guarded)$")] = Field(
        "off",
        description="guarded: hold new conversations while the caches have no room for them and holding is of use.",
    )
    breaker_failures: Annotated[int, Field(ge=0)] = Field(
        5, description="Failures in a row after which a rank is left alone for a while. 0: never."
    )
    breaker_seconds: Annotated[float, Field(gt=0)] = Field(
        5.0, description="For so long at first; twice as long after each failed trial, to a minute."
    )
    breaker_max_ratio: Annotated[float, Field(ge=0, le=1)] = Field(
        0.5, description="The share of the fleet that may be left alone at once."
    )
    session_headers: tuple[Annotated[str, AfterValidator(session_header)], ...] = Field(
        (), description="Headers that name a session, before all others."
    )
    worker_tokenize_seconds: Annotated[float, Field(ge=0, le=10)] = Field(
        0.0,
        description="For models without a tokenizer here: wait so long for a worker's /tokenize. 0: key by text.",
    )
    log_decisions_ratio: Annotated[float, Field(ge=0, le=1)] = Field(
        0.0, description="Share of requests whose decisions are written to the log, with what came of them."
    )


class ProbeSettings(_Slice):
    """How workers are watched."""

    interval_seconds: Annotated[float, Field(gt=0)] = Field(2.0, description="Each worker's /health is asked so often.")
    timeout_seconds: Annotated[float, Field(gt=0)] = Field(5.0, description="The longest wait for a worker's word.")
    failures: Annotated[int, Field(ge=1)] = Field(3, description="Failures in a row after which a worker is down.")
    parity: bool = Field(True, description="Check tokenizer, template and event stream when a worker registers.")


class SharedSettings(_Slice):
    """State shared by several routers in front of the same workers."""

    redis_url: str | None = Field(
        default=None,
        description="redis://[user:password@]host:6379/0, the same for all replicas. Default: one alone.",
        json_schema_extra={"secret": True},
    )
    prefix: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._{}:-]{0,63}$")] = Field(
        default="homing", description="Of all keys and the channel: one for each group of replicas."
    )
    lookup_seconds: Annotated[float, Field(ge=0, le=0.1)] = Field(
        default=0.003, description="A request of a session that is not known here waits so long for Redis at most."
    )
    publish_seconds: Annotated[float, Field(ge=0.01)] = Field(
        default=0.1, description="So often a replica tells the others what it has in flight."
    )
    lease_seconds: Annotated[float, Field(gt=0)] = Field(
        default=1.0, description="After so long without news another replica's load is forgotten."
    )

    @field_validator("redis_url")
    @classmethod
    def _is_redis_url(cls, url: str | None) -> str | None:
        """Complains without a word of what was given: there may be a password in it."""
        if url is not None and not is_redis_address(url):
            raise ValueError(
                "it looks like redis://[user:password@]host:6379/0, rediss://... or unix://PATH; "
                "characters such as / and # in a password are written as %2F and %23"
            )
        return url

    @model_validator(mode="after")
    def _lease_spans_news(self) -> SharedSettings:
        if self.lease_seconds < 3 * self.publish_seconds:
            raise ValueError("shared.lease_seconds must be at least three times shared.publish_seconds")
        return self


class Settings(_Slice):
    """The whole tree."""

    workers: tuple[WorkerSpec, ...] = Field((), description="Whom requests are sent to.")
    models: tuple[ModelSpec, ...] = Field((), description="What must be known of models beyond what workers say.")
    server: ServerSettings = ServerSettings()
    admin: AdminSettings = AdminSettings()
    auth: AuthSettings = AuthSettings()
    tracing: TracingSettings = TracingSettings()
    queue: QueueSettings = QueueSettings()
    upstream: UpstreamSettings = UpstreamSettings()
    routing: RoutingSettings = RoutingSettings()
    probes: ProbeSettings = ProbeSettings()
    shared: SharedSettings = SharedSettings()
    log_level: Annotated[str, Field(pattern="^(debug|info|warning|error)$")] = Field(
        "info", description="What is less than this is not logged."
    )
    log_format: Annotated[str, Field(pattern="^(json|console)$")] = Field(
        "console", description="Lines for people, or a JSON object a line."
    )

    @field_validator("workers")
    @classmethod
    def _distinct(cls, workers: tuple[WorkerSpec, ...]) -> tuple[WorkerSpec, ...]:
        for what in ("name", "url"):
            given = [getattr(worker, what) for worker in workers]
            twice = next((value for value in given if given.count(value) > 1), None)
            if twice is not None:
                raise ValueError(f"two workers have the {what} {twice}")
        return workers
