"""Working-set admission before real shims with roles: more conversations than either pool holds."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import pytest

from tests.integration.pd.test_pairs_live import Pairs, pairs

POOL_TOKENS = 20_000
pytestmark = pytest.mark.timeout(300)  # 45 s of it is waiting for conversations to be idle

HANDOVERS = ("bootstrap", "params")
CONVERSATIONS = 6
TURNS = 5
SHIM = (
    *("shim", "--port", "0", "--kv-events-port", "0", "--replay-port", "0", "--runner", "sim"),
    *("--sim-prefill-rate", "40000", "--sim-decode-step", "2", "--transfer-rate", "400000"),
    *("--pool-tokens", str(POOL_TOKENS)),
)


@dataclass
class Told:
    """What the answers to later turns said: prompt tokens of the turn before, and what of them was reused.

    Beside it what the router said: requests held, tokens charged at the most while it holds, requests in flight at the
    end.
    """

    earlier: int = 0
    reused: int = 0
    held: float = 0
    most_charged: float = 0
    left: float = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def ratio(self) -> float:
        return self.reused / self.earlier


def converse(found: Pairs, name: str, told: Told, *, words: int) -> None:
    """6,000 tokens at first, and ``words`` a turn more."""
    prompt, before = f"{name} " + " ".join(f"{name}{word}" for word in range(1_500)), 0
    for turn in range(TURNS):
        prompt += " " + " ".join(f"t{turn}x{word}" for word in range(words))
        body = {"model": "needle", "prompt": prompt, "max_tokens": 4, "ignore_eos": True}
        answer = found.data.post("/v1/completions", json=body, headers={"x-session-id": name}, timeout=200)
        assert answer.status_code == 200, answer.text
        usage = answer.json()["usage"]
        with told.lock:
            if turn:
                told.earlier += before
                told.reused += min(before, usage["prompt_tokens_details"]["cached_tokens"])
        before = usage["prompt_tokens"] // 16 * 16
        time.sleep(0.2)


def measured(handover: str) -> dict[str, Told]:
    """Six conversations at once, without admission and with it."""
    told = {}
    for admission in ("off", "guarded"):
        told[admission] = one = Told()
        with (
            pairs(
                SHIM, handover=handover, prefill=1, decode=2, dp_size=1, options=("--routing.admission", admission)
            ) as found,
            ThreadPoolExecutor(CONVERSATIONS) as pool,
        ):
            talks = [pool.submit(converse, found, f"c{number}", one, words=100) for number in range(CONVERSATIONS)]
            while not all(talk.done() for talk in talks):
                charged = found.sum("homing_admission_charged_tokens")
                if found.sum("homing_admission_on"):  # else nobody is held, and charges may outgrow the pools
                    one.most_charged = max(one.most_charged, charged)
                time.sleep(0.1)
            for talk in talks:
                talk.result()
            one.held = found.sum("homing_admission_hold_seconds_count", end="released")
            one.left = found.sum("homing_rank_inflight_requests")
    return told


@pytest.fixture(scope="module")
def both() -> dict[str, dict[str, Told]]:
    """Either handover. Side by side: most of it is waiting."""
    with ThreadPoolExecutor(len(HANDOVERS)) as pool:
        return dict(zip(HANDOVERS, pool.map(measured, HANDOVERS), strict=True))


@pytest.mark.parametrize("handover", HANDOVERS)
def test_conversations_beyond_the_pools_wait_and_then_find_their_caches(
    both: dict[str, dict[str, Told]], handover: str
) -> None:
    """Two decode ranks hold two conversations each, and six come: the others wait until those have been idle.

    Next to nothing is computed twice (on a busy machine a session may move once, from a rank that looks slow), and what
    the router charges on all three ranks fits their pools together. Without admission the six compute most of their
    contexts again with every turn.
    """
    off, guarded = both[handover]["off"], both[handover]["guarded"]
    print(f"reused {off.ratio:.3f} -> {guarded.ratio:.3f}, most charged {guarded.most_charged:.0f}")
    assert (off.held, off.left, guarded.left) == (0, 0, 0)
    assert guarded.held >= 2
    assert guarded.ratio > 0.9
    assert off.ratio < 0.8
    assert max(off.most_charged, guarded.most_charged) <= 1.05 * 3 * POOL_TOKENS
