"""Every endpoint passes unchanged, and the official clients of OpenAI and Anthropic are at home here.

What the worker sends is what vLLM 0.32 sent to the same requests, shortened.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anthropic
import openai
import pytest

from router.core.keys import Key, Keyring, digest_of
from router.core.types import Engine
from router.settings import UpstreamSettings
from router.wire.usage import Usage
from tests.fakes.fault_worker import FaultWorker, Move, Script, answer, chunk, stream_head
from tests.fakes.proxy_rig import Rig, rig, target

MESSAGES = [{"role": "user", "content": "hi"}]
BODIES: dict[str, dict[str, object]] = {
    "/v1/chat/completions": {"messages": MESSAGES},
    "/v1/completions": {"prompt": "hi"},
    "/v1/responses": {"input": "hi"},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 3},
    "/v1/messages/count_tokens": {"messages": MESSAGES},
    "/v1/embeddings": {"input": ["hi", "there"]},
    "/v1/rerank": {"query": "hi", "documents": ["a", "b"]},
    "/tokenize": {"prompt": "hi"},
}


def named(event: dict[str, object]) -> bytes:
    """An event with its name, as both newer APIs stream."""
    return f"event: {event['type']}\ndata: {json.dumps(event)}\n\n".encode()


MESSAGE = {
    "id": "chatcmpl-1",
    "type": "message",
    "role": "assistant",
    "content": [{"type": "text", "text": " topecvar"}],
    "model": "m",
    "stop_reason": "max_tokens",
    "usage": {
        "input_tokens": 7,
        "output_tokens": 3,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 416,
    },
}
MESSAGE_EVENTS = [
    named({"type": "message_start", "message": {**MESSAGE, "content": [], "stop_reason": None}}),
    named({"type": "content_block_start", "content_block": {"type": "text", "text": ""}, "index": 0}),
    named({"type": "content_block_delta", "delta": {"type": "text_delta", "text": " used"}, "index": 0}),
    named({"type": "content_block_stop", "index": 0}),
    named(
        {
            "type": "message_delta",
            "delta": {"stop_reason": "max_tokens", "stop_sequence": None},
            "usage": MESSAGE["usage"],
        }
    ),
    named({"type": "message_stop"}),
]
RESPONSE: dict[str, object] = {
    "id": "resp_1",
    "created_at": 1795965189,
    "model": "m",
    "object": "response",
    "output": [
        {
            "id": "msg_1",
            "content": [{"annotations": [], "text": "irround32", "type": "output_text", "logprobs": None}],
            "role": "assistant",
            "status": "completed",
            "type": "message",
        }
    ],
    "parallel_tool_calls": True,
    "tool_choice": "none",
    "tools": [],
    "status": "completed",
    "usage": {
        "input_tokens": 423,
        "input_tokens_details": {"cached_tokens": 416, "cache_write_tokens": 0},
        "output_tokens": 3,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 426,
    },
}
RESPONSE_EVENTS = [
    named(
        {
            "type": "response.created",
            "sequence_number": 0,
            "response": {**RESPONSE, "status": "in_progress", "output": [], "usage": None},
        }
    ),
    named(
        {
            "type": "response.output_text.delta",
            "sequence_number": 1,
            "item_id": "msg_1",
            "output_index": 0,
            "content_index": 0,
            "delta": "irround32",
            "logprobs": [],
        }
    ),
    named({"type": "response.completed", "sequence_number": 2, "response": RESPONSE}),
]
USAGE = Usage(prompt_tokens=423, completion_tokens=3, cached_tokens=416)


def whole(document: object) -> Script:
    return (answer(200, json.dumps(document).encode()),)


def streamed(events: list[bytes]) -> Script:
    return (stream_head(), *(chunk(event) for event in events), chunk(b""))


def broken(events: list[bytes]) -> Script:
    return (stream_head(), *(chunk(event) for event in events), 0.02, Move.RESET)


@asynccontextmanager
async def claude(it: Rig, *, key: str = "sk-a") -> AsyncIterator[anthropic.AsyncAnthropic]:
    """Anthropic's client against the router; it tries once."""
    async with anthropic.AsyncAnthropic(
        api_key=key, base_url=f"http://127.0.0.1:{it.port}", max_retries=0, timeout=30
    ) as client:
        yield client


@asynccontextmanager
async def gpt(it: Rig, *, key: str = "sk-a") -> AsyncIterator[openai.AsyncOpenAI]:
    """OpenAI's client against the router; it tries once."""
    async with openai.AsyncOpenAI(
        api_key=key, base_url=f"http://127.0.0.1:{it.port}/v1", max_retries=0, timeout=30
    ) as client:
        yield client


async def collect(source: AsyncIterator[str], into: list[str]) -> None:
    """Keep what comes, also when it ends in an error."""
    async for piece in source:
        into.append(piece)  # noqa: PERF401


# --- passing -------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", BODIES)
async def test_every_endpoint_passes_unchanged(path: str) -> None:
    """Path, query and body reach the worker as sent, its answer comes back as sent, under the endpoint's own label."""
    body = json.dumps({"unknown": 1.50, "model": "m", **BODIES[path]}, indent=1).encode()
    said = b'{ "anything": "at all" }'
    async with FaultWorker([(answer(200, said),)]) as worker, rig(target(worker.port)) as it:
        answer_ = await it.ask(body, path=path + "?beta=true", headers={"anthropic-version": "2023-06-01"})
        assert (answer_.status, answer_.body) == (200, said)
        (received,) = worker.requests
        assert received.head.startswith(f"POST {path}?beta=true HTTP/1.1\r\n".encode())
        assert received.body == body
        assert received.header("anthropic-version") == "2023-06-01"
        endpoint = it.brain.prepared[0][0].endpoint.value
        assert it.count("homing_requests_total", endpoint=endpoint, status="200") == 1


async def test_an_alias_reaches_the_worker_as_the_model_s_own_name() -> None:
    """The one edit of a body besides the rank; nothing else of it changes."""
    body = b'{"prompt": "alias", "model":"alias" , "seed": 1.0}'
    async with FaultWorker() as worker, rig(target(worker.port)) as it:
        await it.ask(body, path="/v1/completions")
        assert worker.requests[0].body == b'{"prompt": "alias", "model":"m" , "seed": 1.0}'


@pytest.mark.parametrize("path", BODIES)
async def test_every_endpoint_is_sent_to_a_rank(path: str) -> None:
    """The rank is named in header and body whatever is asked."""
    async with FaultWorker() as worker, rig(target(worker.port, rank=1, dp_size=2, engine=Engine.SHIM)) as it:
        await it.ask({"model": "m", **BODIES[path]}, path=path)
        (received,) = worker.requests
        assert received.header("x-data-parallel-rank") == "1"
        assert json.loads(received.body)["routed_dp_rank"] == 1


@pytest.mark.parametrize(
    "path",
    [
        "/",
        "/v1",
        "/v1/",
        "/v1/messages/",
        "/v1/messages/batches",
        "/v1/responses/resp_1",
        "/V1/messages",
        "/v1//messages",
        "/v1/./messages",
        "/v1/%6dessages",
        "/v1/load_lora_adapter",
        "/shutdown",
        "/metrics",
        "/reset_prefix_cache",
        "/v1/messages;x=1",
        "//v1/messages",
    ],
)
async def test_unknown_paths_are_never_proxied(path: str) -> None:
    """404 in one attempt, and no worker hears of it, however close the path is to a known one."""
    async with FaultWorker() as worker, rig(target(worker.port)) as it:
        answer_ = await it.ask({"model": "m", "messages": MESSAGES, "max_tokens": 1}, path=path)
        assert answer_.status == 404
        assert answer_.error["code"] == "unknown_url"
        assert worker.connections == 0


async def test_models_are_listed_and_shown() -> None:
    """One by its name, which may hold a slash, percent-encoded or not; an unknown one is 404."""
    async with rig() as it:
        ask = {"method": "GET", "body": b""}
        assert (await it.ask(path="/v1/models", **ask)).status == 200
        assert (await it.ask(path="/v1/models/m", **ask)).json == {"id": "m"}
        assert (await it.ask(path="/v1/models/%6d?x=1", **ask)).json == {"id": "m"}
        for name in ("x", "", "m/", "org%2Fm", "%ff"):
            answer_ = await it.ask(path="/v1/models/" + name, **ask)
            assert (answer_.status, answer_.error["code"]) == (404, "model_not_found")
        assert (await it.ask(path="/v1/models/m", body=b"")).status == 405


# --- Anthropic's client --------------------------------------------------------------------------


async def test_anthropic_message() -> None:
    """A whole answer is parsed, its reused tokens are read, and the key goes no further."""
    async with FaultWorker([whole(MESSAGE)]) as worker, rig(target(worker.port)) as it, claude(it) as client:
        message = await client.messages.create(model="m", max_tokens=3, messages=[{"role": "user", "content": "hi"}])
        assert message.content[0].type == "text"
        assert message.content[0].text == " topecvar"
        assert it.brain.leases[0].closed[0][1] == USAGE
        assert worker.requests[0].header("x-api-key") is None
        assert worker.requests[0].header("anthropic-version") is not None


async def test_anthropic_stream() -> None:
    """Events come with their names, and the last usage counts."""
    async with FaultWorker([streamed(MESSAGE_EVENTS)]) as worker, rig(target(worker.port)) as it, claude(it) as client:
        async with client.messages.stream(
            model="m", max_tokens=3, messages=[{"role": "user", "content": "hi"}]
        ) as stream:
            text = "".join([piece async for piece in stream.text_stream])
        assert text == " used"
        assert it.brain.leases[0].closed[0][1] == USAGE


async def test_anthropic_stream_that_breaks() -> None:
    """The client raises what the last event says, after what had come."""
    pieces: list[str] = []
    async with (
        FaultWorker([broken(MESSAGE_EVENTS[:3])]) as worker,
        rig(target(worker.port)) as it,
        claude(it) as client,
    ):
        async with client.messages.stream(
            model="m", max_tokens=3, messages=[{"role": "user", "content": "hi"}]
        ) as stream:
            with pytest.raises(anthropic.APIStatusError) as raised:
                await collect(stream.text_stream, pieces)
        assert pieces == [" used"]
        assert isinstance(raised.value.body, dict)
        assert raised.value.body["error"]["type"] == "api_error"
        assert raised.value.body["error"]["code"] == "upstream_failed"
        assert it.brain.outcomes == ["reset"]


async def test_anthropic_errors_raise_their_own_class() -> None:
    """Missing model, bad body, no key, no worker: the classes that Anthropic's own errors raise."""
    keyring = Keyring([Key("a", digest_of(b"sk-a"))], secret=b"s")
    async with rig(keyring=keyring) as it:
        async with claude(it) as client:
            with pytest.raises(anthropic.NotFoundError, match="not_found_error"):
                await client.messages.create(model="x", max_tokens=3, messages=[{"role": "user", "content": "hi"}])
            with pytest.raises(anthropic.BadRequestError, match="invalid_request_error"):
                await client.messages.create(model="m", max_tokens=3, messages=[])
            with pytest.raises(anthropic.InternalServerError, match="overloaded_error"):
                await client.messages.create(model="m", max_tokens=3, messages=[{"role": "user", "content": "hi"}])
        async with claude(it, key="sk-wrong") as client:
            with pytest.raises(anthropic.AuthenticationError, match="authentication_error"):
                await client.messages.create(model="m", max_tokens=3, messages=[{"role": "user", "content": "hi"}])


async def test_anthropic_token_count() -> None:
    """Counting is asked of a worker."""
    said = {"input_tokens": 25, "context_management": {"original_input_tokens": 25}}
    async with FaultWorker([whole(said)]) as worker, rig(target(worker.port)) as it, claude(it) as client:
        counted = await client.messages.count_tokens(model="m", messages=[{"role": "user", "content": "hi"}])
        assert counted.input_tokens == 25
        assert worker.requests[0].head.startswith(b"POST /v1/messages/count_tokens ")


# --- OpenAI's client -----------------------------------------------------------------------------


async def test_openai_response() -> None:
    """A whole answer is parsed and its reused tokens are read."""
    async with FaultWorker([whole(RESPONSE)]) as worker, rig(target(worker.port)) as it, gpt(it) as client:
        response = await client.responses.create(model="m", input="hi")
        assert response.output_text == "irround32"
        assert it.brain.leases[0].closed[0][1] == USAGE


async def test_openai_response_stream() -> None:
    """Events come with their names and numbers; the usage in the last counts."""
    async with FaultWorker([streamed(RESPONSE_EVENTS)]) as worker, rig(target(worker.port)) as it, gpt(it) as client:
        stream = await client.responses.create(model="m", input="hi", stream=True)
        kinds = [event.type async for event in stream]
        assert kinds == ["response.created", "response.output_text.delta", "response.completed"]
        assert it.brain.leases[0].closed[0][1] == USAGE


async def test_openai_response_stream_that_breaks() -> None:
    """The client raises after what had come; the error's number continues the stream's."""
    async with FaultWorker([broken(RESPONSE_EVENTS[:2])]) as worker, rig(target(worker.port)) as it, gpt(it) as client:
        stream = await client.responses.create(model="m", input="hi", stream=True)
        kinds: list[str] = []
        with pytest.raises(openai.APIError, match="broke off"):
            await collect((event.type async for event in stream), kinds)
        assert kinds == ["response.created", "response.output_text.delta"]
        answer_ = await it.ask({"model": "m", "input": "hi", "stream": True}, path="/v1/responses")
        last = answer_.body.decode().strip().split("\n\n")[-1].splitlines()
        assert last[0] == "event: error"
        assert json.loads(last[1].removeprefix("data: "))["sequence_number"] == 2


async def test_openai_embeddings_and_models() -> None:
    """Vectors come back, models are listed and retrieved, unknown ones raise NotFoundError."""
    said = {
        "object": "list",
        "data": [{"object": "embedding", "index": 0, "embedding": [0.5, -1.0]}],
        "model": "m",
        "usage": {"prompt_tokens": 1, "total_tokens": 1},
    }
    async with FaultWorker([whole(said)]) as worker, rig(target(worker.port)) as it, gpt(it) as client:
        made = await client.embeddings.create(model="m", input="hi", encoding_format="float")
        assert made.data[0].embedding == [0.5, -1.0]
        assert [model async for model in client.models.list()] == []
        assert (await client.models.retrieve("m")).id == "m"
        with pytest.raises(openai.NotFoundError):
            await client.models.retrieve("org/x")


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses", "/v1/chat/completions"])
async def test_a_worker_s_refusal_is_passed_on_as_it_is(path: str) -> None:
    """4xx verbatim in one attempt, whatever its shape."""
    refusal = b'{"type":"error","error":{"type":"NotFoundError","message":"no"}}'
    async with FaultWorker([(answer(404, refusal),)]) as worker, rig(target(worker.port), target(worker.port)) as it:
        answer_ = await it.ask({"model": "m", **BODIES[path]}, path=path)
        assert (answer_.status, answer_.body) == (404, refusal)
        assert len(worker.requests) == 1


async def test_a_worker_that_cannot_be_reached_is_told_in_the_api_s_shape() -> None:
    """When all attempts failed Anthropic's clients get Anthropic's error."""
    async with FaultWorker([(Move.RESET,)]) as worker:
        upstream = UpstreamSettings(max_attempts=2)
        async with rig(target(worker.port), target(worker.port), upstream=upstream) as it, claude(it) as client:
            with pytest.raises(anthropic.InternalServerError, match="upstream_failed") as raised:
                await client.messages.create(model="m", max_tokens=3, messages=[{"role": "user", "content": "hi"}])
            assert raised.value.status_code == 502
