"""Bodies for two ranks: the fields of both contracts, and nothing else changed."""

from __future__ import annotations

import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.wire import handover
from router.wire.handover import Bootstrap, alone_body, bootstrap_body, decode_body, handed_over, prefill_body
from router.wire.openai import Endpoint, InferenceRequest, parse_request, with_fields

CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


def request(endpoint: Endpoint = Endpoint.CHAT, **fields: object) -> InferenceRequest:
    base = {Endpoint.CHAT: CHAT, Endpoint.COMPLETIONS: {"model": "m", "prompt": "hi"}}
    base |= {Endpoint.RESPONSES: {"model": "m", "input": "hi"}, Endpoint.MESSAGES: {**CHAT, "max_tokens": 9}}
    base |= {Endpoint.EMBEDDINGS: {"model": "m", "input": "hi"}, Endpoint.TOKENIZE: {"model": "m", "prompt": "hi"}}
    return parse_request(endpoint, json.dumps(base[endpoint] | fields).encode())


MEETING = Bootstrap("10.0.0.1", 8998, [42], 3)


def test_ranks_of_both_legs() -> None:
    """Each leg names its own rank, and the decode leg the prefill rank too; workers with one rank are told none."""
    asked = request()
    prefill = json.loads(bootstrap_body(asked, MEETING, rank=3, decodes=False))
    decode = json.loads(bootstrap_body(asked, MEETING, rank=1, decodes=True))
    both = CHAT | {"bootstrap_host": "10.0.0.1", "bootstrap_port": 8998, "bootstrap_room": 42}
    assert prefill == both | {"routed_dp_rank": 3}
    assert decode == both | {"routed_dp_rank": 1, "disagg_prefill_dp_rank": 3}
    alone = Bootstrap("h", None, [42], None)
    assert json.loads(bootstrap_body(asked, alone, rank=None, decodes=True)) == CHAT | {
        "bootstrap_host": "h",
        "bootstrap_port": None,
        "bootstrap_room": 42,
    }


def test_a_batch_has_a_room_for_each_prompt() -> None:
    """Arrays, as SGLang's router sends them."""
    asked = request(Endpoint.COMPLETIONS, prompt=["a", "b"])
    assert handover.room_count(asked) == 2
    body = json.loads(bootstrap_body(asked, Bootstrap("h", 1, [5, 7], 1), rank=1, decodes=True))
    assert body["bootstrap_room"] == [5, 7]
    assert body["bootstrap_host"] == ["h", "h"]
    assert body["bootstrap_port"] == [1, 1]


@pytest.mark.parametrize(("prompt", "rooms"), [("a", 1), (["a", "b", "c"], 3), ([1, 2, 3], 1), ([[1, 2], [3]], 2)])
def test_rooms_of_prompts(prompt: object, rooms: int) -> None:
    """Token ids are one prompt, lists of them several. Several answers to each share one number, which counts up."""
    assert handover.room_count(request(Endpoint.COMPLETIONS, prompt=prompt)) == rooms
    assert handover.room_count(request(Endpoint.COMPLETIONS, prompt=prompt, n=2)) == 1


@pytest.mark.parametrize(
    ("asked", "bootstrap", "params"),
    [
        (request(), True, True),
        (request(n=1), True, True),
        (request(n=2), True, False),
        (request(best_of=3), True, False),
        (request(Endpoint.COMPLETIONS), True, True),
        (request(Endpoint.COMPLETIONS, prompt=["a", "b"]), True, False),
        (request(Endpoint.RESPONSES), True, True),
        (request(Endpoint.MESSAGES), False, True),
        (request(Endpoint.EMBEDDINGS), False, False),
        (request(Endpoint.TOKENIZE), False, False),
    ],
)
def test_what_can_be_split(asked: InferenceRequest, bootstrap: bool, params: bool) -> None:
    """vLLM hands over one prompt with one answer; SGLang's Anthropic endpoint knows no rooms; some make no answer."""
    assert (handover.suits_bootstrap(asked), handover.suits_params(asked)) == (bootstrap, params)


@pytest.mark.parametrize(
    ("endpoint", "given", "expected"),
    [
        (Endpoint.CHAT, {}, {"max_tokens": 1}),
        (Endpoint.CHAT, {"max_completion_tokens": 9}, {"max_completion_tokens": 1}),
        (Endpoint.CHAT, {"max_completion_tokens": 9, "max_tokens": 7}, {"max_completion_tokens": 1, "max_tokens": 1}),
        (Endpoint.RESPONSES, {}, {"max_output_tokens": 1}),
        (Endpoint.MESSAGES, {}, {"max_tokens": 1}),
    ],
)
def test_prefill_is_asked_for_one_token(endpoint: Endpoint, given: dict[str, int], expected: dict[str, int]) -> None:
    """By whatever name the endpoint or the client has for it."""
    body = json.loads(prefill_body(request(endpoint, **given), rank=None))
    names = ("max_tokens", "max_completion_tokens", "max_output_tokens")
    assert {name: body[name] for name in names if name in body} == expected
    assert body["stream"] is False


def test_what_was_handed_over_goes_on_verbatim() -> None:
    """Byte for byte, numbers and spaces included."""
    params = b'{"remote_block_ids" : [[1,2]], "big": 123456789012345678901234567890, "x": 1.50}'
    answer = b'{"id": "1", "kv_transfer_params": ' + params + b', "choices": []}'
    body = decode_body(request(), handed_over(answer), rank=None)
    assert b'"kv_transfer_params":' + params in body


EVIL = {
    "bootstrap_host": "evil",
    "bootstrap_port": 1,
    "bootstrap_room": 7,
    "bootstrap_pair_key": "k",
    "routed_dp_rank": 9,
    "data_parallel_rank": 9,
    "disagg_prefill_dp_rank": 9,
    "kv_transfer_params": {"remote_host": "evil"},
}


@pytest.mark.parametrize("endpoint", [Endpoint.CHAT, Endpoint.MESSAGES, Endpoint.EMBEDDINGS, Endpoint.TOKENIZE])
def test_no_client_names_a_room_or_a_rank(endpoint: Endpoint) -> None:
    """Whoever serves it, in one leg or in two: what it says of them is null, and what the router says stands."""
    asked, plain = request(endpoint, **EVIL), json.loads(request(endpoint).body)
    nothing = dict.fromkeys(EVIL)
    assert json.loads(alone_body(asked, rank=None)) == plain | nothing
    assert json.loads(alone_body(asked, rank=2)) == plain | nothing | {"routed_dp_rank": 2}
    assert json.loads(decode_body(asked, None, rank=None)) == plain | nothing
    announced = json.loads(prefill_body(asked, rank=None))
    assert {name for name in EVIL if announced[name] is not None} == {"kv_transfer_params"}
    assert announced["kv_transfer_params"]["remote_host"] is None
    meets = json.loads(bootstrap_body(asked, MEETING, rank=None, decodes=False))
    ours = {"bootstrap_host": "10.0.0.1", "bootstrap_port": 8998, "bootstrap_room": 42}
    assert meets == plain | nothing | ours


@pytest.mark.parametrize(
    ("body", "sent"),
    [
        (b'{ "model":"m" ,\n "prompt" : "\\u00e9 \xc3\xa9", "x": 1e2 }', None),
        (b'{"model":"m", "prompt":"bootstrap_room", "x": {"bootstrap_room": 7 } }', None),
        (
            b'{"model":"m", "prompt":"p","bootstrap_room" : 7 , "x":1.50}',
            b'{"model":"m", "prompt":"p","bootstrap_room" : null , "x":1.50}',
        ),
        (
            b'{"bootstrap_room": [7, {"a":"]"}], "model":"m", "prompt":"p" }',
            b'{"bootstrap_room": null, "model":"m", "prompt":"p" }',
        ),
    ],
)
def test_all_else_goes_on_byte_for_byte(body: bytes, sent: bytes | None) -> None:
    """What is not at the top is none of the engine's business either."""
    assert alone_body(parse_request(Endpoint.COMPLETIONS, body), rank=None) == (body if sent is None else sent)


@pytest.mark.parametrize(
    "body", [b'{"model":"m","prompt":"p","%b":7,"%b":8}', b'{"%b":7,"model":"m","prompt":"p","%b":8}']
)
def test_a_room_given_twice_or_in_disguise_goes_nowhere(body: bytes) -> None:
    """Parsers differ on which of two counts, and names may be written with escapes."""
    disguised = body % (b"bootstrap_room", b"bootstrap\\u005froom")
    pairs = json.loads(alone_body(parse_request(Endpoint.COMPLETIONS, disguised), rank=None), object_pairs_hook=list)
    assert [value for name, value in pairs if name == "bootstrap_room"] == [None, None]


@pytest.mark.parametrize("answer", [b"", b"{}", b'{"kv_transfer_params": null}', b"data: x", b"[1]", b"\xff"])
def test_nothing_handed_over(answer: bytes) -> None:
    """Then the decode rank is asked as any other."""
    assert handed_over(answer) is None
    assert json.loads(decode_body(request(), None, rank=None)) == CHAT


_NAMES = st.sampled_from(["a", "b", "c", "routed_dp_rank", "kv_transfer_params"])
_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@given(
    fields=st.dictionaries(_NAMES | st.text(), _VALUES, max_size=5),
    values=st.dictionaries(_NAMES, _VALUES, max_size=4),
    indent=st.sampled_from([None, 1]),
)
def test_any_fields_can_be_set(fields: dict[str, object], values: dict[str, object], indent: int | None) -> None:
    """Setting fields in the text is setting them in the object, whatever both hold."""
    asked = CHAT | {name: value for name, value in fields.items() if name not in ("model", "messages", "stream")}
    values = {name: value for name, value in values.items() if name not in ("model", "messages")}
    edited = with_fields(parse_request(Endpoint.CHAT, json.dumps(asked, indent=indent).encode()), values)
    assert msgspec.json.decode(edited) == msgspec.json.decode(msgspec.json.encode(asked | values))
