"""What the decoder works out in its own way on the CPU is what torch's slower operators come to."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F  # noqa: N812 - torch's own name for it

from engine_shim.model.decoder import _gelu
from engine_shim.model.linear import blocked, linear, plain
from engine_shim.model.norm import RmsNorm, normed


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_gelu(dtype: torch.dtype) -> None:
    """At all sizes, also of every second column, and it changes nothing of what it is given."""
    x = torch.cat((torch.randn(1000), torch.linspace(-100.0, 100.0, 2001), torch.tensor([0.0, -0.0, 1e30, -1e30])))
    x = x.to(dtype)[:, None].repeat(1, 2)
    before = x.clone()
    torch.testing.assert_close(_gelu(x[:, 0]), F.gelu(x[:, 0], approximate="tanh"), atol=1e-6, rtol=1e-6)
    assert torch.equal(x, before)


@pytest.mark.parametrize("rows", [1, 8, 255, 256, 300])
@pytest.mark.parametrize("shape", [(64, 48), (512, 1024)])
def test_linear(rows: int, shape: tuple[int, int]) -> None:
    """Few rows and many, small matrices and such as are blocked, with and without a bias, rows that lie apart."""
    torch.manual_seed(rows)
    weight, bias = torch.randn(shape) / shape[1] ** 0.5, torch.randn(shape[0])
    x = torch.randn(rows, 2, shape[1])[:, 1]
    for each in (None, bias):
        expected = F.linear(x.double(), weight.double(), None if each is None else each.double())
        torch.testing.assert_close(linear(x, blocked(weight), each), expected.float(), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("shape", [(64, 48), (512, 1024), (1030, 577), (3, 200_000)])
def test_plain(shape: tuple[int, int]) -> None:
    """A blocked matrix is given back as it was, whatever its sides are multiples of."""
    weight = torch.randn(shape)
    assert torch.equal(plain(blocked(weight)), weight)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [1.0, 1e-4, 1e15])
@pytest.mark.parametrize("heads", [None, 3])
def test_norm(dtype: torch.dtype, size: float, heads: int | None) -> None:
    """Of large vectors, and of small ones, beside which epsilon counts."""
    torch.manual_seed(0)
    weight = torch.randn(20) if heads is None else torch.randn(heads, 20)
    x = (torch.randn(5, *weight.shape) * size).to(dtype)
    exact = x.double()
    expected = exact / (exact.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight
    ours = RmsNorm(weight, 1e-6)(x)
    assert ours.dtype is dtype
    tolerance = 2e-6 if dtype is torch.float32 else 1e-2
    torch.testing.assert_close(ours.double(), expected, atol=tolerance, rtol=tolerance)
    assert torch.equal(normed(x, RmsNorm(weight, 1e-6)), ours)
    assert normed(x, None) is x
