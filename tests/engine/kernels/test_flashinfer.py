"""FlashInfer's wrappers are given what they document: against the torch reference in float64 on the same pages.

There is no GPU, so their place is taken by a stand-in, which attends as FlashInfer's documentation has it, and where
the package is installed also by a reference of FlashInfer's own; the stand-in's signatures are compared with its.
"""

from __future__ import annotations

import inspect
import sys
from itertools import pairwise, repeat

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_kernels import SCALE, Case, Shape, make_case
from torch import Tensor

from engine_shim.attention import flashinfer_attention
from engine_shim.attention.flashinfer_attention import FlashInfer
from tests.fakes import flashinfer_stand_in
from tests.fakes.flashinfer_stand_in import Planned, documented

TOLERANCE = 2e-6
LENGTHS = [[(5, 1), (0, 1), (33, 1)], [(0, 9), (17, 1), (6, 13), (40, 2)], [(7, 8)], [(8, 1)]]


@pytest.fixture(autouse=True)
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", flashinfer_stand_in)


def by_flashinfer(case: Case) -> list[Tensor]:
    pools = case.copy_of_pools(case.query.dtype)
    attention = FlashInfer(pools, heads=case.query.shape[1], scale=SCALE).plan(case.chunks)
    return [attention(layer, case.query, case.key, case.value) for layer in (0, 1)]


def assert_equal(case: Case) -> None:
    for actual, expected in zip(by_flashinfer(case), case.reference(), strict=True):
        torch.testing.assert_close(actual.double(), expected, atol=TOLERANCE, rtol=TOLERANCE)


@given(
    lengths=st.lists(st.tuples(st.integers(0, 70), st.integers(1, 20)), min_size=1, max_size=4),
    shape=st.builds(
        Shape,
        kv_heads=st.integers(1, 3),
        repeats=st.integers(1, 3),
        page_tokens=st.integers(1, 9),
        window_tokens=st.integers(1, 30),
    ),
    decodes=st.booleans(),
    seed=st.integers(0, 99),
)
@settings(max_examples=60, deadline=None)
def test_any_batch(lengths: list[tuple[int, int]], shape: Shape, decodes: bool, seed: int) -> None:
    """Whatever is no sequence's own holds NaN; windows begin in the middle of pages; decodes have a wrapper."""
    assert_equal(make_case([(start, 1 if decodes else count) for start, count in lengths], shape, seed=seed))


def test_a_window_that_is_rebuilt_begins_where_it_has_something() -> None:
    """Of the layer with a window nothing lies before that."""
    assert_equal(make_case([(24, 5), (29, 1)], window_start=24))


def bad_window(plan: Planned, *rest: Tensor) -> Tensor:
    """As if ``window_left`` counted the query itself."""
    return documented(Planned(**{**vars(plan), "window_left": plan.window_left - 1}), *rest)


def bad_length(plan: Planned, *rest: Tensor) -> Tensor:
    """As if the last page were full."""
    full = torch.full_like(plan.last_tokens, plan.page_size)
    return documented(Planned(**{**vars(plan), "last_tokens": full}), *rest)


@pytest.mark.parametrize("reading", [bad_window, bad_length])
def test_another_reading_is_seen(reading: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """Arguments that are meant otherwise than they are read change what comes out."""
    monkeypatch.setattr(flashinfer_stand_in._Wrapper, "attend", staticmethod(reading))
    with pytest.raises((AssertionError, RuntimeError)):
        assert_equal(make_case(LENGTHS[1]))


def test_two_plans_stand_at_once() -> None:
    """The step behind is planned before the one that runs has read its own: it has other wrappers."""
    cases = [make_case([(20, 1), (3, 1)], seed=seed) for seed in (1, 2)]
    pools = cases[0].copy_of_pools(torch.float32)
    infer = FlashInfer(pools, heads=cases[0].query.shape[1], scale=SCALE)
    first = infer.plan(cases[0].chunks)
    infer.plan(cases[1].chunks)
    for layer, expected in enumerate(cases[0].reference()):
        actual = first(layer, cases[0].query, cases[0].key, cases[0].value)
        torch.testing.assert_close(actual.double(), expected, atol=TOLERANCE, rtol=TOLERANCE)


def test_one_set_of_wrappers_is_not_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planned over, a wrapper attends to what the step behind is to attend to."""
    monkeypatch.setattr(flashinfer_attention, "cycle", lambda sets: repeat(sets[0]))
    with pytest.raises(AssertionError):
        test_two_plans_stand_at_once()


# --- beside the package itself -----------------------------------------------------------------------------


@pytest.fixture
def real(monkeypatch: pytest.MonkeyPatch) -> object:
    """The package; importing it needs no GPU."""
    monkeypatch.delitem(sys.modules, "flashinfer")
    return pytest.importorskip("flashinfer", reason="flashinfer is not installed: pip install flashinfer-python")


@pytest.mark.parametrize("name", ["BatchPrefillWithPagedKVCacheWrapper", "BatchDecodeWithPagedKVCacheWrapper"])
def test_the_signatures_are_flashinfers(real: object, name: str) -> None:
    """What is given by place has that place there, what is given by name has that name."""
    ours, theirs = getattr(flashinfer_stand_in, name), getattr(real, name)
    for method in ("__init__", "plan", "run"):
        mine, its = (dict(inspect.signature(getattr(each, method)).parameters) for each in (ours, theirs))
        if method == "plan" and hasattr(theirs, "_plan_impl"):  # which takes what ``plan`` passes on
            its = dict(inspect.signature(theirs._plan_impl).parameters)
        by_place = [key for key, each in mine.items() if each.kind is each.POSITIONAL_OR_KEYWORD]
        named = [key for key, each in mine.items() if each.kind is each.KEYWORD_ONLY]
        if method == "plan":
            assert list(its)[: len(by_place)] == by_place
        assert len(its) >= len(by_place)
        assert set(named) <= its.keys()


@pytest.mark.parametrize("lengths", LENGTHS)
def test_flashinfers_own_reference_agrees(
    real: object, lengths: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one that it documents its paged kernels of another vendor with, which have the same windows and lengths."""
    templates = pytest.importorskip("flashinfer.trace.templates.attention")

    def theirs(plan: Planned, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        bounds = plan.page_starts.tolist()
        width = max(after - before for before, after in pairwise(bounds))
        table = torch.zeros(len(bounds) - 1, width, dtype=torch.int32)
        for row, (before, after) in enumerate(pairwise(bounds)):
            table[row, : after - before] = plan.pages[before:after]
        return templates._trtllm_paged_attention_reference(
            query,
            torch.stack((keys, values), dim=1),
            table,
            torch.tensor(plan.lengths()),
            causal=True,
            kv_layout="NHD",
            bmm1_scale=plan.scale,
            cum_seq_lens_q=plan.query_starts,
            window_left=plan.window_left,
        )

    monkeypatch.setattr(flashinfer_stand_in._Wrapper, "attend", staticmethod(theirs))
    monkeypatch.setitem(sys.modules, "flashinfer", flashinfer_stand_in)
    assert_equal(make_case(lengths))
