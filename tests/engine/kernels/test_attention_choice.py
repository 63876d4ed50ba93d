"""What attends where: the best that is there, or what was asked for, or a reason why not."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from engine_shim.attention import choice
from engine_shim.attention.choice import choose_attention
from engine_shim.settings import AttentionKind, ShimSettings

ALL = {"flashinfer", "triton"}


def choose(
    patch: pytest.MonkeyPatch,
    installed: set[str],
    *,
    head_dim: int = 128,
    dtype: torch.dtype = torch.bfloat16,
    **asked: Any,
) -> AttentionKind:
    patch.setattr(choice, "find_spec", lambda name: object() if name in installed else None)
    return choose_attention(ShimSettings.model_validate(asked), head_dim=head_dim, dtype=dtype)


@pytest.mark.parametrize(
    ("installed", "asked", "expected"),
    [
        (ALL, {}, AttentionKind.FLASHINFER),
        ({"triton"}, {}, AttentionKind.TRITON),
        (set(), {}, AttentionKind.TORCH),
        (ALL, {"device": "cpu"}, AttentionKind.TORCH),
        (ALL, {"graph_decodes": 8}, AttentionKind.TRITON),
        (ALL, {"head_dim": 80}, AttentionKind.TRITON),
        (ALL, {"dtype": torch.float32}, AttentionKind.TRITON),
        (ALL, {"kv_cache_dtype": "fp8_e4m3"}, AttentionKind.TRITON),
        (ALL, {"window_tails": "rebuilt"}, AttentionKind.TORCH),
        (ALL, {"window_tails": "rebuilt", "attention": "flashinfer"}, AttentionKind.FLASHINFER),
        (ALL, {"attention": "torch"}, AttentionKind.TORCH),
        (ALL, {"attention": "triton"}, AttentionKind.TRITON),
    ],
)
def test_what_attends(
    installed: set[str], asked: dict[str, Any], expected: AttentionKind, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FlashInfer by itself on CUDA alone, where it is installed, fits the model and nothing is to be captured."""
    assert choose(monkeypatch, installed, **{"device": "cuda", **asked}) is expected


@pytest.mark.parametrize(
    ("installed", "asked", "words"),
    [
        (set(), {}, "not installed"),
        (ALL, {"device": "cpu"}, "CUDA alone"),
        (ALL, {"head_dim": 80}, "not for 80 in bfloat16"),
        (ALL, {"dtype": torch.float32}, "not for 128 in float32"),
        (ALL, {"kv_cache_dtype": "fp8_e4m3"}, "eight bits"),
        (ALL, {"graph_decodes": 8}, "graph_decodes: only Triton's"),
    ],
)
def test_why_flashinfer_cannot(
    installed: set[str], asked: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Asked for by name it is refused with the reason, never replaced."""
    with pytest.raises(ValueError, match=words):
        choose(monkeypatch, installed, **{"device": "cuda", "attention": "flashinfer", **asked})
