"""The Triton kernels, in Triton's interpreter, against the torch reference in float64 on the same pages."""

from __future__ import annotations

import inspect
import mmap
import random
import types
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from engine_shim.attention.paged import PagedAttention, Pools
from engine_shim.attention.plan import make_plan
from engine_shim.types import Batch, CacheGroup, CacheLayout, Chunk, GroupKind, Request, Sampling

pytest.importorskip("triton", reason="triton is not installed: pip install 'homing[kernels]'")

from engine_shim.attention import kernel_attention, kernels
from engine_shim.attention.kernel_attention import KernelAttention, Tiles, attend_pages, splits_for
from engine_shim.attention.tables import GroupTable, PageTables, page_tables

# The interpreter is slow, the more so where others compute.
pytestmark = pytest.mark.timeout(400)

CPU = torch.device("cpu")
SCALE = 0.5
# Float32 against float64, of values around one.
TOLERANCE = 2e-6
#: Small enough that a context of a few dozen tokens has several tiles.
SMALL = Tiles(rows=16, keys=16)


@dataclass(frozen=True)
class Shape:
    """Of a model and its pages."""

    kv_heads: int = 2
    repeats: int = 2
    head_dim: int = 8
    page_tokens: int = 4
    window_tokens: int = 6


@dataclass(frozen=True)
class Case:
    """A batch over pages that hold its past, with NaN in every slot that it has no business with."""

    layout: CacheLayout
    chunks: tuple[Chunk, ...]
    pools: Pools
    query: Tensor
    key: Tensor
    value: Tensor

    def copy_of_pools(self, dtype: torch.dtype) -> Pools:
        keys, values = (tuple(p.to(dtype, copy=True) for p in pools) for pools in (self.pools.keys, self.pools.values))
        return Pools(layout=self.layout, keys=keys, values=values, barrier=self.pools.barrier)

    def reference(self) -> list[Tensor]:
        """The torch path in float64: layer 0 looks back over everything, layer 1 has a window."""
        plan = make_plan(Batch(self.chunks), self.layout, device=CPU, dtype=torch.float64)
        attention = PagedAttention(self.copy_of_pools(torch.float64), plan, scale=SCALE)
        return [attention(layer, *(x.double() for x in (self.query, self.key, self.value))) for layer in (0, 1)]

    def by_kernels(self, tiles: Tiles | None) -> list[Tensor]:
        tables = page_tables(self.chunks, self.layout, device=CPU)
        attention = KernelAttention(self.copy_of_pools(self.query.dtype), tables, scale=SCALE, tiles=tiles)
        return [attention(layer, self.query, self.key, self.value) for layer in (0, 1)]


def make_case(
    lengths: list[tuple[int, int]],
    shape: Shape = Shape(),
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    window_start: int = 0,
) -> Case:
    """``lengths``: of each sequence the tokens in the cache and those of the batch. Pages lie anywhere.

    The layer with a window has nothing that lies before ``window_start``.
    """
    rng = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    page = shape.page_tokens
    pages = 1 + sum(-(-(start + count) // page) for start, count in lengths)
    layout = CacheLayout(
        page_tokens=page,
        groups=(
            CacheGroup(index=0, kind=GroupKind.FULL, layers=(0,)),
            CacheGroup(index=1, kind=GroupKind.WINDOW, layers=(1,), window_tokens=shape.window_tokens),
        ),
        pages=(pages, pages),
    )
    pools = Pools.allocate(layout, kv_heads=shape.kv_heads, head_dim=shape.head_dim, device=CPU, dtype=dtype)
    for pool in (*pools.keys, *pools.values):
        pool.fill_(torch.nan)
    free = [rng.sample(range(1, pages), pages - 1) for _ in layout.groups]
    chunks = []
    for number, (start, count) in enumerate(lengths):
        tables = tuple([pool.pop() for _ in range(-(-(start + count) // page))] for pool in free)
        passed = max(window_start, start - shape.window_tokens + 1) // page
        tables[1][:passed] = [0] * passed
        for group, table in enumerate(tables):
            for pool in (pools.keys[group], pools.values[group]):
                past = torch.randn(start, shape.kv_heads, shape.head_dim, generator=generator)
                for position in range(window_start if group else 0, start):
                    if table[position // page]:
                        pool[0, table[position // page], position % page] = past[position].to(dtype)
        request = Request(id=str(number), prompt=(0,) * (start + count), sampling=Sampling(max_tokens=1))
        chunks.append(Chunk(request, start, count, tables, samples=True, draws=0, window_start=window_start))
    tokens = sum(count for _, count in lengths)
    query = torch.randn(tokens, shape.kv_heads * shape.repeats, shape.head_dim, generator=generator).to(dtype)
    key, value = torch.randn(2, tokens, shape.kv_heads, shape.head_dim, generator=generator).to(dtype)
    return Case(layout, tuple(chunks), pools, query, key, value)


def assert_equal(case: Case, tiles: Tiles | None = SMALL, *, tolerance: float = TOLERANCE) -> None:
    for actual, expected in zip(case.by_kernels(tiles), case.reference(), strict=True):
        torch.testing.assert_close(actual.double(), expected, atol=tolerance, rtol=tolerance)


@given(
    lengths=st.lists(st.tuples(st.integers(0, 70), st.integers(1, 20)), min_size=1, max_size=4),
    shape=st.builds(
        Shape,
        kv_heads=st.integers(1, 2),
        repeats=st.sampled_from([1, 2, 3, 7]),
        head_dim=st.sampled_from([8, 16, 24]),
        page_tokens=st.integers(1, 17),
        window_tokens=st.integers(1, 40),
    ),
    seed=st.integers(0, 10**6),
)
@settings(max_examples=15, deadline=None)
def test_any_batch(lengths: list[tuple[int, int]], shape: Shape, seed: int) -> None:
    """Prefills and decodes of any lengths, pages of any size, any window, heads shared by any number."""
    assert_equal(make_case(lengths, shape, seed=seed))


@pytest.mark.parametrize("start", [0, 1, 3, 4, 5, 15, 16, 17, 31, 32, 33])
def test_boundaries(start: int) -> None:
    """Contexts that end just before, at and behind the edge of a page and of a tile; the empty one too."""
    assert_equal(make_case([(start, 1), (start, 2)], Shape(page_tokens=4)))


@pytest.mark.parametrize("window", [1, 2, 15, 16, 17, 18])
def test_window_edge(window: int) -> None:
    """The key just inside the window counts and the one just outside does not, whatever tile it is in."""
    case = make_case([(40, 1), (30, 12)], Shape(window_tokens=window), seed=window)
    assert_equal(case)
    # The check has power: with the window of the engine's neighbours, one wider or narrower, it fails.
    for other in {window - 1, window + 1} - {0}:
        tables = page_tables(case.chunks, case.layout, device=CPU)
        pools = case.copy_of_pools(torch.float32)
        group = CacheGroup(index=1, kind=GroupKind.WINDOW, layers=(1,), window_tokens=other)
        wrong = KernelAttention(
            Pools(
                layout=CacheLayout(page_tokens=4, groups=(case.layout.groups[0], group), pages=case.layout.pages),
                keys=pools.keys,
                values=pools.values,
                barrier=pools.barrier,
            ),
            tables,
            scale=SCALE,
            tiles=SMALL,
        )(1, case.query, case.key, case.value)
        assert not torch.allclose(wrong.double(), case.reference()[1], atol=TOLERANCE, rtol=TOLERANCE)


def test_windows_that_begin_late() -> None:
    """Where a window is computed anew, nothing before it is read, though the window reaches further."""
    assert_equal(make_case([(40, 1), (35, 9), (33, 2)], Shape(window_tokens=20), window_start=33))


def test_half_precision() -> None:
    """float16 in, sums in float32, float16 out; the tiles are those of service. (bfloat16 the interpreter cannot.)"""
    assert_equal(make_case([(100, 1), (90, 30)], Shape(head_dim=64), dtype=torch.float16), None, tolerance=4e-3)


def test_a_long_context_is_split() -> None:
    """A decode over 3,000 keys goes to 4 programs, of which some tiles are cut at their ends, and is one softmax."""
    assert splits_for(2, programs=kernel_attention._programs(CPU)) == 4
    assert_equal(make_case([(3001, 1)], Shape(page_tokens=16, window_tokens=1000)), None)


@pytest.mark.parametrize(
    ("without", "programs", "splits"), [(1, 16, 16), (2, 16, 8), (3, 16, 4), (16, 16, 1), (500, 264, 1), (1, 264, 64)]
)
def test_splits(without: int, programs: int, splits: int) -> None:
    """As many as fill the device, a power of two, 64 at most."""
    assert splits_for(without, programs=programs) == splits


def test_places_that_nobody_fills() -> None:
    """A decode of length 0 reads nothing, not even what its page table says, and gives zeros."""
    pool = torch.full((3, 4, 2, 8), torch.nan)
    tables = PageTables(
        query_starts=torch.arange(3, dtype=torch.int32),
        lengths=torch.tensor([0, 0], dtype=torch.int32),
        decodes=torch.tensor([0, 1], dtype=torch.int32),
        extends=torch.empty(0, dtype=torch.int32),
        longest=1,
        groups=(
            GroupTable(
                writes=torch.zeros(2, dtype=torch.int64),
                pages=torch.full((2, 5), 10**9, dtype=torch.int32),
                starts=torch.zeros(2, dtype=torch.int32),
            ),
        ),
    )
    out = attend_pages(torch.randn(2, 4, 8), pool, pool, tables=tables, group=0, window_tokens=None, scale=1.0)
    assert torch.equal(out, torch.zeros(2, 4, 8))


# --- addresses -------------------------------------------------------------------------------------

_ELEMENTS = 2**32 + 2**20
_MAP_NORESERVE = 0x4000  # Linux's; Python names it from 3.13 on


def far_pool(page_elements: int) -> Tensor:
    """A float16 pool of more than 2^32 elements, of which memory holds only what is touched."""
    memory = mmap.mmap(-1, 2 * _ELEMENTS, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE)
    pages = _ELEMENTS // page_elements
    return torch.frombuffer(memory, dtype=torch.float16, count=pages * page_elements).view(pages, 4, 2, -1)


def attend_far(pool: Tensor, counts: list[int]) -> tuple[Tensor, Tensor]:
    """What the kernels and the arithmetic written out say of pages behind the 2^32nd element."""
    torch.manual_seed(0)
    first = 2**32 // pool.stride(0)
    lengths = [10, 12]
    held = [[first + 5, first + 2, first + 9], [first + 3, first + 1, first + 7]]
    for page in (*held[0], *held[1]):
        pool[page] = torch.randn(pool.shape[1:])
    query = torch.randn(sum(counts), 2, pool.shape[3]).half()
    tables = PageTables(
        query_starts=torch.tensor([0, counts[0], sum(counts)], dtype=torch.int32),
        lengths=torch.tensor(lengths, dtype=torch.int32),
        decodes=torch.tensor([i for i, count in enumerate(counts) if count == 1], dtype=torch.int32),
        extends=torch.tensor([i for i, count in enumerate(counts) if count > 1], dtype=torch.int32),
        longest=max(counts),
        groups=(
            GroupTable(
                writes=torch.empty(0),
                pages=torch.tensor(held, dtype=torch.int32),
                starts=torch.zeros(2, dtype=torch.int32),
            ),
        ),
    )
    actual = kernel_attention.attend_pages(query, pool, pool, tables=tables, group=0, window_tokens=None, scale=1.0)
    rows = []
    for sequence, (length, pages, count) in enumerate(zip(lengths, held, counts, strict=True)):
        past = torch.cat([pool[page] for page in pages])[:length].double()
        for number in range(count):
            seen = past[: length - count + 1 + number]
            q = query[sum(counts[:sequence]) + number].double()
            weights = torch.einsum("khd,hd->hk", seen, q).softmax(-1)
            rows.append(torch.einsum("hk,khd->hd", weights, seen))
    return actual.double(), torch.stack(rows)


@pytest.mark.parametrize("counts", [[1, 1], [3, 2]], ids=["decode", "extend"])
def test_addresses_beyond_32_bits(counts: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages behind the 2^32nd element of a pool are found; kernels that number slots in 32 bits read others."""
    pool = far_pool(4 * 2 * 16)
    actual, expected = attend_far(pool, counts)
    torch.testing.assert_close(actual, expected, atol=5e-3, rtol=5e-3)

    source = inspect.getsource(kernels)
    cut = source.replace("page.to(tl.int64)", "page")
    assert cut != source
    narrow = types.ModuleType("narrow_kernels")
    _execute(cut, narrow, monkeypatch)
    for name in ("decode_kernel", "extend_kernel"):
        monkeypatch.setattr(kernel_attention, name, getattr(narrow, name))
    wrong, _ = attend_far(pool, counts)
    assert not torch.allclose(wrong, expected, atol=0.1)


def _execute(source: str, module: types.ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a module's source that lies in no file; Triton's interpreter asks for it by name."""
    import linecache

    name = "<narrow kernels>"
    monkeypatch.setitem(linecache.cache, name, (len(source), None, source.splitlines(keepends=True), name))
    exec(compile(source, name, "exec"), module.__dict__)
