"""Whatever a worker answers to whatever it is asked, the router has a plain sentence for it or goes on without."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import httpx
import pytest

from router.errors import WireError, WorkerError
from router.fleet import asking
from router.fleet.parity import Checker, Standing
from router.fleet.probes import Probe, probe
from router.fleet.worker_api import WorkerInfo, describe, fetch_snapshot, fetch_tokenizer, reset_cache
from router.settings import WorkerSpec

URL = "http://worker:1"
MODELS: Mapping[str, Any] = {"object": "list", "data": [{"id": "m", "max_model_len": 4096}]}
SOURCES: Mapping[str, Any] = {
    "0": {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": "tcp://*:5557",
        "replay_endpoint": "tcp://*:5657",
        "topic": "kv-events",
        "engine": "homing-shim",
        "epoch": "e",
        "snapshot_path": "/kv_snapshot?dp_rank=0",
        "block_size": 16,
    }
}
SERVER: Mapping[str, Any] = {
    "dp_size": 2,
    "page_size": 16,
    "max_total_num_tokens": 1536,
    "chunked_prefill_size": 4096,
    "internal_states": [{"effective_max_running_requests_per_dp": 48}],
    "disaggregation_mode": "prefill",
    "disaggregation_bootstrap_port": 8998,
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
METRICS = (
    b"# TYPE vllm:cache_config_info gauge\n"
    b'vllm:cache_config_info{block_size="32",num_gpu_blocks="320",prefix_cache_retention_interval="256"} 1.0\n'
    b"# TYPE process_start_time_seconds gauge\nprocess_start_time_seconds 1.7e+09\n"
)
USAGE: Mapping[str, Any] = {
    "choices": [],
    "usage": {"prompt_tokens": 70, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 64}},
}
DEEP: Any = json.loads("[" * 200 + "]" * 200)

#: As JSON, since some cannot be written by ``json.dumps``.
ODD = {
    "list": b"[1]",
    "string": b'"ok"',
    "null": b"null",
    "true": b"true",
    "number": b"-7",
    "huge number": b"9" * 400,
    "longer number": b"9" * 5000,
    "infinity": b"1e999",
    "nan": b"NaN",
    "long text": b'"' + b"x" * 100_000 + b'"',
    "many digits": b'"' + b"9" * 5000 + b'"',
    "half a character": b'"\\ud800"',
    "object": b'{"a": 1}',
    "deep": b"[" * 200 + b"]" * 200,
    "deeper": b"[" * 100_000,
    "not JSON": b"<html>",
    "not text": b"\xff\xfe\x00",
    "nothing": b"",
}


def leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where all the values in a document are, the document itself left out."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in inner:
        yield (*path, key)
        yield from leaves(each, (*path, key))


def with_odd(document: Mapping[str, Any], path: tuple[Any, ...], odd: bytes) -> bytes:
    """The document's JSON with something else in one place."""
    copy = json.loads(json.dumps(document))
    place = copy
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = "ODD HERE"
    return json.dumps(copy).encode().replace(b'"ODD HERE"', odd)


def all_odd(document: Mapping[str, Any]) -> list[bytes]:
    return [*ODD.values(), *(with_odd(document, path, odd) for path in leaves(document) for odd in ODD.values())]


def client_of(answers: Mapping[str, bytes | httpx.Response]) -> httpx.AsyncClient:
    def answer(request: httpx.Request) -> httpx.Response:
        found = answers.get(request.url.path, httpx.Response(404))
        return found if isinstance(found, httpx.Response) else httpx.Response(200, content=found)

    return httpx.AsyncClient(transport=httpx.MockTransport(answer))


def is_sentence(text: str) -> bool:
    """One line that can be read, and written anywhere."""
    return "\n" not in text and "developer.mozilla" not in text and 0 < len(text.encode()) < 400


def as_json(value: object) -> bytes:
    return json.dumps(value).encode()


@pytest.mark.parametrize(
    ("path", "document"),
    [("/v1/models", MODELS), ("/kv_event_sources", SOURCES), ("/server_info", SERVER)],
)
async def test_what_it_says_of_itself(path: str, document: Mapping[str, Any]) -> None:
    """It is described, or a sentence says why not; what is kept can be passed on, and counts what a worker can have."""
    for odd in all_odd(document):
        async with client_of({"/v1/models": as_json(MODELS), path: odd}) as client:
            info, refusal = await described(client)
        assert is_sentence(refusal) if info is None else check_described(info), odd[:200]


async def described(client: httpx.AsyncClient) -> tuple[WorkerInfo | None, str]:
    """What the worker is, or the sentence that says why nobody knows."""
    try:
        return await describe(client, WorkerSpec(url=URL)), ""
    except WorkerError as error:
        return None, str(error)


def check_described(info: WorkerInfo) -> bool:
    """All of it can be passed on."""
    json.dumps(dict(info.cards)).encode()
    "".join(info.models).encode()
    assert 1 <= info.dp_size <= 1024
    assert len(info.sources) == info.dp_size
    assert info.epochs is not None
    for number in (info.block_tokens, info.pool_tokens, info.pool_blocks, info.prefill_chunk_tokens):
        assert number is None or 0 < number < 1 << 63
    for source in info.sources:
        if source is not None:
            source.topic.encode()
            assert source.snapshot_path is None or source.snapshot_path.startswith("/")
            assert int(source.endpoint.rsplit(":", 1)[1]) <= 65535
    return all(info.target(rank) for rank in range(info.dp_size))


@pytest.mark.parametrize(
    "text",
    [
        METRICS.replace(b'"320"', b'"' + b"9" * 5000 + b'"'),
        METRICS.replace(b'"256"', b'"' + b"9" * 5000 + b'"'),
        METRICS.replace(b'"32"', b'"many"'),
        METRICS.replace(b"1.7e+09", b"soon"),
        METRICS.replace(b"} 1.0", b""),
        METRICS.replace(b"{", b"{{"),
        METRICS.replace(b'="', b"="),
        b"# TYPE\n# HELP\n# TYPE x\nx{\n",
        *ODD.values(),
    ],
)
async def test_odd_metrics_tell_nothing(text: bytes) -> None:
    async with client_of({"/v1/models": as_json(MODELS), "/metrics": text}) as client:
        assert check_described(await describe(client, WorkerSpec(url=URL)))


async def test_so_many_ranks_are_none() -> None:
    """A list of ranks that would fill the memory is not made."""
    server = {**SERVER, "dp_size": 10**9, "kv_events": {**SERVER["kv_events"], "dp_size": 10**9}}
    async with client_of({"/v1/models": as_json(MODELS), "/server_info": as_json(server)}) as client:
        with pytest.raises(WorkerError, match="says that it has 1000000000 ranks; 1024 is the most"):
            await describe(client, WorkerSpec(url=URL))


@pytest.mark.parametrize("path", ["@elsewhere:1/x", "/a\nb", "no slash"])
async def test_a_snapshot_is_had_from_the_worker_itself(path: str) -> None:
    """A path that leads elsewhere is as good as none."""
    sources = {"0": {**SOURCES["0"], "snapshot_path": path}}
    async with client_of({"/v1/models": as_json(MODELS), "/kv_event_sources": as_json(sources)}) as client:
        info = await describe(client, WorkerSpec(url=URL))
        assert info.sources[0] is not None
        if (kept := info.sources[0].snapshot_path) is not None:
            with pytest.raises(WorkerError):
                await fetch_snapshot(client, URL, kept)


@pytest.mark.parametrize("body", [*ODD.values(), httpx.Response(500, content=b"x")], ids=[*ODD, "500"])
async def test_snapshots_health_resets_and_tokenizers(body: bytes | httpx.Response) -> None:
    """Each is refused in a sentence, or judged by its status alone."""
    paths = ("/kv_snapshot", "/health", "/reset_prefix_cache", "/tokenizer.json", "/tokenizer_info")
    async with client_of({"/v1/models": as_json(MODELS), **dict.fromkeys(paths, body)}) as client:
        with pytest.raises((WorkerError, WireError)) as refused:
            await fetch_snapshot(client, URL, "/kv_snapshot")
        assert is_sentence(str(refused.value))
        is_well = isinstance(body, bytes)
        assert await probe(client, URL, timeout_seconds=30.0) is (Probe.ALIVE if is_well else Probe.UNWELL)
        info = await describe(client, WorkerSpec(url=URL))
        if is_well:
            await reset_cache(client, info)
            found = await fetch_tokenizer(client, URL)
            assert found is not None
            assert isinstance(found[1], dict)
        else:
            assert await fetch_tokenizer(client, URL) is None


async def check(answer: Callable[[], httpx.Response]) -> tuple[Standing, str]:
    async with client_of({"/v1/models": as_json(MODELS), "/kv_event_sources": as_json(SOURCES)}) as client:
        info = await describe(client, WorkerSpec(url=URL))
    async with httpx.AsyncClient(transport=httpx.MockTransport(lambda _: answer())) as client:
        checker = Checker(client, lambda _model, _body: list(range(70)), lambda _slot, _ids: 64, wait_seconds=0.0)
        found = await checker.check(info, 0, 0, nonce="n")
    return found.standing, found.sentence


async def test_the_self_check_goes_on() -> None:
    """Any answer at all: it passes, or a sentence says what is odd."""
    assert await check(lambda: httpx.Response(200, json=USAGE)) == (Standing.PASSED, "")
    for odd in all_odd(USAGE):
        standing, said = await check(lambda odd=odd: httpx.Response(200, content=odd))  # type: ignore[misc]
        assert standing is Standing.PASSED or is_sentence(said), odd[:200]
        assert "router failed" not in said, odd[:200]


@pytest.mark.parametrize(
    ("answer", "sentence"),
    [
        (httpx.Response(500, json={"error": "x"}), "http://worker:1/v1/chat/completions answered 500"),
        (httpx.Response(200, json=[1]), "http://worker:1/v1/chat/completions answered with JSON that is no object"),
        (httpx.Response(200, json={}), "http://worker:1/v1/chat/completions answered without usage"),
        (httpx.Response(200, json={"usage": {"prompt_tokens": 70.5}}), "does not say how many tokens"),
        (
            httpx.Response(
                200, json={"usage": {"prompt_tokens": 70, "prompt_tokens_details": {"cached_tokens": "many"}}}
            ),
            "the worker reports cached tokens, but not as a number",
        ),
    ],
)
async def test_what_the_self_check_says(answer: httpx.Response, sentence: str) -> None:
    assert sentence in (await check(lambda: answer))[1]


async def test_a_fault_of_the_routers_own_is_said_too() -> None:
    """It costs the check, not the worker."""

    def fail(_model: str, _body: bytes) -> None:
        raise RuntimeError("a template")

    async with client_of({"/v1/models": as_json(MODELS), "/kv_event_sources": as_json(SOURCES)}) as client:
        info = await describe(client, WorkerSpec(url=URL))
        found = await Checker(client, fail, lambda _slot, _ids: 64).check(info, 0, 0, nonce="n")
    assert found.standing is Standing.UNCHECKED
    assert found.sentence == "the router failed at the check: RuntimeError('a template')"


@pytest.mark.parametrize("path", ["/v1/models", "/health", "/v1/chat/completions"])
async def test_an_answer_without_end_is_not_read_to_its_end(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """So much is read and no more."""
    monkeypatch.setattr(asking, "ANSWER_SECONDS", 20.0)
    taken = 0

    class Endless(httpx.AsyncByteStream):
        async def __aiter__(self) -> Any:
            nonlocal taken
            while True:
                taken += 1 << 20
                assert taken < 64 << 20
                yield b" " * (1 << 20)

    endless = httpx.Response(200, stream=Endless())
    async with client_of({"/v1/models": as_json(MODELS), path: endless}) as client:
        match path:
            case "/v1/models":
                with pytest.raises(WorkerError, match="answered with more than 16 MiB"):
                    await describe(client, WorkerSpec(url=URL))
            case "/health":
                assert await probe(client, URL, timeout_seconds=30.0) is Probe.ALIVE
            case _:
                assert "did not answer with JSON" in (await check(lambda: endless))[1]
