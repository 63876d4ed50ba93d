"""What a running shim refuses, and how it says so: OpenAI's shape, the status, the field's name."""

from __future__ import annotations

import httpx
import pytest

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
