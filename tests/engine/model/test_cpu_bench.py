"""The CPU bench gives all engines the same work, counts the same tokens, and says why an engine is missing."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest
import torch

from engine_shim.bench import cpu
from engine_shim.bench.contenders import ContenderError, Homing, Run, Transformers, Vllm
from engine_shim.bench.shapes import SHAPES, write_model


@pytest.mark.parametrize("model", sorted(set(SHAPES) - {"135m"}))
def test_both_engines_answer_alike(model: str, tmp_path: Path) -> None:
    """Prompts of one length and of several, padded on the left there, have the same greedy tokens in both."""
    path = write_model(model, tmp_path, seed=2)
    rng = random.Random(3)
    homing = Homing(path, dtype=torch.float32, context_tokens=128, batch=4)
    transformers = Transformers(path, dtype=torch.float32)
    for lengths in ((40, 40), (7, 33, 90)):
        prompts = [[rng.randrange(3, 2048) for _ in range(length)] for length in lengths]
        ours, theirs = (each.run(prompts, new_tokens=6) for each in (homing, transformers))
        assert [len(tokens) for tokens in ours.tokens] == [6] * len(lengths)
        assert ours.tokens == theirs.tokens
        # What a prompt has before the last one has its first does not count; states make a prompt end on a page first.
        assert theirs.decoded_tokens == 5 * len(lengths)
        assert 5 * len(lengths) - 1 <= ours.decoded_tokens <= 5 * len(lengths)
        assert min(ours.prefill_seconds, ours.decode_seconds, theirs.prefill_seconds, theirs.decode_seconds) > 0


class _Scripted:
    """Takes a second a new prompt and half a second a decoded token; remembers what it was asked."""

    def __init__(self, *, keeps_prefixes: bool, slower: float = 1.0) -> None:
        self.keeps_prefixes = keeps_prefixes
        self.asked: list[list[list[int]]] = []
        self._slower = slower

    def run(self, prompts: list[list[int]], *, new_tokens: int) -> Run:
        self.asked.append(prompts)
        decoded = len(prompts) * (new_tokens - 1)
        tokens = [[1] * new_tokens for _ in prompts]
        return Run(self._slower * len(prompts), self._slower * decoded / 2, decoded, tokens)

    def close(self) -> None:
        """Nothing stays behind."""


def test_ratios_are_of_equal_work() -> None:
    """An engine that needs three times as long has a ratio of three, and was asked the same."""
    ours, theirs = _Scripted(keeps_prefixes=True), _Scripted(keeps_prefixes=False, slower=3.0)
    case = cpu.Case("two", (10, 30), new_tokens=5)
    rng = random.Random(1)
    rounds = [cpu._round(case, {"homing": ours, "peer": theirs}, rng) for _ in range(3)]
    assert ours.asked == theirs.asked
    assert len({str(prompts) for prompts in ours.asked}) == 6  # never twice the same
    summary = cpu._summary(rounds)
    # 40 prompt tokens in 2 seconds, decoded tokens at half a second each.
    assert summary["homing"] == {
        "prefill_tokens_per_s": 20,
        "prefill_ratio": 1.0,
        "decode_tokens_per_s": 2,
        "decode_ratio": 1.0,
        "same": 1.0,
    }
    peer = summary["peer"]
    assert isinstance(peer, dict)
    assert (peer["prefill_ratio"], peer["decode_ratio"]) == (3.0, 3.0)


def test_a_warm_prefix_is_computed_before_by_those_that_keep_it() -> None:
    """Only an engine with a prefix cache is given the shared head beforehand; then both get the same prompts."""
    ours, theirs = _Scripted(keeps_prefixes=True), _Scripted(keeps_prefixes=False)
    case = cpu.Case("warm", (50, 50), new_tokens=1, warm=True)
    cpu._round(case, {"homing": ours, "peer": theirs}, random.Random(1))
    (head,), asked = ours.asked
    assert [asked] == theirs.asked
    assert all(prompt[:18] == head and len(prompt) == 50 for prompt in asked)
    assert asked[0] != asked[1]


def test_vllm_that_is_not_there_is_told(tmp_path: Path) -> None:
    """An interpreter without vLLM ends the contender with its own words, not the bench."""
    with pytest.raises(ContenderError, match="ModuleNotFoundError: No module named 'vllm'"):
        Vllm(sys.executable, tmp_path, dtype="float32", context_tokens=64, batch=1, log=tmp_path / "log")


def test_unknown_models_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """Before anything is loaded."""
    assert cpu.main(["--models", "qwen3,gpt5"]) == 2
    assert "no model gpt5; there are qwen3, gemma3" in capsys.readouterr().err
