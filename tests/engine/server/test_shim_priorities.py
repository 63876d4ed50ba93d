"""The ``priority`` field of a running shim, under either policy."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from shim_process import SIM, metric, running_shim, wait_until

from engine_shim.types import SchedulingPolicy


@pytest.fixture(scope="module", params=list(SchedulingPolicy))
def shim(request: pytest.FixtureRequest) -> Iterator[tuple[SchedulingPolicy, httpx.Client]]:
    """A shim that runs one request at a time, a millisecond a token."""
    with (
        running_shim(*SIM, "--max-running", "1", "--scheduling-policy", request.param) as process,
        httpx.Client(base_url=process.url, timeout=20) as client,
    ):
        yield request.param, client


def test_requests_are_served_by_priority_where_the_shim_goes_by_it(
    shim: tuple[SchedulingPolicy, httpx.Client],
) -> None:
    """Four wait behind a long one: body, header over body, no number in the header, nothing at all."""
    policy, client = shim
    ended: list[str] = []

    def ask(name: str, tokens: int, fields: dict[str, int], headers: dict[str, str]) -> None:
        body = {"prompt": name, "max_tokens": tokens, "ignore_eos": True, **fields}
        assert client.post("/v1/completions", json=body, headers=headers).status_code == 200
        ended.append(name)

    waiting = [
        ("third", {}, {}),
        ("last", {"priority": 5}, {"x-vllm-priority": "high"}),
        ("first", {"priority": 9}, {"X-Vllm-Priority": "-7"}),
        ("second", {"priority": -6}, {}),
    ]
    with ThreadPoolExecutor(5) as pool:
        asked = [pool.submit(ask, "begun", 1500, {"priority": 99}, {})]
        wait_until(lambda: metric(client, "vllm:num_requests_running") == 1)
        for count, (name, fields, headers) in enumerate(waiting, start=1):
            asked.append(pool.submit(ask, name, 60, fields, headers))
            wait_until(lambda count=count: metric(client, "vllm:num_requests_waiting") == count)
        for each in asked:
            each.result()
    by_priority = ["begun", "first", "second", "third", "last"]
    by_arrival = ["begun", *(name for name, _, _ in waiting)]
    assert ended == (by_priority if policy is SchedulingPolicy.PRIORITY else by_arrival)


@pytest.mark.parametrize("priority", ["soon", 1.5, 1 << 63, -(1 << 63) - 1])
def test_what_is_no_priority_is_refused(shim: tuple[SchedulingPolicy, httpx.Client], priority: object) -> None:
    """Under either policy, as in vLLM: a number of 64 bits or nothing."""
    answer = shim[1].post("/v1/completions", json={"prompt": "a", "max_tokens": 1, "priority": priority})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "priority")
