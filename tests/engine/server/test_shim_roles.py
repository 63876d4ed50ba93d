"""A prefill and a decode shim without a router between them: both contracts, and what either says when it fails."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from shim_process import SIM, ShimProcess, metric, running_shim, wait_until

from tests.fakes.ports import reserve

LIMIT = ("--handover-seconds", "3")
WORDS = " ".join(f"word{number}" for number in range(120))


@pytest.fixture(scope="module")
def prefill() -> Iterator[ShimProcess]:
    with running_shim(*SIM, *LIMIT, "--role", "prefill", "--bootstrap-port", "0") as shim:
        yield shim


@pytest.fixture(scope="module")
def decode() -> Iterator[ShimProcess]:
    with running_shim(*SIM, *LIMIT, "--role", "decode") as shim:
        yield shim


def ask(shim: ShimProcess, prompt: object, **fields: object) -> httpx.Response:
    body = {"prompt": prompt, "max_tokens": 4, **fields}
    return httpx.post(shim.url + "/v1/completions", json=body, timeout=60)


def both(prefill: ShimProcess, decode: ShimProcess, prompt: object, **fields: object) -> list[httpx.Response]:
    """The same body to both at once, as SGLang has it."""
    meeting = {"bootstrap_host": "127.0.0.1", "bootstrap_port": int(prefill.ready["bootstrap"]), **fields}
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(lambda shim: ask(shim, prompt, **meeting), (prefill, decode)))


def running(shim: ShimProcess) -> float:
    with httpx.Client(base_url=shim.url, timeout=60) as client:
        return metric(client, "vllm:num_requests_running") + metric(client, "vllm:num_requests_waiting")


def test_they_tell_their_roles(prefill: ShimProcess, decode: ShimProcess) -> None:
    """As SGLang does, with the port where prompts are fetched."""
    told = httpx.get(prefill.url + "/server_info", timeout=60).json()
    assert told["disaggregation_mode"] == prefill.ready["role"] == "prefill"
    assert told["disaggregation_bootstrap_port"] == int(prefill.ready["bootstrap"])
    told = httpx.get(decode.url + "/server_info", timeout=60).json()
    assert told["disaggregation_mode"] == "decode"
    assert "disaggregation_bootstrap_port" not in told


def test_the_answer_is_the_one_of_a_single_shim(prefill: ShimProcess, decode: ShimProcess) -> None:
    """Same text; the prefill shim makes one token of it; reuse is told as the prefill shim had it."""
    alone = ask(decode, "alone " + WORDS).json()
    again = "alone " + WORDS
    one, four = both(prefill, decode, again, bootstrap_room=1)
    assert (one.status_code, four.status_code) == (200, 200)
    assert four.json()["choices"][0]["text"] == alone["choices"][0]["text"]
    assert (one.json()["usage"]["completion_tokens"], four.json()["usage"]["completion_tokens"]) == (1, 4)
    assert four.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    _, four = both(prefill, decode, again, bootstrap_room=2)
    tokens = four.json()["usage"]["prompt_tokens"]
    assert four.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == (tokens - 1) // 16 * 16


@pytest.mark.parametrize("rooms", [[11, 13], 21])
def test_a_batch(prefill: ShimProcess, decode: ShimProcess, rooms: object) -> None:
    """Two prompts meet in two rooms, listed or counted up from one number."""
    answers = both(prefill, decode, [f"{rooms} x " + WORDS, f"{rooms} y " + WORDS], bootstrap_room=rooms)
    assert [answer.status_code for answer in answers] == [200, 200]
    assert len(answers[1].json()["choices"]) == 2


def test_vllms_contract(prefill: ShimProcess, decode: ShimProcess) -> None:
    """The prefill shim's answer says where its prompt is, and the decode shim fetches it there, once."""
    prompt = "params " + WORDS
    told = ask(prefill, prompt, max_tokens=1, kv_transfer_params={"do_remote_decode": True}).json()
    params = told["kv_transfer_params"]
    assert (params["do_remote_prefill"], params["do_remote_decode"]) == (True, False)
    before = _computed(decode)
    assert ask(decode, prompt, kv_transfer_params=params).status_code == 200
    assert _computed(decode) - before <= 16
    again = ask(decode, prompt, kv_transfer_params=params)
    assert (again.status_code, again.json()["error"]["code"]) == (500, "handover_failed")


def _computed(shim: ShimProcess) -> float:
    with httpx.Client(base_url=shim.url, timeout=60) as client:
        return metric(client, "vllm:request_prefill_kv_computed_tokens_sum")


def test_without_the_other_half(prefill: ShimProcess, decode: ShimProcess) -> None:
    """Told of no other shim, either does all of it."""
    for shim in (prefill, decode):
        assert ask(shim, "plain " + WORDS).json()["usage"]["completion_tokens"] == 4


def test_nobody_comes(prefill: ShimProcess, decode: ShimProcess) -> None:
    """After the handover time both give up with 500, and run nothing more."""
    fields = {"bootstrap_host": "127.0.0.1", "bootstrap_port": int(prefill.ready["bootstrap"])}
    for shim, room in ((prefill, 31), (decode, 32)):
        answer = ask(shim, "lonely " + WORDS, bootstrap_room=room, **fields)
        assert (answer.status_code, answer.json()["error"]["code"]) == (500, "handover_failed")
        assert running(shim) == 0


def test_a_prefill_shim_that_is_not_there(decode: ShimProcess) -> None:
    """A port where nobody listens: 500 at once."""
    with reserve() as nobody:
        place = {"bootstrap_host": "127.0.0.1", "bootstrap_port": nobody.getsockname()[1], "bootstrap_room": 41}
        answer = ask(decode, "nowhere " + WORDS, **place)
    assert (answer.status_code, answer.json()["error"]["code"]) == (500, "handover_failed")
    assert "cannot be reached" in answer.json()["error"]["message"], "else it has waited for the handover time"


@pytest.mark.parametrize("is_prefill", [True, False])
def test_a_client_that_leaves_while_it_waits(prefill: ShimProcess, decode: ShimProcess, *, is_prefill: bool) -> None:
    """The room is left: whoever comes later waits for somebody else, and the shim is free."""
    shim, room = (prefill, 51) if is_prefill else (decode, 52)
    fields = {"bootstrap_host": "127.0.0.1", "bootstrap_port": int(prefill.ready["bootstrap"]), "bootstrap_room": room}
    content = json.dumps({"prompt": f"leaves {room} {WORDS}", "max_tokens": 4, **fields}).encode()
    with socket.create_connection(shim.address) as client:
        head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(content)}\r\n\r\n"
        client.sendall(head.encode() + content)
        told = ask(shim, f"waits {room} {WORDS}", **fields).json()["error"]["message"]  # by which it has come
        assert ("in use" if is_prefill else "asked for twice") in told
    wait_until(lambda: running(shim) == 0)
    answers = both(prefill, decode, f"comes {room} {WORDS}", bootstrap_room=room)
    assert [answer.status_code for answer in answers] == [200, 200]


def test_a_room_in_use(prefill: ShimProcess) -> None:
    """A second request for a room is refused, and does the first no harm."""
    with ThreadPoolExecutor(1) as pool:
        before = _computed(prefill)
        first = pool.submit(ask, prefill, "first " + WORDS, bootstrap_room=61)
        wait_until(lambda: _computed(prefill) > before)
        second = ask(prefill, "second " + WORDS, bootstrap_room=61)
        assert (second.status_code, second.json()["error"]["code"]) == (400, "room_in_use")
        assert first.result().json()["error"]["code"] == "handover_failed"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"bootstrap_room": [1, 2], "bootstrap_host": "h", "bootstrap_port": 1}, "bootstrap_room"),
        ({"bootstrap_room": 1, "bootstrap_port": 1}, "bootstrap_host"),
        ({"bootstrap_room": 1, "bootstrap_host": "h"}, "bootstrap_port"),
        ({"kv_transfer_params": {"do_remote_prefill": True}}, "kv_transfer_params"),
    ],
)
def test_fields_that_do_not_fit(decode: ShimProcess, fields: dict[str, object], param: str) -> None:
    """400, and the field is named."""
    answer = ask(decode, WORDS, **fields)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
