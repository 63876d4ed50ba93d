"""Pairs of real shims behind a real router: answers, hits, and what happens when a prefill worker dies."""

from __future__ import annotations

import contextlib
import json
import random
import signal
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from router.wire.kv_events import BlockStored, decode_snapshot
from tests.integration.control.test_router_process import Running, homing, router, until, workers

SHIM = ("shim", "--port", "0", "--kv-events-port", "0", "--replay-port", "0")
SIM = (*SHIM, "--runner", "sim", "--sim-prefill-rate", "20000", "--sim-decode-step", "2", "--transfer-rate", "200000")
PREFILL = ("--role", "prefill", "--bootstrap-port", "0")
DECODE = ("--role", "decode")


@dataclass
class Pairs:
    prefill: list[Running]
    decode: list[Running]
    data: httpx.Client
    admin: httpx.Client

    def sum(self, name: str, **labels: str) -> float:
        """Samples of a metric of the router, added up."""
        return _sum(self.admin.get("/metrics").text, name, labels)

    def is_known(self) -> bool:
        """The router has heard of all blocks of full attention that the shims hold."""
        for worker in workers(self.admin):
            for rank in worker["ranks"]:
                number = rank["rank"].rpartition("/")[2]
                told = httpx.get(f"{worker['url']}/kv_snapshot?dp_rank={number}", timeout=60).content
                events = decode_snapshot(told).batch.events
                held = sum(len(event.hashes) for event in events if isinstance(event, BlockStored) and not event.group)
                if rank["resident_blocks"] != held:
                    return False
        return True


def _sum(text: str, name: str, labels: dict[str, str]) -> float:
    wanted = [f'{key}="{value}"' for key, value in labels.items()]
    lines = [line for line in text.splitlines() if line.startswith((name + "{", name + " "))]
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if all(each in line for each in wanted))


@contextlib.contextmanager
def pairs(
    shim: Sequence[str],
    *,
    handover: str = "bootstrap",
    prefill: int = 1,
    decode: int = 1,
    dp_size: int = 2,
    options: Sequence[str] = (),
) -> Iterator[Pairs]:
    """Shims of both roles and a router that was told nothing but their addresses and the contract, and ``options``."""
    with contextlib.ExitStack() as stack:
        size = ("--dp-size", str(dp_size))
        pools = (
            [stack.enter_context(homing(*shim, *PREFILL, *size)) for _ in range(prefill)],
            [stack.enter_context(homing(*shim, *DECODE, *size)) for _ in range(decode)],
        )
        specs = [
            word
            for running in (*pools[0], *pools[1])
            for word in ("--worker", json.dumps({"url": f"http://{running.words['http']}", "handover": handover}))
        ]
        _, data, admin = stack.enter_context(router(*specs, "--probes.parity", "false", *options))
        until(lambda: all(worker["status"] == "ready" for worker in workers(admin)))
        yield Pairs(*pools, data, admin)


@pytest.mark.parametrize("handover", ["bootstrap", "params"])
def test_needles_pass_from_one_engine_to_another(handover: str) -> None:
    """Keys and values computed by the prefill shim answer on the decode shim, which computes next to nothing itself."""
    rng = random.Random(1)
    values = {f"key-{key:04d}": f"val-{rng.randrange(1000):04d}" for key in range(300)}
    hay = " ".join(f"{key} {value}" for key, value in values.items())
    with pairs((*SHIM, "--shadow-steps", "1"), handover=handover) as found:
        roles = {worker["ranks"][0]["role"] for worker in workers(found.admin)}
        assert roles == {"prefill", "decode"}
        for number, key in enumerate(rng.sample(sorted(values), 6)):
            # Each text begins with another word, so that nothing but the transfer can bring its pages.
            prompt = f"val-{number:04d} {hay} and what follows {key}"
            body = {"model": "needle", "prompt": prompt, "max_tokens": 1}
            answer = found.data.post("/v1/completions", json=body)
            assert answer.status_code == 200, answer.text
            assert answer.json()["choices"][0]["text"] == values[key]
            assert answer.headers["x-homing-prefill-rank"].startswith(found.prefill[0].words["http"])
            assert answer.headers["x-homing-worker"] == found.decode[0].words["http"]
        computed = "vllm:request_prefill_kv_computed_tokens_sum"
        by_role = [
            _sum(httpx.get(f"http://{one.words['http']}/metrics", timeout=60).text, computed, {})
            for one in (found.prefill[0], found.decode[0])
        ]
        assert by_role[0] > 6 * 600
        assert by_role[1] <= 6 * 16
        assert found.sum("homing_attempts_total", outcome="ok") == 12


def _turns(found: Pairs, session: str, *, turns: int, words: int) -> list[tuple[str, bool, int, int]]:
    """A conversation: of each turn the reason, whether it was a pair, tokens expected and reused."""
    rng = random.Random(session)
    messages: list[dict[str, str]] = []
    seen = []
    for turn in range(turns):
        text = " ".join(f"{rng.choice('abcdefgh')}{rng.randrange(100)}" for _ in range(words if turn else 600))
        messages.append({"role": "user", "content": text})
        body: dict[str, Any] = {"model": "needle", "messages": messages, "max_tokens": 4}
        answer = found.data.post("/v1/chat/completions", json=body, headers={"x-session-id": session})
        assert answer.status_code == 200, answer.text
        messages.append({"role": "assistant", "content": answer.json()["choices"][0]["message"]["content"]})
        cached = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
        headers = answer.headers
        seen.append(
            (
                headers["x-homing-reason"],
                "x-homing-prefill-rank" in headers,
                int(headers["x-homing-expected-cached-tokens"]),
                cached,
            )
        )
        until(lambda: found.sum("homing_rank_inflight_requests") == 0 and found.is_known())
    return seen


@pytest.mark.parametrize("handover", ["bootstrap", "params"])
def test_long_turns_go_in_pairs_and_short_ones_do_not(handover: str) -> None:
    """What a turn adds decides: much is computed on the prefill rank that has the rest, little where it is answered.

    Either way what was expected to be reused was reused.
    """
    with pairs(SIM, handover=handover, prefill=2, decode=2, dp_size=1) as found:
        long = _turns(found, "long", turns=5, words=400)
        short = _turns(found, "short", turns=5, words=3)
        assert [reason for reason, *_ in long] == ["cold", *["home"] * 4]
        assert all(is_pair for _, is_pair, *_ in long)
        assert [reason for reason, *_ in short] == ["cold", *["bypass"] * 4]
        assert [is_pair for _, is_pair, *_ in short] == [True, *[False] * 4]
        for turns in (long, short):
            assert [expected for *_, expected, _ in turns] == [cached for *_, cached in turns]
            assert all(cached > 0 for *_, cached in turns[1:])
        assert found.sum("homing_mispredicted_requests_total") == 0
        assert found.sum("homing_rank_inflight_requests") == 0


def test_a_prefill_worker_dies_in_mid_load() -> None:
    """Requests on it go to another pair: every answer is whole, and nothing is left in flight."""
    with pairs(SIM, prefill=2, decode=2, dp_size=1) as found:
        names = [running.words["http"] for running in found.prefill]

        def ask(number: int) -> tuple[int, str]:
            if number == 30:
                found.prefill[0].process.send_signal(signal.SIGKILL)
            words = " ".join(f"w{number}x{each}" for each in range(150))
            body = {"model": "needle", "prompt": words, "max_tokens": 4}
            answer = found.data.post("/v1/completions", json=body, timeout=60)
            return answer.status_code, answer.headers.get("x-homing-prefill-rank", "").rpartition("/")[0]

        with ThreadPoolExecutor(8) as pool:
            answers = list(pool.map(ask, range(90)))
        assert [status for status, _ in answers] == [200] * 90
        assert {name for _, name in answers[:20]} >= set(names)
        assert names[0] not in {name for _, name in answers[-20:]}
        until(lambda: found.sum("homing_rank_inflight_requests") == 0)
        assert names[1] in {name for _, name in answers[30:]}


def test_all_prefill_workers_gone() -> None:
    """The shim's decode ranks compute prompts themselves then, and say so."""
    with pairs(SIM, dp_size=1) as found:
        found.prefill[0].process.send_signal(signal.SIGKILL)
        body = {"model": "needle", "prompt": "a b c " * 200, "max_tokens": 2}
        until(lambda: sum(worker["status"] == "ready" for worker in workers(found.admin)) == 1, seconds=60)
        answer = found.data.post("/v1/completions", json=body, timeout=60)
        assert (answer.status_code, answer.headers["x-homing-reason"]) == (200, "degraded")
