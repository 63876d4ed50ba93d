"""A shim that is killed leaves its cache on disk to the one that is started after it."""

from __future__ import annotations

import signal
import stat
from pathlib import Path

import httpx
from shim_process import metric, running_shim, spawn, wait_until

from engine_shim.model.needle_text import facts, haystack
from router.wire.kv_events import BlockStored, decode_snapshot

FACTS = facts(8, seed=1)
TEXT = haystack(1500, FACTS, seed=2)


def ask(client: httpx.Client, number: int) -> tuple[str, int]:
    """The answer to a question on the text, and how many prompt tokens were not computed."""
    body = {"model": "needle", "prompt": TEXT + FACTS[number].question, "max_tokens": 4}
    answer = client.post("/v1/completions", json=body).json()
    details = answer["usage"]["prompt_tokens_details"] or {}
    return answer["choices"][0]["text"].strip(), details.get("cached_tokens", 0)


def test_killed_and_started_again(tmp_path: Path) -> None:
    """Right answers, nearly nothing computed, the events told anew, and a second process kept out meanwhile."""
    folder = tmp_path / "pool"
    options = ("--pool-tokens", "2048", "--host-pool-tokens", "4096", "--disk-pool", str(folder))
    with running_shim(*options) as shim, httpx.Client(base_url=shim.url, timeout=60) as client:
        assert ask(client, 0) == (FACTS[0].value, 0)
        wait_until(lambda: metric(client, "homing:moved_pages_total", target="STORAGE") > 1500 // 16, seconds=60)
        another = spawn(*options)
        _, told = another.communicate(timeout=60)
        assert (another.returncode, "is in use by another process" in told) == (1, True)
        assert stat.S_IMODE((folder / "rank-0").stat().st_mode) == 0o700
        shim.end(signal.SIGKILL)
    with running_shim(*options) as shim, httpx.Client(base_url=shim.url, timeout=60) as client:
        snapshot = decode_snapshot(client.get("/kv_snapshot?dp_rank=0").content)
        stored = [event for event in snapshot.batch.events if isinstance(event, BlockStored)]
        assert {event.medium for event in stored} == {"STORAGE"}
        assert sum(len(event.hashes) for event in stored if event.group == 0) > 1400 // 16
        value, cached = ask(client, 1)
        assert value == FACTS[1].value
        assert cached > 1400
        assert metric(client, "vllm:prompt_tokens_by_source_total", source="external_kv_transfer") == cached
        shim.end()
