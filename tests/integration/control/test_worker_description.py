"""What a worker is, as learned from its own endpoints; the answers are those that real engines gave."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from router.core.types import WHOLE, Engine, Handover, Part, WorkerRole
from router.errors import WorkerError
from router.fleet import asking
from router.fleet.probes import Probe, probe
from router.fleet.worker_api import describe, fetch_tokenizer, reset_cache
from router.settings import WorkerSpec
from tests.fakes.certificates import make_certificate
from tests.fakes.control_worker import Answers, ControlWorker, as_json


def vllm_source(rank: int) -> dict[str, Any]:
    """An entry of vLLM 0.32's ``/kv_event_sources``, as recorded."""
    return {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": f"tcp://*:{15577 + rank}",
        "replay_endpoint": f"tcp://*:{15677 + rank}",
        "buffer_steps": 10000,
        "hwm": 100000,
        "max_queue_size": 100000,
        "topic": "kv-events",
    }


# Two ranks of 160 blocks of 32: vLLM adds the ranks' blocks up in num_gpu_blocks, not in kv_cache_size_tokens.
VLLM_METRICS = b"""\
# HELP vllm:cache_config_info Information of the LLMEngine CacheConfig
# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{block_size="32",engine="0",kv_cache_size_tokens="5120",num_gpu_blocks="320",\
prefix_cache_retention_interval="256"} 1.0
# TYPE process_start_time_seconds gauge
process_start_time_seconds 1.7e+09
"""
OLD_VLLM_METRICS = VLLM_METRICS.replace(b'kv_cache_size_tokens="5120",', b"")
VLLM: Answers = {
    "/kv_event_sources": as_json({"1": vllm_source(1), "0": vllm_source(0)}),
    "/metrics": (200, VLLM_METRICS),
}
SGLANG_INFO: dict[str, Any] = {
    "dp_size": 2,
    "page_size": 16,
    "max_total_num_tokens": 1536,
    "chunked_prefill_size": 4096,
    "max_running_requests": 96,
    "internal_states": [{"effective_max_running_requests_per_dp": 48}],
    "kv_events": {
        "publisher": "zmq",
        "endpoint_host": "*",
        "endpoint_port_base": 15700,
        "topic": "kv-events",
        "block_size": 16,
        "dp_size": 2,
        "replay_endpoint_port_base": 15800,
    },
}


async def test_vllm_with_two_ranks() -> None:
    """Ranks, endpoints on the worker's host, block size, a rank's pool and context come from what vLLM answers."""
    async with ControlWorker(VLLM) as worker, httpx.AsyncClient() as client:
        info = await describe(client, WorkerSpec(url=worker.url))
    assert (info.engine, info.models, info.max_context_tokens, info.dp_size) == (Engine.VLLM, ("m",), 4096, 2)
    assert [source and source.endpoint for source in info.sources] == ["tcp://127.0.0.1:15577", "tcp://127.0.0.1:15578"]
    assert [source and source.replay_endpoint for source in info.sources] == [
        "tcp://127.0.0.1:15677",
        "tcp://127.0.0.1:15678",
    ]
    assert (info.block_tokens, info.pool_tokens, info.pool_blocks) == (32, 5120, 159)  # one stands for no block
    assert info.retention_tokens == 256
    target = info.target(1)
    assert (target.host, target.port, target.rank, target.dp_size) == ("127.0.0.1", worker.port, 1, 2)


async def test_older_vllm_counts_blocks_of_all_ranks() -> None:
    """320 blocks of 32 tokens over two ranks are 5,120 tokens a rank."""
    async with ControlWorker({**VLLM, "/metrics": (200, OLD_VLLM_METRICS)}) as worker, httpx.AsyncClient() as client:
        assert (await describe(client, WorkerSpec(url=worker.url))).pool_tokens == 5120


@pytest.mark.parametrize(("unit", "expected"), [("None", 96), ("32", 32)])
async def test_vllm_may_match_prefixes_by_less_than_a_block(unit: str, expected: int) -> None:
    """The index counts in such units, as the events do."""
    metrics = VLLM_METRICS.replace(b'block_size="32"', f'block_size="96",prefix_match_unit="{unit}"'.encode())
    async with ControlWorker({**VLLM, "/metrics": (200, metrics)}) as worker, httpx.AsyncClient() as client:
        assert (await describe(client, WorkerSpec(url=worker.url))).block_tokens == expected


async def test_sglang_with_two_ranks() -> None:
    """SGLang names port bases; rank r publishes at base + r."""
    async with ControlWorker({"/server_info": as_json(SGLANG_INFO)}) as worker, httpx.AsyncClient() as client:
        info = await describe(client, WorkerSpec(url=worker.url))
    assert (info.engine, info.dp_size, info.block_tokens, info.pool_tokens) == (Engine.SGLANG, 2, 16, 1536)
    assert (info.prefill_chunk_tokens, info.max_running_requests) == (4096, 48)
    assert info.pool_blocks is None
    assert [source and (source.endpoint, source.replay_endpoint) for source in info.sources] == [
        ("tcp://127.0.0.1:15700", "tcp://127.0.0.1:15800"),
        ("tcp://127.0.0.1:15701", "tcp://127.0.0.1:15801"),
    ]


async def test_the_shim_tells_its_engine_epoch_and_snapshots() -> None:
    """The shim's entries carry more; the epochs are its identity."""
    extra = {"engine": "homing-shim", "epoch": "e", "snapshot_path": "/kv_snapshot?dp_rank=0", "block_size": 16}
    answers: Answers = {"/kv_event_sources": as_json({"0": vllm_source(0) | extra})}
    async with ControlWorker(answers) as worker, httpx.AsyncClient() as client:
        info = await describe(client, WorkerSpec(url=worker.url))
    assert (info.engine, info.identity, info.block_tokens) == (Engine.SHIM, "e", 16)
    assert info.sources[0] is not None
    assert info.sources[0].snapshot_path == "/kv_snapshot?dp_rank=0"


async def test_what_the_operator_wrote_wins() -> None:
    """Engine, ranks, models and endpoints of the settings replace the worker's own."""
    async with ControlWorker(VLLM) as worker, httpx.AsyncClient() as client:
        spec = WorkerSpec(
            url=worker.url, id="w", engine="sglang", dp_size=1, models=("x",), kv_events="tcp://10.0.0.1:7000"
        )
        info = await describe(client, spec)
    assert (info.name, info.engine, info.dp_size, info.models) == ("w", Engine.SGLANG, 1, ("x",))
    assert info.sources[0] is not None
    assert (info.sources[0].endpoint, info.sources[0].replay_endpoint) == ("tcp://10.0.0.1:7000", None)


async def test_a_server_with_nothing_but_models_is_one_rank_without_events() -> None:
    """Any OpenAI-compatible server can be a worker."""
    async with ControlWorker({}) as worker, httpx.AsyncClient() as client:
        info = await describe(client, WorkerSpec(url=worker.url))
    assert (info.dp_size, info.sources, info.block_tokens, info.pool_tokens) == (1, (None,), None, None)


@pytest.mark.parametrize(
    ("answers", "sentence"),
    [
        ({"/v1/models": (503, b"")}, "answered 503"),
        ({"/v1/models": (200, b"<html>")}, "did not answer with JSON"),
        ({"/v1/models": (200, b"[" * 100_000)}, "did not answer with JSON"),
        ({"/v1/models": (200, b"[]")}, "no object"),
        ({"/v1/models": as_json({"data": []})}, "names no model"),
        ({"/v1/models": None}, "did not answer in time"),
        ({"/kv_event_sources": as_json({"0": {"publisher": "zmq"}})}, "cache events"),
    ],
)
async def test_a_worker_that_cannot_be_understood_is_told_in_a_sentence(answers: Answers, sentence: str) -> None:
    """Each way of answering badly has words of its own."""
    seconds = 0.3 if None in answers.values() else 30.0
    async with ControlWorker(answers) as worker, httpx.AsyncClient(timeout=seconds) as client:
        with pytest.raises(WorkerError, match=sentence):
            await describe(client, WorkerSpec(url=worker.url))


async def test_an_answer_that_never_ends_is_told_in_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each byte comes in time; all of them never do."""
    is_over = asyncio.Event()

    async def trickle(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 1000000\r\n\r\n")
        with contextlib.suppress(ConnectionError):
            while True:
                writer.write(b" ")
                await writer.drain()
                await asyncio.sleep(0.02)
        writer.close()
        is_over.set()

    monkeypatch.setattr(asking, "ANSWER_SECONDS", 0.2)
    server = await asyncio.start_server(trickle, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with httpx.AsyncClient(timeout=5.0) as client:
        with pytest.raises(WorkerError, match="did not answer in time"):
            await describe(client, WorkerSpec(url=url))
    await is_over.wait()
    server.close()


async def test_nothing_listening_is_told_in_a_sentence() -> None:
    """The commonest case of all."""
    async with ControlWorker({}) as worker:
        url = worker.url
    async with httpx.AsyncClient() as client:
        with pytest.raises(WorkerError, match=f"nothing listens at {url}"):
            await describe(client, WorkerSpec(url=url))


async def test_http_where_https_was_said_is_told_in_a_sentence() -> None:
    """It listens, but speaks without TLS; seen at the first look and by probes."""
    async with ControlWorker({}) as worker, httpx.AsyncClient(timeout=1.0) as client:
        url = worker.url.replace("http://", "https://")
        with pytest.raises(WorkerError, match=f"^the TLS handshake with {url}/v1/models failed; is it http\\?$"):
            await describe(client, WorkerSpec(url=url))
        assert await probe(client, url, timeout_seconds=1) is Probe.NO_TLS


async def test_a_certificate_of_nobody_is_told_in_a_sentence(tmp_path: Path) -> None:
    """It is not said that nothing listens, nor that there is no TLS."""
    certificate, key = make_certificate(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    server = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0, ssl=context)
    url = f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with server, httpx.AsyncClient() as client:
        with pytest.raises(WorkerError, match=f"^the certificate of {url}/v1/models is not accepted$"):
            await describe(client, WorkerSpec(url=url))
        assert await probe(client, url, timeout_seconds=5) is Probe.UNTRUSTED


async def test_a_name_without_an_address_is_told_in_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the system's resolver says it."""

    def refuse(*_: object, **__: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    url = "http://worker.invalid:8000"
    async with httpx.AsyncClient() as client:
        with pytest.raises(WorkerError, match=f"^the name in {url}/v1/models cannot be resolved$"):
            await describe(client, WorkerSpec(url=url))
        assert await probe(client, url, timeout_seconds=5) is Probe.UNRESOLVED


async def test_a_tokenizer_is_fetched_where_it_is_offered() -> None:
    """Both files, the file alone, or nothing."""
    answers: Answers = {"/tokenizer.json": (200, b"{}"), "/tokenizer_info": as_json({"chat_template": "x"})}
    async with ControlWorker(answers) as worker, httpx.AsyncClient() as client:
        assert await fetch_tokenizer(client, worker.url) == (b"{}", {"chat_template": "x"})
        del worker.answers["/tokenizer_info"]
        assert await fetch_tokenizer(client, worker.url) == (b"{}", {})
        del worker.answers["/tokenizer.json"]
        assert await fetch_tokenizer(client, worker.url) is None


@pytest.mark.parametrize(
    ("path", "answer", "engine", "sentence"),
    [
        ("/reset_prefix_cache", as_json({"success": True}), "vllm", None),
        ("/reset_prefix_cache", as_json({"success": False}), "vllm", "requests are running"),
        ("/other", as_json({}), "vllm", "VLLM_SERVER_DEV_MODE"),
        ("/flush_cache", (200, b"Cache flushed."), "sglang", None),
        ("/flush_cache", (400, b"busy"), "sglang", "requests are running"),
    ],
)
async def test_a_cache_is_reset_the_engines_way(
    path: str, answer: tuple[int, bytes], engine: str, sentence: str | None
) -> None:
    """Each engine has its path, and its own way of saying no."""
    async with ControlWorker({path: answer}) as worker, httpx.AsyncClient() as client:
        info = await describe(client, WorkerSpec(url=worker.url, engine=engine))
        if sentence is None:
            await reset_cache(client, info)
            assert f"POST {path}" in worker.asked
        else:
            with pytest.raises(WorkerError, match=sentence):
                await reset_cache(client, info)


async def test_models_are_described_in_the_workers_own_words() -> None:
    """All fields of a card are kept; entries that name no model are passed over."""
    card = {"id": "m", "owned_by": "vllm", "root": "/models/m", "parent": None, "max_model_len": 4096, "created": 7}
    answers: Answers = {"/v1/models": as_json({"data": ["x", {"id": 5}, {"object": "model"}, card, {"id": "n"}]})}
    async with ControlWorker(answers) as worker, httpx.AsyncClient() as client:
        info = await describe(client, WorkerSpec(url=worker.url))
        later = replace(info, cards={})
    assert info.models == ("m", "n")
    assert info.cards == {"m": card, "n": {"id": "n"}}
    assert info.max_context_tokens == 4096
    assert info.is_laid_out_like(later), "another time of creation is no other worker"


@pytest.mark.parametrize(
    ("told", "written", "expected"),
    [
        ({"disaggregation_mode": "null"}, {}, WHOLE),
        ({"disaggregation_mode": "prefill"}, {}, Part(WorkerRole.PREFILL, Handover.BOOTSTRAP, False)),
        ({"disaggregation_mode": "decode"}, {}, Part(WorkerRole.DECODE, Handover.BOOTSTRAP, False, False)),
        (
            {"disaggregation_mode": "decode", "disaggregation_decode_enable_radix_cache": True},
            {},
            Part(WorkerRole.DECODE, Handover.BOOTSTRAP, False, True),
        ),
        ({}, {"role": "decode"}, Part(WorkerRole.DECODE, Handover.BOOTSTRAP, False, False)),
        ({}, {"role": "decode", "engine": "vllm"}, Part(WorkerRole.DECODE, Handover.PARAMS, True)),
        ({"disaggregation_mode": "decode"}, {"role": "unified"}, WHOLE),
        ({"disaggregation_mode": "prefill"}, {"handover": "params"}, Part(WorkerRole.PREFILL, Handover.PARAMS, False)),
    ],
)
async def test_its_role(told: dict[str, Any], written: dict[str, Any], expected: Part) -> None:
    """SGLang tells its role, its bootstrap port and whether a decode worker keeps a cache in ``/server_info``; what the
    operator wrote of the role wins.
    """
    info = SGLANG_INFO | {"disaggregation_bootstrap_port": 8998} | told
    async with ControlWorker({"/server_info": as_json(info)}) as worker, httpx.AsyncClient() as client:
        described = await describe(client, WorkerSpec(url=worker.url, **written))
    assert described.part == expected
    assert described.target(1).part == expected
    assert described.target(1).bootstrap_port == 8998
