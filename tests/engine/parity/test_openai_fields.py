"""What clients ask of an answer, over HTTP: structure, forced tools, several choices, logprobs, penalties, biases."""

from __future__ import annotations

import asyncio
import json
import math
import re
import time
from collections.abc import AsyncIterator, Sequence

import httpx
import jsonschema
import openai
import pytest
import torch
from byte_tokenizer import EOS, byte_tokenizer

from engine_shim.chat import ChatTemplate
from engine_shim.engine import Engine
from engine_shim.grammar import GrammarCompiler, _Follower
from engine_shim.model.config import from_hugging_face
from engine_shim.model.decoder import Decoder
from engine_shim.model.loading import layout_for
from engine_shim.model.weights import assemble
from engine_shim.runner.torch_runner import TorchRunner
from engine_shim.schedule.scheduler import Scheduler
from engine_shim.server import ServedModel, create_app
from engine_shim.speculative.ngram import NgramDrafter
from engine_shim.types import ConstraintError

VOCAB, WIDTH, HEADS, DIM, MLP = 300, 32, 2, 16, 48
TEMPLATE = (
    "{% for m in messages %}{{ m.content }}\n{% endfor %}{% for t in tools or [] %}{{ t.function.name }}{% endfor %}"
)
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"$ref": "#/$defs/city"}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
            "required": ["city", "days"],
            "additionalProperties": False,
            "$defs": {"city": {"enum": ["Bern", 'S"\\ {}[],":']}},
        },
    },
}
PING = {"type": "function", "function": {"name": 'pi"ng', "parameters": None}}
SCHEMA = {"type": "array", "items": {"enum": ["x", 1, None]}, "minItems": 1, "maxItems": 3}


def decoder() -> Decoder:
    """A Qwen3 of two layers and random weights."""
    config = from_hugging_face(
        {
            "model_type": "qwen3",
            "vocab_size": VOCAB,
            "hidden_size": WIDTH,
            "intermediate_size": MLP,
            "num_hidden_layers": 2,
            "num_attention_heads": HEADS,
            "num_key_value_heads": 1,
            "head_dim": DIM,
            "max_position_embeddings": 1024,
            "tie_word_embeddings": True,
            "eos_token_id": EOS,
        }
    )
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens": (VOCAB, WIDTH), "model.norm": (WIDTH,)}
    for layer in ("model.layers.0", "model.layers.1"):
        shapes |= {f"{layer}.self_attn.{name}_proj": (size, WIDTH) for name, size in (("q", 32), ("k", 16), ("v", 16))}
        shapes |= {f"{layer}.self_attn.o_proj": (WIDTH, 32), f"{layer}.mlp.down_proj": (WIDTH, MLP)}
        shapes |= {f"{layer}.mlp.{name}_proj": (MLP, WIDTH) for name in ("gate", "up")}
        shapes |= {f"{layer}.self_attn.{name}_norm": (DIM,) for name in ("q", "k")}
        shapes |= {f"{layer}.{name}_layernorm": (WIDTH,) for name in ("input", "post_attention")}
    generator = torch.Generator().manual_seed(1)
    tensors = {f"{name}.weight": torch.randn(*shape, generator=generator) * 0.3 for name, shape in shapes.items()}
    return Decoder(config, assemble(config, tensors, device=torch.device("cpu"), dtype=torch.float64))


@pytest.fixture
async def client() -> AsyncIterator[httpx.AsyncClient]:
    """A shim with a grammar compiler, and drafts, in this process."""
    tokenizer, model = byte_tokenizer(), decoder()
    layout = layout_for(model.config, page_tokens=8, pool_tokens=4096)
    scheduler = Scheduler(layout, max_context_tokens=1024, eos_token_ids=frozenset({EOS}), draft_tokens=3)
    engine = Engine(
        0,
        scheduler,
        runner=TorchRunner(model, layout, drafter=NgramDrafter()),
        layout=layout,
        publisher=None,
        clock=time.perf_counter,
    )
    served = ServedModel(
        "tiny",
        tokenizer,
        ChatTemplate(TEMPLATE, special_tokens={}),
        {},
        VOCAB,
        1024,
        "0",
        grammars=GrammarCompiler(tokenizer, vocab_tokens=VOCAB, eos_token_ids=[EOS]),
    )
    transport = httpx.ASGITransport(create_app(served, [engine], max_body_bytes=100_000))
    engine.start(asyncio.get_running_loop())
    try:
        async with httpx.AsyncClient(transport=transport, base_url="http://shim", timeout=60) as client:
            yield client
    finally:
        engine.stop()
        await asyncio.to_thread(engine.join)
        assert engine.failure is None


async def ask(client: httpx.AsyncClient, **fields: object) -> dict:
    answer = await client.post("/v1/completions", json={"prompt": "ab ab ab", "max_tokens": 20, "seed": 1, **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()


async def chat(client: httpx.AsyncClient, **fields: object) -> dict:
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 600, "seed": 3, **fields}
    answer = await client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"guided_regex": "[0-9]{3}-[xyz]"}, "[0-9]{3}-[xyz]"),
        ({"regex": "(no|yes)!"}, "(no|yes)!"),
        ({"structured_outputs": {"choice": ["one", "two"]}}, "one|two"),
        ({"guided_choice": ["a|b"]}, r"a\|b"),
        ({"ebnf": 'root ::= "k" [0-9]'}, "k[0-9]"),
        ({"guided_grammar": 'start: "p" "q"?'}, "pq?"),
    ],
    ids=lambda value: str(value)[:30],
)
async def test_every_spelling_of_a_structure(client: httpx.AsyncClient, fields: dict, pattern: str) -> None:
    """The fields of vLLM, old and new, and of SGLang; the end token is no part of the text."""
    for temperature in (0, 1):
        choice = (await ask(client, temperature=temperature, **fields))["choices"][0]
        assert choice["finish_reason"] == "stop"
        assert re.fullmatch(pattern, choice["text"])


async def test_json_formats(client: httpx.AsyncClient) -> None:
    """``response_format`` and the two ways of vLLM to name a schema."""
    described = {"type": "json_schema", "json_schema": {"name": "list", "schema": SCHEMA}}
    for fields in ({"response_format": described}, {"structured_outputs": {"json": SCHEMA}}):
        content = (await chat(client, temperature=1, **fields))["choices"][0]["message"]["content"]
        jsonschema.validate(json.loads(content), SCHEMA)
    text = (await ask(client, max_tokens=300, guided_json=json.dumps(SCHEMA)))["choices"][0]["text"]
    jsonschema.validate(json.loads(text), SCHEMA)
    begun = (await ask(client, response_format={"type": "json_object"}))["choices"][0]["text"]
    assert begun.lstrip().startswith("{")


@pytest.mark.parametrize(
    ("fields", "param", "reason"),
    [
        ({"guided_regex": "(a"}, "guided_regex", "unclosed group"),
        ({"guided_json": {"type": "strin"}}, "guided_json", "strin"),
        ({"guided_json": 5}, "guided_json", "object"),
        ({"guided_json": {"$ref": "#"}}, "guided_json", "no answer can fit"),
        ({"ebnf": "root ::= root"}, "ebnf", "no answer can fit"),
        ({"guided_choice": []}, "guided_choice", "list of texts"),
        ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs", "one of"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs", "one of"),
        ({"regex": "a", "ebnf": "b"}, "ebnf", "exclude"),
        ({"response_format": {"type": "yaml"}}, "response_format", "json_object"),
        ({"response_format": {"type": "json_schema"}}, "response_format", "schema"),
        ({"regex": "a", "ignore_eos": True}, "ignore_eos", "how long"),
        ({"logit_bias": {"300": 1}}, "logit_bias", "no token id"),
        ({"logit_bias": {"x": 1}}, "logit_bias", "no token id"),
        ({"presence_penalty": 3}, "presence_penalty", "[-2, 2]"),
        ({"repetition_penalty": 0}, "repetition_penalty", "above 0"),
        ({"min_p": 1.5}, "min_p", "[0, 1]"),
        ({"top_k": -2}, "top_k", "[-1"),
        ({"min_tokens": -1}, "min_tokens", "[0, "),
        ({"n": 129}, "n", "[1, 128]"),
        ({"logprobs": 21}, "logprobs", "[0, 20]"),
        ({"stop_token_ids": [300]}, "stop_token_ids", "token ids"),
    ],
    ids=lambda value: str(value)[:40],
)
async def test_what_is_wrong_is_told(client: httpx.AsyncClient, fields: dict, param: str, reason: str) -> None:
    """400, with the field and the reason; a grammar's is the library's."""
    answer = await client.post("/v1/completions", json={"prompt": "a", "max_tokens": 20, **fields})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param)
    assert reason in error["message"]


@pytest.mark.parametrize("before", [0, 3])
async def test_a_grammar_that_fails_on_the_way_is_told_as_such(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch, before: int
) -> None:
    """Not as a want of cache pages, which the client would mend by a shorter prompt."""
    masks = _Follower.masks

    def failing(self: _Follower, output: Sequence[int], drafts: Sequence[int]) -> list[bytes]:
        if len(output) >= before:
            raise ConstraintError("ParserTooComplex")
        return masks(self, output, drafts)

    monkeypatch.setattr(_Follower, "masks", failing)
    answer = await client.post("/v1/completions", json={"prompt": "a", "max_tokens": 20, "regex": "[a-z]{9}"})
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (400, "invalid_grammar")
    assert "pages" not in error["message"]


# --- tools ------------------------------------------------------------------------------------------------


def check_call(call: dict) -> None:
    arguments = json.loads(call["function"]["arguments"])
    if call["function"]["name"] == "weather":
        jsonschema.validate(arguments, WEATHER["function"]["parameters"])
    else:
        assert (call["function"]["name"], arguments) == ('pi"ng', {})


async def test_a_named_tool(client: httpx.AsyncClient) -> None:
    """The answer is one call of this function with valid arguments."""
    choice_of = {"type": "function", "function": {"name": "weather"}}
    choice = (await chat(client, tools=[PING, WEATHER], tool_choice=choice_of))["choices"][0]
    (call,) = choice["message"]["tool_calls"]
    assert (choice["finish_reason"], choice["message"]["content"], call["type"]) == ("stop", None, "function")
    assert call["function"]["name"] == "weather"
    check_call(call)


async def test_required_tools(client: httpx.AsyncClient) -> None:
    """One call or more, or just one where they may not be parallel; over some seeds both functions come."""
    names = set()
    for seed in range(6):
        asked = {"tools": [PING, WEATHER], "tool_choice": "required", "temperature": 1, "seed": seed}
        choice = (await chat(client, parallel_tool_calls=False, **asked))["choices"][0]
        (call,) = choice["message"]["tool_calls"]
        assert choice["finish_reason"] == "tool_calls"
        check_call(call)
        names.add(call["function"]["name"])
    assert names == {"weather", 'pi"ng'}


async def test_streamed_calls_are_the_whole_ones(client: httpx.AsyncClient) -> None:
    """OpenAI's own client puts the deltas together; they make what is told without streaming."""
    asked = {"tools": [WEATHER, PING], "tool_choice": "required", "temperature": 1, "seed": 8, "max_tokens": 600}
    whole = (await chat(client, **asked))["choices"][0]["message"]["tool_calls"]
    sdk = openai.AsyncOpenAI(base_url="http://shim/v1", api_key="x", http_client=client)
    calls: dict[int, dict[str, str]] = {}
    stream = await sdk.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "hi"}], stream=True, **asked
    )
    finish = None
    async for chunk in stream:
        finish = chunk.choices[0].finish_reason or finish
        for delta in chunk.choices[0].delta.tool_calls or ():
            call = calls.setdefault(delta.index, {"name": "", "arguments": ""})
            call["name"] += delta.function.name or ""
            call["arguments"] += delta.function.arguments or ""
    assert list(calls.values()) == [call["function"] for call in whole]
    assert finish == "tool_calls"


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"tool_choice": "required"}, "needs tools"),
        ({"tools": [PING], "tool_choice": {"type": "function", "function": {"name": "x"}}}, "not among"),
        ({"tools": [PING], "tool_choice": "any"}, "must be"),
        ({"tools": [WEATHER], "tool_choice": "required", "regex": "a"}, "no room"),
    ],
)
async def test_tool_choices_that_cannot_be(client: httpx.AsyncClient, fields: dict, reason: str) -> None:
    """400 with ``tool_choice`` named."""
    body = {"messages": [{"role": "user", "content": "hi"}], **fields}
    answer = await client.post("/v1/chat/completions", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "tool_choice")
    assert reason in answer.json()["error"]["message"]


# --- choices, logprobs, biases ----------------------------------------------------------------------------


async def test_several_choices(client: httpx.AsyncClient) -> None:
    """Each by its own seed, counted up; the prompts are counted once."""
    both = await ask(client, prompt=["ab", "cd"], n=3, temperature=1, seed=5)
    assert [choice["index"] for choice in both["choices"]] == list(range(6))
    for index, choice in enumerate(both["choices"]):
        alone = await ask(client, prompt=["ab", "cd"][index // 3], temperature=1, seed=5 + index % 3)
        assert alone["choices"][0]["text"] == choice["text"]
    assert (both["usage"]["prompt_tokens"], both["usage"]["completion_tokens"] > 60) == (4, True)
    told = await chat(client, n=2, max_tokens=5, temperature=1)
    assert [choice["index"] for choice in told["choices"]] == [0, 1]


async def test_logprobs(client: httpx.AsyncClient) -> None:
    """Each token's, the likeliest first; greedily the likeliest is the token itself. Probabilities are at most one."""
    logprobs = (await ask(client, temperature=0, logprobs=2))["choices"][0]["logprobs"]
    assert len(logprobs["tokens"]) == len(logprobs["token_logprobs"]) == 20
    for token, own, top in zip(logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True):
        assert top[token] == own == max(top.values())
        assert sum(map(math.exp, top.values())) <= 1
    offsets = [0]
    for token in logprobs["tokens"]:
        offsets.append(offsets[-1] + len(token))
    assert logprobs["text_offset"] == offsets[:-1]
    message = (await chat(client, max_tokens=4, logprobs=True, top_logprobs=3, temperature=1))["choices"][0]
    content = message["logprobs"]["content"]
    assert [len(entry["top_logprobs"]) for entry in content] == [3] * 4
    assert bytes(content[0]["bytes"]).decode() == content[0]["token"]
    held = (await ask(client, regex="ab", logprobs=1))["choices"][0]["logprobs"]
    assert held["token_logprobs"][-1] == 0.0, "where a grammar leaves one token it is certain"


async def test_biases_and_penalties(client: httpx.AsyncClient) -> None:
    """A bias forces or forbids a token; penalties drive a greedy answer out of its circle; an end can be put off."""
    forced = await ask(client, temperature=0, logit_bias={"70": 30}, return_token_ids=True)
    assert set(forced["choices"][0]["token_ids"]) == {70}
    apart = await ask(
        client, temperature=0, logit_bias={"70": 30}, frequency_penalty=2, presence_penalty=2, repetition_penalty=2.0,
        return_token_ids=True,
    )  # fmt: skip
    assert len(set(apart["choices"][0]["token_ids"])) > 1
    ends = await ask(client, logit_bias={str(EOS): 100}, min_tokens=6, return_token_ids=True)
    assert len(ends["choices"][0]["token_ids"]) == 7
    likeliest = (await ask(client, temperature=0, return_token_ids=True))["choices"][0]["token_ids"]
    for cut in ({"top_k": 1}, {"min_p": 1.0}):
        assert (await ask(client, temperature=1.0, return_token_ids=True, **cut))["choices"][0][
            "token_ids"
        ] == likeliest
