"""The benchmark of window tails measures what it says: prompts that come back, each way by the tokens it has to run."""

from __future__ import annotations

from engine_shim.bench.tails import main, measure
from engine_shim.types import WindowTails


def test_each_way_runs_what_it_has_to() -> None:
    """1,200 tokens in 75 pages; ten window layers of 33 tokens need 32 + 9 * 32 tokens before a boundary."""
    costs = measure(prompt_tokens=1200, window_tokens=33, rounds=2)
    stored, rebuilt, ring = (costs[tails] for tails in WindowTails)
    assert stored.computed_tokens <= 37 + 16
    assert rebuilt.computed_tokens == stored.computed_tokens + 10 * 32
    assert ring.computed_tokens == rebuilt.computed_tokens
    assert ring.host_bytes <= rebuilt.host_bytes < stored.host_bytes


def test_it_prints_a_table(capsys: object) -> None:
    assert main(["--prompt-tokens", "1200", "--window-tokens", "33", "--rounds", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[2:]] == ["stored", "rebuilt", "ring"]
