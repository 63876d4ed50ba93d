"""The OpenAI API of a running shim: shapes, exact bytes, usage, ranks."""

from __future__ import annotations

import json
import re

import httpx
import pytest
from shim_process import metric, wait_until
from tokenizers import Tokenizer

from engine_shim.api import CompletionRequest, decode
from engine_shim.model.tokenizer import read_card

WORDS = "the quick brown fox jumps over the lazy dog and runs far away from the old house on the hill "


def ask(client: httpx.Client, prompt: object = WORDS, **fields: object) -> dict:
    answer = client.post("/v1/completions", json={"prompt": prompt, "max_tokens": 8, **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()


def events(text: str) -> list[dict]:
    assert text.endswith("data: [DONE]\n\n")
    frames = text.removesuffix("data: [DONE]\n\n").split("\n\n")[:-1]
    assert all(frame.startswith("data: ") for frame in frames)
    return [json.loads(frame.removeprefix("data: ")) for frame in frames]


@pytest.mark.parametrize("stop", [None, "over"])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_streamed_equals_whole(client: httpx.Client, path: str, stop: str | None) -> None:
    """The same request streamed and not: same text, finish reason, token ids and counts."""
    asked: dict[str, object] = {"max_tokens": 24, "ignore_eos": True, "return_token_ids": True}
    asked |= {"prompt": WORDS} if path == "/v1/completions" else {"messages": [{"role": "user", "content": WORDS}]}
    if stop is not None:
        text = client.post(path, json=asked).json()["choices"][0]
        text = text.get("text") or text["message"]["content"]
        asked["stop"] = [text[30:36], "not in the text"]
    whole = client.post(path, json=asked | {"routed_dp_rank": 0}).json()
    streamed = client.post(
        path, json=asked | {"stream": True, "stream_options": {"include_usage": True}, "routed_dp_rank": 1}
    )
    chunks = events(streamed.text)
    choice = whole["choices"][0]
    deltas = [chunk["choices"][0] for chunk in chunks if chunk["choices"]]
    if path == "/v1/completions":
        assert "".join(delta["text"] for delta in deltas) == choice["text"]
        assert deltas[0]["prompt_token_ids"] == choice["prompt_token_ids"]
    else:
        assert deltas[0]["delta"] == {"role": "assistant", "content": ""}
        assert "".join(d["delta"].get("content", "") for d in deltas) == choice["message"]["content"]
        assert chunks[0]["prompt_token_ids"] == whole["prompt_token_ids"]
    assert [token for delta in deltas for token in delta.get("token_ids", ())] == choice["token_ids"]
    assert (deltas[-1]["finish_reason"], deltas[-1]["stop_reason"]) == (
        choice["finish_reason"],
        choice["stop_reason"],
    )
    assert {delta["finish_reason"] for delta in deltas[:-1]} <= {None}
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == len(choice["token_ids"])
    assert chunks[-1]["usage"]["total_tokens"] == whole["usage"]["total_tokens"]
    assert all(chunk["usage"] is None for chunk in chunks[:-1])


def test_stop_string_across_tokens(client: httpx.Client) -> None:
    """A stop string that begins in one word and ends in the next cuts the text before it."""
    whole = ask(client, max_tokens=12)["choices"][0]["text"]
    space = whole.index(" ", 20)
    stop = whole[space - 2 : space + 3]
    cut = ask(client, max_tokens=12, stop=stop, return_token_ids=True)
    choice = cut["choices"][0]
    assert choice["text"] == whole[: whole.index(stop)]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)
    tokenizer = read_card("needle").tokenizer
    assert stop in tokenizer.decode(choice["token_ids"])
    assert stop not in tokenizer.decode(choice["token_ids"][:-1])
    assert cut["usage"]["completion_tokens"] == len(choice["token_ids"])


def test_a_stop_string_ends_the_work(client: httpx.Client) -> None:
    """The engine knows nothing of stop strings; once one was found it computes no further."""
    whole = ask(client, max_tokens=8)["choices"][0]["text"]
    before = metric(client, "vllm:generation_tokens_total")
    ask(client, max_tokens=4000, ignore_eos=True, stop=whole[:10])
    wait_until(lambda: metric(client, "vllm:num_requests_running") == 0)
    assert metric(client, "vllm:generation_tokens_total") - before < 2000


def test_stop_token_ids(client: httpx.Client) -> None:
    """A stop token ends the answer, counts as generated, and is no part of the text."""
    ids = ask(client, max_tokens=6, return_token_ids=True)["choices"][0]["token_ids"]
    choice = ask(client, max_tokens=6, return_token_ids=True, stop_token_ids=[ids[3]])["choices"][0]
    assert choice["token_ids"] == ids[:4]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", ids[3])
    assert choice["text"] == read_card("needle").tokenizer.decode(ids[:3])


def test_stream_bytes(client: httpx.Client) -> None:
    """The server-sent events of a chat, byte for byte."""
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1, "stream": True}
    answer = client.post("/v1/chat/completions", json=body, headers={"x-request-id": "abc"})
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    created = re.search(r'"created":(\d+)', answer.text)[1]
    content = re.search(r'"content":"([^"]+)"', answer.text)[1]
    head = f'"id":"chatcmpl-abc","object":"chat.completion.chunk","created":{created},"model":"needle"'
    assert answer.text == (
        f'data: {{{head},"choices":[{{"index":0,"delta":{{"role":"assistant","content":""}},'
        '"logprobs":null,"finish_reason":null}]}\n\n'
        f'data: {{{head},"choices":[{{"index":0,"delta":{{"content":"{content}"}},'
        '"logprobs":null,"finish_reason":"length","stop_reason":null}]}\n\n'
        "data: [DONE]\n\n"
    )


def test_cached_tokens_on_the_second_call(client: httpx.Client) -> None:
    """The second call of a prompt finds all whole pages but the one with its last token."""
    first = ask(client, WORDS * 4, routed_dp_rank=0)["usage"]
    assert first["prompt_tokens_details"] == {"cached_tokens": 0}
    second = ask(client, WORDS * 4, routed_dp_rank=0)["usage"]
    prompt = first["prompt_tokens"]
    assert prompt > 64
    assert second["prompt_tokens_details"] == {"cached_tokens": (prompt - 1) // 16 * 16}


def test_cache_salt_divides_caches(client: httpx.Client) -> None:
    """Equal prompts under different salts share nothing."""
    for salt, cached in (("a", 0), ("b", 0), ("a", 16)):
        usage = ask(client, list(range(300, 320)), cache_salt=salt, routed_dp_rank=1)["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] == cached


def test_ranks_by_header_and_body_have_their_own_caches(client: httpx.Client) -> None:
    """A rank is named by header in any case or by body, which wins; what one rank cached another has not."""
    prompt = list(range(400, 450))

    def rank_and_cached(headers: dict[str, str], **body: object) -> tuple[str, int]:
        answer = client.post("/v1/completions", json={"prompt": prompt, "max_tokens": 1, **body}, headers=headers)
        details = answer.json()["usage"]["prompt_tokens_details"]
        return answer.headers["x-dp-rank"], details["cached_tokens"]

    assert rank_and_cached({"X-Data-Parallel-Rank": "1"}) == ("1", 0)
    assert rank_and_cached({"x-data-parallel-rank": "0"}, routed_dp_rank=1) == ("1", 48)
    assert rank_and_cached({}, routed_dp_rank=0) == ("0", 0)
    assert rank_and_cached({"x-data-parallel-rank": "0"}) == ("0", 48)


def test_unnamed_rank_rotates(client: httpx.Client) -> None:
    """Idle ranks take turns; a header that is no number counts as none."""
    seen = [
        client.post(
            "/v1/completions", json={"prompt": "a", "max_tokens": 1}, headers={"x-data-parallel-rank": "first"}
        ).headers["x-dp-rank"]
        for _ in range(4)
    ]
    assert sorted(seen) == ["0", "0", "1", "1"]


def test_batch_of_prompts(client: httpx.Client) -> None:
    """Several prompts are several choices, whole and streamed, as each alone answers."""
    prompts = ["the old house", "a fox", "one more time"]
    alone = [ask(client, prompt)["choices"][0]["text"] for prompt in prompts]
    together = ask(client, prompts)
    assert [choice["text"] for choice in together["choices"]] == alone
    assert together["usage"]["completion_tokens"] == 24
    streamed = client.post("/v1/completions", json={"prompt": prompts, "max_tokens": 8, "stream": True})
    texts = ["", "", ""]
    for chunk in events(streamed.text):
        for choice in chunk["choices"]:
            texts[choice["index"]] += choice["text"]
    assert texts == alone
    ids = [[300, 301, 302], [303, 304]]
    assert [choice["index"] for choice in ask(client, ids)["choices"]] == [0, 1]


def test_tokenize_agrees_with_what_is_run(client: httpx.Client) -> None:
    """/tokenize and /render give the ids a chat is run with; /detokenize and /tokenizer.json take them back to text."""
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "the old house"}]
    tokens = client.post("/tokenize", json={"messages": messages}).json()
    run = client.post(
        "/v1/chat/completions", json={"messages": messages, "max_tokens": 1, "return_token_ids": True}
    ).json()
    assert tokens["tokens"] == run["prompt_token_ids"]
    assert tokens["count"] == run["usage"]["prompt_tokens"] == len(tokens["tokens"])
    rendered = client.post("/v1/chat/completions/render", json={"messages": messages}).json()
    assert rendered["token_ids"] == tokens["tokens"]
    parts = [{**message, "content": [{"type": "text", "text": message["content"]}]} for message in messages]
    assert client.post("/tokenize", json={"messages": parts}).json() == tokens
    text = client.post("/detokenize", json={"tokens": tokens["tokens"]}).json()["prompt"]
    assert "be brief" in text
    assert "the old house" in text
    fetched = client.get("/tokenizer.json").text
    assert Tokenizer.from_str(fetched).encode(text, add_special_tokens=False).ids == tokens["tokens"]
    info = client.get("/tokenizer_info").json()
    assert "im_start" in info["chat_template"]
    assert info["eos_token"] == "<|im_end|>"


def test_operational_endpoints(client: httpx.Client) -> None:
    """Models, health, ping and version answer as vLLM's do."""
    (model,) = client.get("/v1/models").json()["data"]
    assert (model["id"], model["object"]) == ("needle", "model")
    assert model["max_model_len"] == client.post("/tokenize", json={"prompt": "a"}).json()["max_model_len"]
    assert (client.get("/health").status_code, client.get("/health").content) == (200, b"")
    assert client.get("/ping").status_code == 200
    assert client.get("/version").json()["version"]


def test_max_tokens_defaults_and_limits(client: httpx.Client) -> None:
    """Completions default to 16 tokens; chat's newer field wins over max_tokens."""
    assert client.post("/v1/completions", json={"prompt": "a"}).json()["usage"]["completion_tokens"] == 16
    chat = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 9, "max_completion_tokens": 3}
    assert client.post("/v1/chat/completions", json=chat).json()["usage"]["completion_tokens"] == 3


def test_a_chat_without_limits_ends_by_itself(client: httpx.Client) -> None:
    """The sim runner stops after 64 to 192 tokens and an end token, which is not text; ignore_eos has it go on."""
    chat = {"messages": [{"role": "user", "content": WORDS}], "return_token_ids": True}
    answer = client.post("/v1/chat/completions", json=chat).json()
    (choice,) = answer["choices"]
    assert choice["finish_reason"] == "stop"
    assert 65 <= answer["usage"]["completion_tokens"] <= 193
    assert choice["token_ids"][-1] in read_card("needle").eos_token_ids
    assert "<|" not in choice["message"]["content"]
    longer = client.post("/v1/chat/completions", json=chat | {"ignore_eos": True, "max_tokens": 200}).json()
    assert (longer["choices"][0]["finish_reason"], longer["usage"]["completion_tokens"]) == ("length", 200)


@pytest.mark.parametrize(("asked", "used"), [(None, 1.0), (0, 0.0), (1e-320, 0.0), (0.5, 0.5)])
def test_temperature(asked: float | None, used: float) -> None:
    """OpenAI's default is 1; what is too small to divide by is greedy."""
    body = json.dumps({"prompt": "a", "temperature": asked}).encode()
    assert decode(body, CompletionRequest).sampling(max_tokens=1, vocab_tokens=10).temperature == used
