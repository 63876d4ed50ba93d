"""Eight-bit keys and values: what a byte stands for by the format's definition, what is lost, and who reads them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_kernels import CPU, SCALE, SMALL, Case, Shape, make_case
from torch import Tensor

from engine_shim.attention import fp8
from engine_shim.attention.fp8 import GREATEST, DecodedPages, pack, packed_size, unpack
from engine_shim.attention.host_pages import HostPages
from engine_shim.attention.kernel_attention import KernelAttention
from engine_shim.attention.paged import PagedAttention, Pools
from engine_shim.attention.plan import make_plan
from engine_shim.attention.tables import page_tables
from engine_shim.types import (
    NULL_PAGE,
    Batch,
    CacheGroup,
    CacheLayout,
    Chunk,
    GroupKind,
    Request,
    Sampling,
    Sunk,
)

NAN = 0x7F


def meaning(code: int) -> float:
    """OCP's E4M3: a sign, four bits of exponent with a bias of 7, three of mantissa; all ones is no number."""
    sign, exponent, mantissa = code >> 7, code >> 3 & 15, code & 7
    if code & 0x7F == NAN:
        return float("nan")
    magnitude = mantissa / 8 * 2**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    return -magnitude if sign else magnitude


MEANINGS = torch.tensor([meaning(code) for code in range(256)], dtype=torch.float64)


def packed_row(codes: list[int], scale: float) -> Tensor:
    scale_bytes = torch.tensor([scale]).view(torch.uint8)
    return torch.cat((torch.tensor(codes, dtype=torch.uint8), scale_bytes))


@pytest.mark.parametrize("scale", [1.0, 0.3, 2.0**-100])
def test_every_code(scale: float) -> None:
    """All 256 are read as the format defines them, times the scale."""
    expected = MEANINGS * float(torch.tensor(scale))
    actual = unpack(packed_row(list(range(256)), scale), torch.float64)
    torch.testing.assert_close(actual, expected, atol=0.0, rtol=1e-7, equal_nan=True)


@given(
    values=st.lists(st.floats(-1, 1, width=32), min_size=8, max_size=8),
    power=st.integers(-60, 60),
)
@settings(max_examples=300, deadline=None)
def test_the_nearest_code_is_taken(values: list[float], power: int) -> None:
    """No other code of the same scale is nearer, and no more is lost than half a step."""
    x = torch.tensor(values, dtype=torch.float32) * 2.0**power
    packed = pack(x)
    scale = packed[8:].clone().view(torch.float32).double()
    read = unpack(packed, torch.float64)
    lost = (read - x.double()).abs()
    # The division by the scale and the product with it round, too, in float32.
    rounding = x.double().abs() * 2.0**-22
    possible = (MEANINGS[:, None] * scale - x.double()).abs().nan_to_num(torch.inf).amin(0)
    assert (lost <= possible + rounding).all()
    assert (lost <= torch.maximum(x.double().abs() * 2.0**-4, scale * 2.0**-10) + rounding).all()
    assert scale == (x.abs().amax() / GREATEST).clamp(min=torch.finfo(torch.float32).tiny)


def test_zeros_and_what_is_no_number() -> None:
    """Zeros stay zeros; one head's NaN is not another's; heads of no whole number of scales are refused."""
    x = torch.zeros(3, 8)
    x[1, 2], x[2, 3] = torch.nan, 5.0
    read = unpack(pack(x), torch.float32)
    assert read[0].eq(0).all()
    assert read[1].isnan().any()
    assert torch.equal(read[2], x[2])
    with pytest.raises(ValueError, match="no multiple of 4"):
        packed_size(30)


# --- who reads them ---------------------------------------------------------------------------------------------------


def packed_pools(case: Case) -> Pools:
    """The case's pools in eight bits; what was no number is none."""
    keys, values = (tuple(pack(pool) for pool in pools) for pools in (case.pools.keys, case.pools.values))
    for pool in (*keys, *values):
        pool[unpack(pool, torch.float32).isnan().any(-1)] = NAN
    return Pools(case.layout, keys, values, case.pools.barrier, DecodedPages(torch.float64))


def read_as_the_reference(case: Case) -> list[Tensor]:
    """Attention in float64 over what the bytes stand for."""
    rounded = Case(
        case.layout,
        case.chunks,
        Pools(
            layout=case.layout,
            keys=tuple(unpack(pool, torch.float32) for pool in packed_pools(case).keys),
            values=tuple(unpack(pool, torch.float32) for pool in packed_pools(case).values),
            barrier=case.pools.barrier,
        ),
        case.query,
        unpack(pack(case.key), torch.float32),
        unpack(pack(case.value), torch.float32),
    )
    return rounded.reference()


def by_torch(case: Case) -> list[Tensor]:
    plan = make_plan(Batch(case.chunks), case.layout, device=CPU, dtype=torch.float64)
    attention = PagedAttention(packed_pools(case), plan, scale=SCALE)
    return [attention(layer, case.query.double(), case.key, case.value) for layer in (0, 1)]


def by_kernels(case: Case) -> list[Tensor]:
    tables = page_tables(case.chunks, case.layout, device=CPU)
    attention = KernelAttention(packed_pools(case), tables, scale=SCALE, tiles=SMALL)
    return [attention(layer, case.query, case.key, case.value) for layer in (0, 1)]


def assert_equal(read: Callable[[Case], list[Tensor]], case: Case, *, tolerance: float) -> None:
    for actual, expected in zip(read(case), read_as_the_reference(case), strict=True):
        torch.testing.assert_close(actual.double(), expected, atol=tolerance, rtol=tolerance)


BATCHES = [[(5, 1), (0, 1), (33, 1), (70, 1)], [(0, 9), (17, 1), (6, 13), (40, 2)], [(7, 8)]]
SHAPES = [Shape(), Shape(kv_heads=1, repeats=3, head_dim=12, page_tokens=7, window_tokens=15)]


@pytest.mark.parametrize("shape", SHAPES, ids=["even", "odd"])
@pytest.mark.parametrize("lengths", BATCHES, ids=["decodes", "mixed", "chunk"])
def test_torch_reads_what_was_written(lengths: list[tuple[int, int]], shape: Shape) -> None:
    """To the last bits, with NaN in every slot that is not a sequence's own."""
    assert_equal(by_torch, make_case(lengths, shape), tolerance=1e-12)


@pytest.mark.timeout(400)
@pytest.mark.parametrize("shape", SHAPES, ids=["even", "odd"])
@pytest.mark.parametrize("lengths", BATCHES, ids=["decodes", "mixed", "chunk"])
def test_kernels_read_what_was_written(lengths: list[tuple[int, int]], shape: Shape) -> None:
    """In Triton's interpreter, in float32."""
    assert_equal(by_kernels, make_case(lengths, shape), tolerance=2e-6)


def test_kernels_read_every_code() -> None:
    """One key, whose values are all codes there are in turn: attention is what they stand for."""
    case = make_case([(0, 1)] * 32, Shape(kv_heads=1, repeats=1, head_dim=8))
    pools = packed_pools(case)
    tables = page_tables(case.chunks, case.layout, device=CPU)
    codes = torch.arange(256, dtype=torch.uint8).view(32, 1, 8)
    # Without the two that are no numbers, of which a product would be none.
    codes[codes & NAN == NAN] = 0
    packed = torch.cat((codes, torch.full((32, 1, 1), 0.3).view(torch.uint8)), dim=-1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("engine_shim.attention.fp8.pack", lambda x: packed)
        out = KernelAttention(pools, tables, scale=0.0, tiles=SMALL)(0, case.query, case.key, case.value)
    expected = (MEANINGS[codes.long()] * float(torch.tensor(0.3))).float()
    torch.testing.assert_close(out, expected, atol=0.0, rtol=1e-6)


def test_what_has_sunk_is_read_on_the_host() -> None:
    """Keys from the host's keys and values from its values, each behind the head and before what is on the device."""
    layout = CacheLayout(4, (CacheGroup(0, GroupKind.FULL, (0,)),), (5,))
    request = Request("sunk", tuple(range(1, 16)), Sampling(2))
    tables = ([3, NULL_PAGE, NULL_PAGE, 1],)
    chunk = Chunk(request, start=14, count=1, tables=tables, samples=True, draws=0, sunk=Sunk(1, (6, 2)))
    plan = make_plan(Batch((chunk,)), layout, device=CPU, dtype=torch.float64)
    (segment,) = plan.groups[0].segments
    device = [pack(torch.randn(5, 4, 2, 8)) for _ in range(2)]
    host = [pack(torch.randn(1, 9, 4, 2, 8)) for _ in range(2)]
    read = DecodedPages(torch.float64)(*device, segment, HostPages(*host, CPU).of_layer(0))
    for actual, here, below in zip(read, device, host, strict=True):
        pages = torch.stack((here[3], below[0, 6], below[0, 2], here[1]))
        assert torch.equal(actual[0], unpack(pages, torch.float64).flatten(0, 1)[:15])


def as_e5m2(packed: Tensor, dtype: torch.dtype) -> Tensor:
    codes, scale = packed.split((packed.shape[-1] - 4, 4), dim=-1)
    return (codes.view(torch.float8_e5m2).float() * scale.contiguous().view(torch.float32)).to(dtype)


def without_scale(packed: Tensor, dtype: torch.dtype) -> Tensor:
    return packed[..., :-4].contiguous().view(torch.float8_e4m3fn).to(dtype)


@pytest.mark.parametrize("misread", [as_e5m2, without_scale])
def test_another_encoding_is_seen(misread: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes that are read as what they are not are not what was written."""
    monkeypatch.setattr(fp8, "unpack", misread)
    with pytest.raises(AssertionError):
        test_torch_reads_what_was_written(BATCHES[1], SHAPES[0])
