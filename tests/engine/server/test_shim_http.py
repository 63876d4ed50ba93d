"""The OpenAI API of a running shim: shapes, exact bytes, usage, ranks, errors."""

from __future__ import annotations

import json
import re

import httpx
import pytest
from shim_process import metric, wait_until
from tokenizers import Tokenizer

from engine_shim.api import CompletionRequest, decode
from engine_shim.metrics import request_token_bounds
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
    wait_until(lambda: metric(client, "vllm:num_requests_running") == 0, seconds=0.5)
    assert metric(client, "vllm:generation_tokens_total") - before < 200


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


BAD = [
    ({"prompt": "a", "max_tokens": "x"}, 400, "max_tokens"),
    ({"prompt": "a", "max_tokens": 0}, 400, "max_tokens"),
    ({"prompt": "a", "n": 0}, 400, "n"),
    ({"prompt": "a", "temperature": -1}, 400, "temperature"),
    ({"prompt": "a", "top_p": 0}, 400, "top_p"),
    ({"prompt": "a", "stop": ["b", ""]}, 400, "stop"),
    ({"prompt": "a", "echo": True}, 400, "echo"),
    ({"prompt": "a", "routed_dp_rank": 2}, 400, "routed_dp_rank"),
    ({"prompt": "a", "routed_dp_rank": "one"}, 400, "routed_dp_rank"),
    ({"prompt": "a", "n": "2"}, 400, "n"),
    ({"prompt": "a", "model": "gpt-9"}, 404, "model"),
    ({"prompt": ""}, 400, "prompt"),
    ({"prompt": []}, 400, "prompt"),
    ({"prompt": [1, "a"]}, 400, "prompt"),
    ({"prompt": [[1], [True]]}, 400, "prompt"),
    ({"prompt": [10**9]}, 400, "prompt"),
    ({"prompt": [-1]}, 400, "prompt"),
    ({}, 400, "prompt"),
    ({"prompt": "a", "max_tokens": 10**7}, 400, "prompt"),
]


@pytest.mark.parametrize(("body", "status", "param"), BAD, ids=lambda value: str(value)[:40])
def test_bad_completions_name_the_field(client: httpx.Client, body: dict, status: int, param: str) -> None:
    """What is wrong with a request is told in OpenAI's shape, with the field's name."""
    answer = client.post("/v1/completions", json=body)
    assert answer.status_code == status
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["type"], error["param"]) == ("invalid_request_error", param)


#: Parameter, values that change nothing, values that ask for what the shim cannot do.
UNSUPPORTED = [
    ("best_of", [None, 1], [2]),
    ("echo", [None, False], [True]),
    ("frequency_penalty", [None, 0, 0.0], [0.5, -2]),
    ("logit_bias", [None, {}], [{"5": 100}]),
    ("logprobs", [None, False, 0], [True, 5]),
    ("min_p", [None, 0.0], [0.1]),
    ("presence_penalty", [None, 0], [1]),
    ("prompt_logprobs", [None, 0], [1]),
    ("repetition_penalty", [None, 1, 1.0], [1.2]),
    (
        "response_format",
        [None, {"type": "text"}],
        [{"type": "json_object"}, {"type": "json_schema", "json_schema": {"name": "a", "schema": {}}}],
    ),
    ("top_k", [None, -1, 0], [40]),
    ("guided_regex", [None], ["a+"]),
    ("structured_outputs", [None], [{"regex": "a+"}]),
    ("min_tokens", [None, 0], [3]),
    ("suffix", [None, ""], ["b"]),
    ("prompt_embeds", [None], ["AAAA"]),
    ("bad_words", [None, []], [["a"]]),
    ("allowed_token_ids", [None], [[5]]),
    ("truncate_prompt_tokens", [None], [3]),
    ("include_stop_str_in_output", [None, False], [True]),
    ("skip_special_tokens", [None, True], [False]),
    ("use_beam_search", [None, False], [True]),
    ("stop_regex", [None], ["a+"]),
    ("json_schema", [None], ["{}"]),
    ("structural_tag", [None], [{"type": "structural_tag"}]),
    ("functions", [None, []], [[{"name": "f"}]]),
    ("function_call", [None, "none"], [{"name": "f"}]),
    ("continue_final_message", [None, False], [True]),
    ("an_unknown_one", [None, 1, {"a": 2}], []),
]
#: Parameters that one of the two APIs has; the other ignores them.
ONLY_TEXT = {"echo", "suffix", "prompt_embeds"}
ONLY_CHAT = {"functions", "function_call", "continue_final_message"}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("name", "neutral", "other"), UNSUPPORTED, ids=str)
def test_what_cannot_be_honoured_is_refused_by_name(
    client: httpx.Client, name: str, neutral: list[object], other: list[object], stream: bool
) -> None:
    """A parameter that would change the answer is 400 with its name; at the value of no effect it is served."""
    chat = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1, "stream": stream}
    text = {"prompt": "a", "max_tokens": 1, "stream": stream}
    paths = [("/v1/completions", text, ONLY_CHAT), ("/v1/chat/completions", chat, ONLY_TEXT)]
    for path, body in [(path, body) for path, body, others in paths if name not in others]:
        for value in neutral:
            assert client.post(path, json=body | {name: value}).status_code == 200, value
        for value in other:
            answer = client.post(path, json=body | {name: value})
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, name), value


@pytest.mark.parametrize(
    ("query", "param"),
    [("rank=9", "rank"), ("dp_rank=0&rank=1", "rank"), ("dp_rank=2", "dp_rank"), ("dp_rank=-1", "dp_rank")],
)
def test_a_snapshot_of_no_rank_is_refused(client: httpx.Client, query: str, param: str) -> None:
    """A rank that is not here, or a misspelt parameter, never gets the snapshot of another rank."""
    answer = client.get(f"/kv_snapshot?{query}")
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert param in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    "messages",
    [[], [{"content": "a"}], [{"role": "user", "content": 5}], [{"role": "user", "content": [{"type": "image"}]}], "a"],
)
def test_bad_messages(client: httpx.Client, messages: object) -> None:
    """Messages that cannot be rendered are refused, also where the stream was asked for."""
    answer = client.post("/v1/chat/completions", json={"messages": messages, "stream": True})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "messages")


def test_errors_of_transport(client: httpx.Client) -> None:
    """Broken JSON is 400, an unknown path 404, a wrong method 405, a rank out of range 400, a large body 413."""
    deep = b'{"prompt": "a", "unknown": ' + b"[" * 5_000 + b"]" * 5_000 + b"}"
    for body in (b'{"prompt": ', deep):
        broken = client.post("/v1/completions", content=body)
        assert (broken.status_code, broken.json()["error"]["code"]) == (400, "invalid_json")
    assert client.get("/nope").json()["error"]["code"] == "unknown_url"
    wrong = client.get("/v1/completions")
    assert (wrong.status_code, wrong.json()["error"]["code"]) == (405, "method_not_allowed")
    outside = client.post("/v1/completions", json={"prompt": "a"}, headers={"x-data-parallel-rank": "-1"})
    assert (outside.status_code, outside.json()["error"]["message"]) == (
        400,
        "data_parallel_rank -1 is out of range [0, 2).",
    )
    assert client.get("/kv_snapshot?dp_rank=7").status_code == 400


@pytest.mark.parametrize("announced", [True, False])
def test_body_over_the_limit(client: httpx.Client, announced: bool) -> None:
    """A body over --max-body-bytes is 413, whether its length is announced or it comes in chunks."""
    content = b" " * 100_001
    answer = client.post("/v1/completions", content=content if announced else iter([content[:60_000]] * 2))
    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "request_body_too_large")


def test_metrics_under_vllm_names(client: httpx.Client) -> None:
    """Counters move by what a request did, per rank, under vLLM's names and labels."""
    names = {
        "vllm:prompt_tokens_total": 40,
        "vllm:prefix_cache_queries_total": 40,
        "vllm:prefix_cache_hits_total": 0,
        "vllm:generation_tokens_total": 5,
        "vllm:time_to_first_token_seconds_count": 1,
        "vllm:inter_token_latency_seconds_count": 4,
        "vllm:e2e_request_latency_seconds_count": 1,
        "vllm:request_queue_time_seconds_count": 1,
        "vllm:request_prefill_time_seconds_count": 1,
        "vllm:request_decode_time_seconds_count": 1,
        "vllm:request_inference_time_seconds_count": 1,
        "vllm:request_prompt_tokens_sum": 40,
        "vllm:request_prompt_tokens_count": 1,
        "vllm:request_prefill_kv_computed_tokens_sum": 40,
        "vllm:request_generation_tokens_sum": 5,
        "vllm:request_generation_tokens_count": 1,
        "vllm:request_max_num_generation_tokens_sum": 5,
        "vllm:request_max_num_generation_tokens_count": 1,
        "vllm:request_params_max_tokens_sum": 5,
        "vllm:request_params_max_tokens_count": 1,
        "vllm:request_params_n_sum": 1,
        "vllm:request_params_n_count": 1,
        # One step for the prompt, which makes the first token, and one for each of the other four.
        "vllm:iteration_tokens_total_sum": 44,
        "vllm:iteration_tokens_total_count": 5,
    }

    def read() -> dict[str, float]:
        return {name: metric(client, name, engine="1", model_name="needle") for name in names}

    def lengths() -> float:
        return metric(client, "vllm:request_success_total", engine="1", finished_reason="length")

    before, ended = read(), lengths()
    ask(client, list(range(500, 540)), max_tokens=5, routed_dp_rank=1)
    after = read()
    assert {name: after[name] - before[name] for name in names} == names
    assert lengths() - ended == 1
    assert metric(client, "vllm:cache_config_info", engine="0", block_size="16") == 1


def test_metrics_tell_cached_prompt_tokens_apart(client: httpx.Client) -> None:
    """A prompt of 40 that is sent again is computed but for its two whole pages; sources add up to all tokens."""

    def read() -> list[float]:
        sources = [
            metric(client, "vllm:prompt_tokens_by_source_total", engine="0", source=source)
            for source in ("local_compute", "local_cache_hit")
        ]
        return [*sources, metric(client, "vllm:request_prefill_kv_computed_tokens_sum", engine="0")]

    before = read()
    for _ in range(2):
        ask(client, list(range(500, 540)), max_tokens=1, routed_dp_rank=0)
    moved = [after - early for after, early in zip(read(), before, strict=True)]
    assert moved == [40 + 8, 32, 40 + 8]


@pytest.mark.parametrize(
    ("context_tokens", "bounds"),
    [(1, (1,)), (100, (1, 2, 5, 10, 20, 50, 100)), (4999, (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000))],
)
def test_token_buckets_reach_to_the_context(context_tokens: int, bounds: tuple[int, ...]) -> None:
    """vLLM's 1-2-5 series, as its documentation shows it for 100."""
    assert request_token_bounds(context_tokens) == bounds
