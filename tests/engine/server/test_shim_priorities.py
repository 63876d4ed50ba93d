"""The ``priority`` field of a running shim, under either policy."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from shim_process import SIM, metric, running_shim, wait_until
from test_shim_events import Listener

from engine_shim.types import SchedulingPolicy
from router.wire.kv_events import BlockStored, decode_batch, decode_sources

#: A page of a prompt that no other begins like.
PROMPTS = {
    name: [300 + 20 * number + token for token in range(20)]
    for number, name in enumerate(("begun", "first", "second", "third", "last"))
}


@pytest.fixture(scope="module", params=list(SchedulingPolicy))
def shim(request: pytest.FixtureRequest) -> Iterator[tuple[SchedulingPolicy, httpx.Client]]:
    """A shim that runs one request at a time, a millisecond a token."""
    with (
        running_shim(*SIM, "--max-running", "1", "--scheduling-policy", request.param) as process,
        httpx.Client(base_url=process.url, timeout=60) as client,
    ):
        yield request.param, client


def test_requests_are_served_by_priority_where_the_shim_goes_by_it(
    shim: tuple[SchedulingPolicy, httpx.Client],
) -> None:
    """Four wait behind one that never ends: body, header over body, no number in the header, nothing at all."""
    policy, client = shim

    def ask(name: str, fields: dict[str, int], headers: dict[str, str]) -> None:
        body = {"prompt": PROMPTS[name], "max_tokens": 2, **fields}
        assert client.post("/v1/completions", json=body, headers=headers).status_code == 200

    waiting = [
        ("third", {}, {}),
        ("last", {"priority": 5}, {"x-vllm-priority": "high"}),
        ("first", {"priority": 9}, {"X-Vllm-Priority": "-7"}),
        ("second", {"priority": -6}, {}),
    ]
    long = {"prompt": PROMPTS["begun"], "max_tokens": 16_000, "ignore_eos": True, "stream": True, "priority": 99}
    with ThreadPoolExecutor(4) as pool:
        asked = []
        with client.stream("POST", "/v1/completions", json=long) as answer:
            assert answer.status_code == 200
            lines = answer.iter_lines()
            next(lines)
            for count, (name, fields, headers) in enumerate(waiting, start=1):
                asked.append(pool.submit(ask, name, fields, headers))
                wait_until(lambda count=count: metric(client, "vllm:num_requests_waiting") == count)
        for each in asked:
            each.result()
    by_priority = ["begun", "first", "second", "third", "last"]
    by_arrival = ["begun", *(name for name, _, _ in waiting)]
    assert served(client) == (by_priority if policy is SchedulingPolicy.PRIORITY else by_arrival)


def served(client: httpx.Client) -> list[str]:
    """Whose prompts were computed, in their order, by the shim's own word: its events."""
    (source,) = decode_sources(client.get("/kv_event_sources").json())
    names = {tokens[0]: name for name, tokens in PROMPTS.items()}
    order: dict[str, None] = {}
    for _, _, payload in Listener(None, source.replay_endpoint, []).replay(0):
        for event in decode_batch(payload).events:
            if isinstance(event, BlockStored) and event.token_ids and event.token_ids[0] in names:
                order[names[event.token_ids[0]]] = None
    return list(order)


@pytest.mark.parametrize("priority", ["soon", 1.5, 1 << 63, -(1 << 63) - 1])
def test_what_is_no_priority_is_refused(shim: tuple[SchedulingPolicy, httpx.Client], priority: object) -> None:
    """Under either policy, as in vLLM: a number of 64 bits or nothing."""
    answer = shim[1].post("/v1/completions", json={"prompt": "a", "max_tokens": 1, "priority": priority})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "priority")
