"""The script for a GPU, where there is none, and the loops that it measures."""

from __future__ import annotations

import json

import pytest
import torch

from engine_shim.bench import gpu
from engine_shim.bench.dense import DenseLoop
from engine_shim.model.config import from_hugging_face

# The interpreter is slow, the more so where others compute.
pytestmark = pytest.mark.timeout(400)


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU: run the script itself")
def test_without_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    """It says so, checks what can be checked, measures nothing and ends well."""
    pytest.importorskip("triton", reason="triton is not installed: pip install 'homing[kernels]'")
    assert gpu.main([]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["device"] == "cpu"
    assert "no CUDA device" in report["note"]
    assert {name: check["passed"] for name, check in report["checks"].items()} == {
        "kernels": True,
        "decode_steps": True,
    }
    assert report["checks"]["decode_steps"]["tokens"] == 3 * 9
    assert "speeds" not in report


@torch.inference_mode()
def test_loops_say_the_same() -> None:
    """What is measured side by side is the same model over the same prompts."""
    decoder = gpu.random_decoder(
        from_hugging_face(gpu.SHAPES["tiny"]), device=torch.device("cpu"), dtype=torch.float32, spread=0.2
    )
    prompts = torch.randint(0, 300, (3, 50), generator=torch.Generator().manual_seed(1)).tolist()
    paged = gpu.PagedLoop(decoder, rows=3, max_tokens=64, kernels=False, graph_decodes=0)
    dense = DenseLoop(decoder, rows=3, max_tokens=64)
    for loop in (paged, dense):
        loop.start(prompts)
    said = [dense._last.flatten().tolist()]
    for _ in range(5):
        paged.decode()
        dense.decode()
        said.append(dense._last.flatten().tolist())
    assert [request.output for request in paged.requests] == [list(each) for each in zip(*said, strict=True)]


def test_a_failed_check_fails_the_script(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever runs it in a pipeline is told."""
    pytest.importorskip("triton", reason="triton is not installed: pip install 'homing[kernels]'")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(gpu, "check_kernels", lambda _: {"passed": False})
    monkeypatch.setattr(gpu, "check_decode_steps", lambda _: {"passed": True})
    assert gpu.main([]) == 1
