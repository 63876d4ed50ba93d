"""The shim as a process: start, refusals to start, clients that leave, and its end."""

from __future__ import annotations

import json
import os
import re
import signal
import socket

import httpx
import pytest
from shim_process import SIM, ShimProcess, metric, running_shim, spawn, wait_until

from engine_shim.app import StartError, build
from engine_shim.cli import main
from engine_shim.settings import ShimSettings, load_settings


def finished(*options: str) -> tuple[int, str, str]:
    process = spawn(*options)
    out, err = process.communicate(timeout=200)
    return process.returncode, out, err


@pytest.mark.parametrize(
    ("option", "value", "named"),
    [
        ("--max-running", "none", "max_running"),
        ("--dp-size", "0", "dp_size"),
        ("--runner", "magic", "runner"),
        ("--speculative", "ngram:0", "speculative"),
        ("--sim-prefill-rate", "0", "sim_prefill_rate"),
        ("--port", "70000", "port"),
        ("--disk-pool", "", "disk_pool"),
    ],
)
def test_bad_values_name_the_key(option: str, value: str, named: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A bad value refuses to start with one line that names the key."""
    assert main([option, value]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"homing shim: {named}: ")
    assert err.count("\n") == 1


def test_help_names_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    """Each setting is an option with a sentence, and the defaults told are those in force."""
    with pytest.raises(SystemExit) as leaving:
        main(["--help"])
    assert leaving.value.code == 0
    told = capsys.readouterr().out
    for name, knob in ShimSettings.model_fields.items():
        assert ("--no-" if knob.annotation is bool else "--") + name.replace("_", "-") in told
        assert knob.description


def test_bad_environment_names_the_variable(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Variables set options, and one that is no option refuses to start."""
    monkeypatch.setenv("HOMING_SHIM__POOL_TOKENZ", "5")
    assert main([]) == 2
    assert capsys.readouterr().err == "homing shim: HOMING_SHIM__POOL_TOKENZ: no such setting\n"
    monkeypatch.delenv("HOMING_SHIM__POOL_TOKENZ")
    monkeypatch.setenv("HOMING_SHIM__DP_SIZE", "3")
    monkeypatch.setenv("HOMING_SHIM__PAGE_TOKENS", "4")
    settings = load_settings({"page_tokens": "32"}, os.environ)
    assert (settings.dp_size, settings.page_tokens) == (3, 32)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"model": "/no/such/model"}, "no model '/no/such/model'"),
        ({"max_context_tokens": 99_999_999}, "max_context_tokens: 99999999 exceeds the model's 131072"),
        ({"host": "no.such.host.invalid"}, "cannot listen on port 0 of no.such.host.invalid: "),
        ({"window_pool_tokens": 16}, "window_pool_tokens: "),
        ({"window_tails": "ring", "role": "prefill"}, "window_tails: what is in a ring is not handed over"),
        ({"disk_pool": "below"}, "disk_pool: pages are copied to the host first; host_pool_tokens is needed too"),
        ({"write_policy": "back"}, "write_policy: pages are copied to the host first"),
        ({"piece_tokens": 64}, "piece_tokens: pages are copied to the host first"),
        ({"disk_pool_tokens": 4096}, "disk_pool_tokens: there is no disk_pool"),
        ({"disk_pool_tokens": 4096, "host_pool_tokens": 4096}, "disk_pool_tokens: there is no disk_pool"),
        ({"speculative": "ngram:4"}, "speculative: a timing model"),
        ({"kv_cache_dtype": "fp8_e4m3"}, "kv_cache_dtype: a timing model"),
        ({"speculative": "draft:2", "runner": "torch"}, "speculative: the model has no draft head"),
    ],
)
def test_what_cannot_start_says_why(wrong: dict[str, object], words: str) -> None:
    """No such model, a context beyond the model's, a window pool too small: said, and no socket stays open."""
    ports = {"port": 0, "kv_events_port": 0, "replay_port": 0}
    with pytest.raises((StartError, FileNotFoundError), match=re.escape(words)):
        build(ShimSettings.model_validate({"runner": "sim", **ports, **wrong}))


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"attention": "triton"}, "attention: on the CPU Triton only has its interpreter"),
        ({"graph_decodes": 8}, "graph_decodes: only Triton's kernels can be captured"),
        ({"graph_decodes": 8, "attention": "torch"}, "graph_decodes: only Triton's kernels can be captured"),
        ({"attention": "flashinfer"}, "attention: flashinfer "),
    ],
)
def test_kernels_that_cannot_run_here(wrong: dict[str, object], words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU kernels are refused, and so are graphs of what is none."""
    pytest.importorskip("triton", reason="triton is not installed: pip install 'homing[kernels]'")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(StartError, match=re.escape(words)):
        build(ShimSettings.model_validate({"port": 0, "kv_events_port": 0, "replay_port": 0, **wrong}))


def test_kernels_answer_in_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """A shim whose kernels attend, decoding over fixed inputs, answers as any other."""
    pytest.importorskip("triton", reason="triton is not installed: pip install 'homing[kernels]'")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with running_shim("--attention", "triton", "--graph-decodes", "2") as shim:
        body = {"model": "needle", "prompt": "key-0017 val-0093, now what follows key-0017", "max_tokens": 2}
        answer = httpx.post(f"{shim.url}/v1/completions", json=body, timeout=60).json()
    assert answer["choices"][0]["text"].strip() == "val-0093"


def test_an_answer_from_keys_and_values_of_eight_bits() -> None:
    """Computed, then asked again from the cache."""
    with running_shim("--kv-cache-dtype", "fp8_e4m3", "--page-tokens", "4") as shim:
        body = {"model": "needle", "prompt": "key-0017 val-0093, now what follows key-0017", "max_tokens": 2}
        answers = [httpx.post(f"{shim.url}/v1/completions", json=body, timeout=60).json() for _ in range(2)]
    assert [answer["choices"][0]["text"].strip() for answer in answers] == ["val-0093"] * 2
    assert answers[1]["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


@pytest.mark.parametrize("option", ["--port", "--kv-events-port", "--replay-port"])
def test_a_taken_port_is_named(option: str) -> None:
    """A port in use is told by its number, and the shim exits with 1."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        code, _, err = finished(*SIM, option, port)
    assert code == 1
    assert port in err
    assert "in use" in err
    assert option in err.partition("; choose ")[2]
    assert err.count("\n") == 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_cleanly(number: int) -> None:
    """Ctrl-C and SIGTERM: exit code 0, and nothing on stderr but log lines, without any prompt text."""
    with running_shim(*SIM, "--log-level", "debug") as shim:
        with httpx.Client(base_url=shim.url, timeout=60) as client:
            client.post("/v1/completions", json={"prompt": "SECRETWORD", "max_tokens": 2})
            client.post("/v1/completions", json={"prompt": "SECRETWORD", "n": 3})
        code, errors = shim.end(number)
    assert code == 0
    logged = [json.loads(line) for line in errors.splitlines()]
    assert {line["level"] for line in logged} <= {"debug", "info"}
    assert "SECRETWORD" not in errors


def is_shut(shim: ShimProcess) -> bool:
    """No new connection is taken."""
    try:
        socket.create_connection(shim.address).close()
    except ConnectionRefusedError:
        return True
    return False


def test_running_answers_finish_within_the_grace() -> None:
    """After SIGTERM a stream that runs goes on to its end, and no new connection is taken."""
    slow = ("--runner", "sim", "--sim-decode-step", "20")
    with running_shim(*slow) as shim, httpx.Client(base_url=shim.url, timeout=60) as client:
        body = {"prompt": "a", "max_tokens": 100, "stream": True, "ignore_eos": True}
        with client.stream("POST", "/v1/completions", json=body) as answer:
            lines = answer.iter_lines()
            next(lines)
            shim.process.send_signal(signal.SIGTERM)
            wait_until(lambda: is_shut(shim))
            assert shim.process.poll() is None
            told = [line for line in lines if line]
        assert json.loads(told[-2].removeprefix("data: "))["choices"][0]["finish_reason"] == "length"
        assert told[-1] == "data: [DONE]"
        assert shim.process.wait(timeout=20) == 0


def test_answers_are_ended_when_the_grace_is_over() -> None:
    """What runs longer ends with an error frame in the stream or a 503, and the exit code is still 0."""
    slow = ("--runner", "sim", "--sim-decode-step", "20", "--shutdown-seconds", "0.3")
    with running_shim(*slow) as shim, httpx.Client(base_url=shim.url, timeout=60) as client:
        body = {"prompt": "a", "max_tokens": 4000, "stream": True, "ignore_eos": True}
        with client.stream("POST", "/v1/completions", json=body) as answer:
            lines = answer.iter_lines()
            next(lines)
            code, errors = shim.end()
            told = [line for line in lines if line]
    assert json.loads(told[-2].removeprefix("data: "))["error"]["code"] == "engine_unavailable"
    assert told[-1] == "data: [DONE]"
    assert code == 0
    assert "Traceback" not in errors


def post_and_leave(shim: ShimProcess, body: dict, *, after_bytes: int) -> None:
    """Send a request, read so much of the answer, and close the connection."""
    content = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(content)}\r\n\r\n"
    with socket.create_connection(shim.address) as connection:
        connection.sendall(head.encode() + content)
        if after_bytes:
            assert connection.recv(after_bytes)
        else:
            with httpx.Client(base_url=shim.url, timeout=60) as client:
                wait_until(lambda: metric(client, "vllm:num_requests_running", engine="0") == 1)


@pytest.mark.parametrize("case", ["streaming", "whole", "silent"])
def test_a_client_that_leaves_frees_its_pages(case: str) -> None:
    """Streamed or not, talking or still in prefill: once a client has left, its request holds nothing."""
    options = ("--runner", "sim", "--sim-decode-step", "10", "--chunk-tokens", "16", "--sim-prefill-rate", "800")
    prompt = list(range(300, 300 + 1500)) if case == "silent" else [300, 301]
    body = {"prompt": prompt, "max_tokens": 3000, "ignore_eos": True, "stream": case != "whole"}
    with running_shim(*options) as shim, httpx.Client(base_url=shim.url, timeout=60) as client:
        post_and_leave(shim, body, after_bytes=100 if case == "streaming" else 0)
        wait_until(lambda: metric(client, "vllm:num_requests_running") == 0)
        assert metric(client, "vllm:kv_cache_usage_perc") == 0
        wait_until(lambda: metric(client, "vllm:request_success_total", finished_reason="abort") == 1)
        assert metric(client, "vllm:generation_tokens_total") < 1000
        assert client.get("/health").status_code == 200


def test_any_address_is_shown_as_a_star() -> None:
    """With --host 0.0.0.0 the event endpoints are told as vLLM tells them: the host is the reader's to fill in."""
    with running_shim(*SIM, "--host", "0.0.0.0") as shim:
        port = shim.ready["http"].rsplit(":", 1)[1]
        source = httpx.get(f"http://127.0.0.1:{port}/kv_event_sources", timeout=60).json()["0"]
        assert source["endpoint"] == f"tcp://*:{shim.ready['events']}"
        assert source["replay_endpoint"] == f"tcp://*:{shim.ready['replay']}"


def test_needle_over_http() -> None:
    """The built-in model on torch answers what was stated, by completion and chat, warm and cold, streamed."""
    pytest.importorskip("torch")
    stated = "the house key-0017 val-0093 and the river key-0401 val-0007 and more "
    question = stated * 5 + "so key-0017"
    with running_shim("--threads", "1") as shim, httpx.Client(base_url=shim.url, timeout=60) as client:
        body = {"prompt": question, "max_tokens": 8, "temperature": 0}
        cold = client.post("/v1/completions", json=body).json()
        warm = client.post("/v1/completions", json=body).json()
        for answer in (cold, warm):
            assert answer["choices"][0]["text"].strip() == "val-0093"
            assert answer["choices"][0]["finish_reason"] == "stop"
        assert cold["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        assert warm["usage"]["prompt_tokens_details"]["cached_tokens"] >= 32
        chat = {"messages": [{"role": "user", "content": stated + "tell me key-0401"}], "temperature": 0}
        streamed = client.post("/v1/chat/completions", json=chat | {"stream": True, "max_tokens": 8}).text
        assert "val-0007" in streamed


def test_sim_answers_need_not_end_by_themselves() -> None:
    """With --sim-output-tokens 0 a chat without limits goes on to the end of the context."""
    options = (*SIM, "--sim-decode-step", "0", "--sim-output-tokens", "0", "--max-context-tokens", "400")
    with running_shim(*options) as shim:
        chat = {"messages": [{"role": "user", "content": "a"}]}
        answer = httpx.post(f"{shim.url}/v1/chat/completions", json=chat, timeout=60).json()
    assert (answer["choices"][0]["finish_reason"], answer["usage"]["total_tokens"]) == ("length", 400)
