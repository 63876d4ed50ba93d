"""What a worker says of itself over HTTP: models, engine, ranks, event endpoints, pool, identity, tokenizer.

Sources: vLLM ``/v1/models``, ``/kv_event_sources``, ``/metrics``; SGLang ``/server_info``; the shim offers vLLM's.
What the operator wrote in the ``WorkerSpec`` wins over what is asked.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, TypeVar
from urllib.parse import urlsplit

import httpx
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from router.core.types import WHOLE, Engine, Handover, Part, WorkerRole
from router.core.usable import retention_of
from router.errors import WorkerError
from router.fleet.asking import MOST_DIGITS, Answer, ask, read_number, read_object
from router.fleet.event_sources import MOST_RANKS, sources_of
from router.fleet.probes import sentence
from router.fleet.reactions import in_turns
from router.fleet.target import ModelCard, Target
from router.settings import WorkerSpec
from router.wire.kv_events import EventSource, Snapshot, decode_in_slices, split_snapshot

T = TypeVar("T")
#: A tokenizer's file has tens of megabytes; a picture of a rank as many as its cache has tokens, times five.
_MOST_FILE_BYTES: Final = 256 << 20
_MOST_SNAPSHOT_BYTES: Final = 2 << 30
#: Who asks for a snapshot has a bound of their own.
_SNAPSHOT_SECONDS: Final = 600.0


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """One worker as it describes itself. ``sources[rank]`` is None for a rank that publishes no events.

    ``identity`` changes when the process is another one; None where the engine gives nothing to tell by.
    """

    name: str
    url: str
    engine: Engine
    models: tuple[str, ...]
    max_context_tokens: int | None
    dp_size: int
    sources: tuple[EventSource | None, ...]
    block_tokens: int | None
    pool_tokens: int | None
    identity: str | None
    part: Part = WHOLE
    bootstrap_port: int | None = None
    #: Of one rank, for all groups of layers together.
    pool_blocks: int | None = None
    #: Of prompts, no more tokens than these are computed at once.
    prefill_chunk_tokens: int | None = None
    #: A rank runs no more at once.
    max_running_requests: int | None = None
    #: Windows and recurrent state are kept before the end of each segment of so many tokens; 0: of prompts alone.
    retention_tokens: int | None = None
    #: By model. Engines say the time of asking in ``created``, so that cards tell no workers apart.
    cards: Mapping[str, ModelCard] = field(default_factory=dict, compare=False)

    def target(self, rank: int) -> Target:
        """The address of one of its ranks."""
        parts = urlsplit(self.url)
        is_tls = parts.scheme == "https"
        return Target(
            host=parts.hostname or "",
            port=parts.port or (443 if is_tls else 80),
            rank=rank,
            dp_size=self.dp_size,
            engine=self.engine,
            base_path=parts.path,
            tls=is_tls,
            part=self.part,
            bootstrap_port=self.bootstrap_port,
        )

    @property
    def epochs(self) -> frozenset[str]:
        """Ids that no other process has; none where the engine gives none."""
        return frozenset(source.epoch for source in self.sources if source is not None and source.epoch)

    def is_laid_out_like(self, other: WorkerInfo) -> bool:
        """Nothing but the process differs, so ranks and streams may stay."""
        return replace(self, identity=None, sources=_places(self)) == replace(
            other, identity=None, sources=_places(other)
        )


def _places(info: WorkerInfo) -> tuple[EventSource | None, ...]:
    return tuple(source and replace(source, epoch=None, extra={}) for source in info.sources)


async def describe(client: httpx.AsyncClient, spec: WorkerSpec) -> WorkerInfo:
    """Ask a worker what it is. Raises ``WorkerError`` with a sentence that says what went wrong."""
    models = await _get_json(client, spec.url + "/v1/models")
    sources, server, metrics = await asyncio.gather(
        _optional(_get_json, client, spec.url + "/kv_event_sources"),
        _optional(_get_json, client, spec.url + "/server_info"),
        _optional(_get_text, client, spec.url + "/metrics"),
    )
    if sources and not any(rank.isdecimal() for rank in sources):
        sources = None  # a server that answers every path alike names no rank
    families = _families(metrics or "")
    engine = Engine(spec.engine) if spec.engine else _engine(sources, server)
    cache = _labels(families, "vllm:cache_config_info")
    event_sources = sources_of(spec, sources, server)
    dp_size = spec.dp_size or _dp_size(sources, server, families)
    if dp_size > MOST_RANKS:
        raise WorkerError(f"{spec.url} says that it has {dp_size} ranks; {MOST_RANKS} is the most")
    by_rank = {source.rank: source for source in event_sources}
    block_tokens = next((source.block_tokens for source in event_sources if source.block_tokens), None)
    return WorkerInfo(
        name=spec.name,
        url=spec.url,
        engine=engine,
        models=spec.models or _model_ids(models, spec.url),
        max_context_tokens=_max_context(models),
        dp_size=dp_size,
        sources=tuple(by_rank.get(rank) for rank in range(dp_size)),
        block_tokens=block_tokens
        or read_number(cache.get("prefix_match_unit"))
        or read_number(cache.get("block_size"))
        or read_number((server or {}).get("page_size")),
        pool_tokens=_pool_tokens(cache, server, engine=engine, dp_size=dp_size),
        pool_blocks=_pool_blocks(cache, dp_size=dp_size) if engine is Engine.VLLM else None,
        prefill_chunk_tokens=read_number((server or {}).get("chunked_prefill_size")),
        max_running_requests=_max_running(server),
        retention_tokens=retention_of(cache.get("prefix_cache_retention_interval")),
        identity=_identity(event_sources, families),
        part=_part(spec, server or {}, engine=engine),
        bootstrap_port=spec.bootstrap_port or read_number((server or {}).get("disaggregation_bootstrap_port")),
        cards={str(card["id"]): card for card in _cards(models)},
    )


async def fetch_tokenizer(client: httpx.AsyncClient, url: str) -> tuple[bytes, dict[str, Any]] | None:
    """The worker's ``tokenizer.json`` and tokenizer configuration; None where it offers none."""
    try:
        answer = await ask(client, url + "/tokenizer.json", most_bytes=_MOST_FILE_BYTES)
    except httpx.HTTPError:
        return None
    if not answer.is_ok or not answer.is_whole:
        return None
    config = await _optional(_get_json, client, url + "/tokenizer_info")
    return answer.body, dict(config or {})


async def fetch_snapshot(client: httpx.AsyncClient, url: str, path: str) -> Snapshot:
    """A shim's picture of one rank. Raises ``WorkerError``, ``WireError``."""
    answer = await _get(client, url + path, most_bytes=_MOST_SNAPSHOT_BYTES, seconds=_SNAPSHOT_SECONDS)
    sequence, batch = split_snapshot(answer.body)
    return Snapshot(sequence=sequence, batch=await in_turns(decode_in_slices(batch)))


async def reset_cache(client: httpx.AsyncClient, info: WorkerInfo) -> None:
    """Let the worker forget its prefix cache. Raises ``WorkerError`` where it refuses."""
    path = "/flush_cache" if info.engine is Engine.SGLANG else "/reset_prefix_cache"
    try:
        answer = await ask(client, info.url + path, method="POST")
    except httpx.HTTPError as error:
        raise WorkerError(sentence(info.url, error)) from error
    if answer.status == httpx.codes.NOT_FOUND:
        raise WorkerError(f"{info.name} does not offer {path} (vLLM: only with VLLM_SERVER_DEV_MODE=1)")
    if not answer.is_ok or b'"success":false' in answer.body.replace(b" ", b""):
        raise WorkerError(f"{info.name} did not reset its cache, as requests are running on it")


# --- asking ---------------------------------------------------------------------------------------


async def _get(client: httpx.AsyncClient, url: str, **bounds: Any) -> Answer:
    try:
        answer = await ask(client, url, **bounds)
    except httpx.HTTPError as error:
        raise WorkerError(sentence(url, error)) from error
    if answer.status in (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN):
        raise WorkerError(f"{url} answered {answer.status}: it asks for a key (upstream.api_key_file)")
    if not answer.is_ok:
        raise WorkerError(f"{url} answered {answer.status}")
    if not answer.is_whole:
        raise WorkerError(f"{url} answered with more than {len(answer.body) >> 20} MiB")
    return answer


async def _get_json(client: httpx.AsyncClient, url: str) -> Mapping[str, Any]:
    answer = await _get(client, url)
    try:
        return read_object(answer.body)
    except ValueError as error:
        raise WorkerError(f"{url} {error}") from error


async def _get_text(client: httpx.AsyncClient, url: str) -> str:
    return (await _get(client, url)).text


async def _optional(
    get: Callable[[httpx.AsyncClient, str], Awaitable[T]], client: httpx.AsyncClient, url: str
) -> T | None:
    try:
        return await get(client, url)
    except WorkerError:
        return None


# --- reading --------------------------------------------------------------------------------------


def _model_ids(models: Mapping[str, Any], url: str) -> tuple[str, ...]:
    names = tuple(card["id"] for card in _cards(models))
    if not names:
        raise WorkerError(f"{url}/v1/models names no model")
    return names


def _cards(models: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    cards = models.get("data")
    if not isinstance(cards, list):
        return []
    return [card for card in cards if isinstance(card, dict) and isinstance(card.get("id"), str) and card["id"]]


def _max_context(models: Mapping[str, Any]) -> int | None:
    return next((read_number(card.get("max_model_len")) for card in _cards(models)), None)


def _engine(sources: Mapping[str, Any] | None, server: Mapping[str, Any] | None) -> Engine:
    entries = [entry for entry in (sources or {}).values() if isinstance(entry, dict)]
    if any(entry.get("engine") == "homing-shim" for entry in entries):
        return Engine.SHIM
    if sources is None and server is not None and ("kv_events" in server or "page_size" in server):
        return Engine.SGLANG
    return Engine.VLLM


def _part(spec: WorkerSpec, server: Mapping[str, Any], *, engine: Engine) -> Part:
    """SGLang and the shim tell their role; only SGLang's decode workers refuse a prompt that nobody computed, and keep
    no cache unless they are told to.
    """
    told = server.get("disaggregation_mode")
    role = WorkerRole(spec.role or (told if told in tuple(WorkerRole) else WorkerRole.UNIFIED))
    if role is WorkerRole.UNIFIED:
        return WHOLE
    handover = Handover(spec.handover or (Handover.PARAMS if engine is Engine.VLLM else Handover.BOOTSTRAP))
    if engine is not Engine.SGLANG:
        return Part(role, handover)
    keeps_cache = role is WorkerRole.PREFILL or server.get("disaggregation_decode_enable_radix_cache") is True
    return Part(role, handover, is_self_sufficient=False, keeps_cache=keeps_cache)


def _dp_size(
    sources: Mapping[str, Any] | None, server: Mapping[str, Any] | None, families: Mapping[str, Metric]
) -> int:
    if sources:
        return len(sources)
    if server and (size := read_number(server.get("dp_size"))):
        return size
    running = families.get("vllm:num_requests_running")
    engines = {sample.labels.get("engine") for sample in running.samples} if running else set()
    return max(len(engines), 1)


def _pool_tokens(
    cache: Mapping[str, str], server: Mapping[str, Any] | None, *, engine: Engine, dp_size: int
) -> int | None:
    """Tokens one rank's cache holds."""
    if size := read_number(cache.get("kv_cache_size_tokens")):
        return size
    blocks, block_tokens = read_number(cache.get("num_gpu_blocks")), read_number(cache.get("block_size"))
    if blocks and block_tokens:
        ranks = dp_size if engine is Engine.VLLM else 1  # vLLM counts the blocks of all its ranks together
        return blocks * block_tokens // ranks
    return read_number((server or {}).get("max_total_num_tokens"))


def _max_running(server: Mapping[str, Any] | None) -> int | None:
    """How many requests one rank of SGLang runs at once, as it says of its schedulers."""
    states = (server or {}).get("internal_states")
    state = states[0] if isinstance(states, list) and states and isinstance(states[0], Mapping) else {}
    return read_number(state.get("effective_max_running_requests_per_dp"))


def _pool_blocks(cache: Mapping[str, str], *, dp_size: int) -> int | None:
    """Blocks of one rank of vLLM, by the labels of ``vllm:cache_config_info``, one of which stands for no block."""
    blocks = read_number(cache.get("num_gpu_blocks"))
    return blocks // dp_size - 1 if blocks else None


def _identity(sources: Sequence[EventSource], families: Mapping[str, Metric]) -> str | None:
    epochs = [source.epoch for source in sources if source.epoch]
    if epochs:
        return ",".join(epochs)
    started = families.get("process_start_time_seconds")
    return str(started.samples[0].value) if started and started.samples else None


def _families(text: str) -> Mapping[str, Metric]:
    try:
        return {family.name: family for family in text_string_to_metric_families(text)}
    except (ValueError, KeyError, IndexError):
        return {}  # not Prometheus text: nothing is learned from it


def _labels(families: Mapping[str, Metric], name: str) -> Mapping[str, str]:
    family = families.get(name) or families.get(name.removesuffix("_info"))
    labels = family.samples[0].labels if family and family.samples else {}
    return {name: value for name, value in labels.items() if len(value) <= MOST_DIGITS}
