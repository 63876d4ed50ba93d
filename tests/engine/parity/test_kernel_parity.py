"""A whole rank whose layers attend by the Triton kernels, in Triton's interpreter: transformers' logits and tokens.

Decode steps then run over fixed inputs as they do under CUDA graphs, but for the capture.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from overlapped_rank import OverlappedRank
from parity_rank import ParityRank
from tiny_models import VOCAB, TinyModel, make_tiny_model
from torch.utils._python_dispatch import TorchDispatchMode

from engine_shim.model.decoder import Decoder
from engine_shim.model.loading import load_decoder
from engine_shim.model.needle_text import facts, haystack
from engine_shim.model.tokenizer import read_card
from engine_shim.runner.shadow import ShadowRunner
from engine_shim.runner.torch_runner import TorchRunner
from engine_shim.types import Chunk, Request, Sampling, WindowTails

pytest.importorskip("triton", reason="triton is not installed: pip install 'homing[kernels]'")

from engine_shim.attention import kernel_attention
from engine_shim.runner.graphs import DecodeGraphs, DecodeInputs

# The interpreter is slow, the more so where others compute.
pytestmark = pytest.mark.timeout(400)

TOLERANCE = 2e-4
DELTA_NET_TOLERANCE = 2e-3


@pytest.fixture(scope="module", params=["gemma3", "qwen3_next"])  # windows; recurrent states
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return make_tiny_model(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def decoder(tiny: TinyModel) -> Decoder:
    return load_decoder(read_card(str(tiny.folder)))


def prompt(length: int, *, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, VOCAB) for _ in range(length)]


def greedy(tiny: TinyModel, request: Request) -> list[int]:
    """What transformers says after each token of the request: its own answer, by induction."""
    return tiny.logits(request.tokens)[len(request.prompt) - 1 : -1].argmax(-1).tolist()


def test_logits(tiny: TinyModel, decoder: Decoder) -> None:
    """Cold, in chunks, side by side with decodes, and over a prefix from the cache."""
    rank = ParityRank(decoder, kernels=True, chunk_tokens=45)
    first = rank.generate({"a": prompt(55, seed=1), "b": prompt(9, seed=2)}, max_tokens=4)
    warm = rank.generate({"c": [*first["a"].tokens, *prompt(12, seed=3)]}, max_tokens=3)
    assert warm["c"].cached_tokens == 56
    for name, request in {**first, **warm}.items():
        expected = tiny.logits(request.tokens)
        rows = range(request.cached_tokens, len(request.tokens) - 1)
        actual = torch.stack([rank.logits[name][row] for row in rows])
        tolerance = DELTA_NET_TOLERANCE if tiny.family == "qwen3_next" else TOLERANCE
        torch.testing.assert_close(actual, expected[rows.start : -1], atol=tolerance, rtol=tolerance)
        assert request.output == expected[len(request.prompt) - 1 : -1].argmax(-1).tolist()


def test_decodes_over_fixed_inputs(tiny: TinyModel, decoder: Decoder) -> None:
    """Batches that shrink and grow again pass through the same few inputs, and each answer is transformers'."""
    rank = ParityRank(decoder, kernels=True, graph_decodes=4, record=False, chunk_tokens=96)
    finished = rank.generate({"alone": prompt(30, seed=5)}, max_tokens=3)
    requests = {}
    for name, tokens in {"a": 2, "b": 4, "c": 6, "d": 3}.items():
        requests[name] = Request(name, tuple(prompt(18 + tokens, seed=tokens)), Sampling(max_tokens=tokens))
        rank.scheduler.add(requests[name])
    while rank.scheduler.has_work:
        rank.step()
    for request in (*finished.values(), *requests.values()):
        assert request.output == greedy(tiny, request)
    assert rank.runner._graphs.sizes == [1, 2, 4]


def test_rings(tmp_path: Path) -> None:
    """Windows that go round in rings and are rebuilt: kernels look back no further than where that began."""
    tiny = make_tiny_model("gemma3", tmp_path)
    head = prompt(100, seed=8)
    rank = ParityRank(
        load_decoder(read_card(str(tiny.folder))), kernels=True, chunk_tokens=50, window_tails=WindowTails.RING
    )
    rank.generate({"first": head}, max_tokens=1)
    request = rank.generate({"again": [*head, 9, 10, 11]}, max_tokens=3)["again"]
    assert 0 < rank.rebuilt_positions < len(head)
    expected = tiny.logits(request.tokens)[len(head) : -1]
    actual = torch.stack([rank.logits["again"][row] for row in range(len(head), len(request.tokens) - 1)])
    torch.testing.assert_close(actual, expected, atol=TOLERANCE, rtol=TOLERANCE)
    assert request.output == greedy(tiny, request)


class _Guesses:
    """One token that holds, then one that does not."""

    buffers = ()

    def __init__(self, answer: list[int]) -> None:
        self._answer = answer

    def propose(self, chunks: Sequence[Chunk]) -> list[tuple[int, ...]]:
        told = [chunk.start + 1 - len(chunk.request.prompt) for chunk in chunks]
        return [(*self._answer[n : n + 1], 0)[: chunk.room] for n, chunk in zip(told, chunks, strict=True)]

    def observe(self, *_: object) -> None:
        pass


def test_drafts(tiny: TinyModel, decoder: Decoder) -> None:
    """Drafts that are tried behind a decode run through the kernels as a chunk does, and change no answer."""
    ids = prompt(20, seed=7)
    answer = ParityRank(decoder, record=False).generate({"a": ids}, max_tokens=8)["a"].output
    rank = ParityRank(decoder, kernels=True, record=False, drafter=_Guesses(answer), draft_tokens=2)
    request = rank.generate({"a": ids}, max_tokens=8)["a"]
    stats = rank.scheduler.stats()
    assert stats.drafted_tokens > sum(stats.accepted_tokens) >= 3
    assert request.output == answer == greedy(tiny, request)


class _Log(TorchDispatchMode):
    """Every operation that runs, with all that is not a tensor, the shapes of what is, and what the host brings."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def known(value: Any) -> Any:
            if isinstance(value, list | tuple):
                return tuple(known(each) for each in value)
            if isinstance(value, torch.UntypedStorage):  # the interpreter's own doing
                return value.nbytes()
            return (tuple(value.shape), value.dtype) if isinstance(value, torch.Tensor) else value

        # What comes from the host is the same in every replay: its values count, too.
        values = args[0].tolist() if func is torch.ops.aten.lift_fresh.default else None
        self.operations.append((str(func), known(args), known(tuple((kwargs or {}).values())), values))
        return func(*args, **(kwargs or {}))


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the kernels are launched with but for tensors: grids, scalars and what is fixed at compilation."""
    seen: list[Any] = []

    class Spy:
        def __init__(self, kernel: Any) -> None:
            self._kernel = kernel

        def __getitem__(self, grid: Any) -> Any:
            def launch(*args: Any, **sizes: Any) -> None:
                scalars = [value for value in args if not isinstance(value, torch.Tensor)]
                seen.append((grid, scalars, sizes))
                self._kernel[grid](*args, **sizes)

            return launch

    for name in ("decode_kernel", "join_kernel", "extend_kernel"):
        monkeypatch.setattr(kernel_attention, name, Spy(getattr(kernel_attention, name)))
    return seen


def decode(rank: ParityRank, tokens: int, *, page: int) -> Chunk:
    """The last of so many tokens, on pages from ``page`` on."""
    request = Request("r", tuple(prompt(tokens, seed=tokens)), Sampling(max_tokens=1))
    tables = [list(range(page, page + 20)) for _ in rank.layout.groups]
    if rank.layout.state is not None:
        tables[rank.layout.state.index] = [page % 40 + 1, page % 40 + 2]
    return Chunk(request, tokens - 1, 1, tuple(tables), samples=True, draws=0)


def test_who_has_left_is_gone(tiny: TinyModel, decoder: Decoder) -> None:
    """Places that a smaller batch leaves empty read nothing, start from no state and write to the null page."""
    rank = ParityRank(decoder)
    inputs = DecodeInputs(rank.layout, size=4, max_context_tokens=160, device=torch.device("cpu"))
    chunks = [decode(rank, length, page=1 + 21 * n) for n, length in enumerate([3, 90, 8, 40])]
    inputs.fill(chunks)
    assert inputs.tables.lengths.tolist() == [3, 90, 8, 40]
    assert all((table.writes >= rank.layout.page_tokens).all() for table in inputs.tables.groups)
    inputs.fill(chunks[1:2])
    assert inputs.tables.lengths.tolist() == [90, 0, 0, 0]
    assert inputs.positions.tolist() == [89, 0, 0, 0]
    assert inputs.tokens[1:].tolist() == [0, 0, 0]
    for table in inputs.tables.groups:
        assert table.writes[0] >= rank.layout.page_tokens
        assert table.writes[1:].tolist() == [0, 0, 0]
    if rank.layout.state is not None:
        assert inputs.states.fresh.tolist() == [False, True, True, True]
        assert inputs.states.sources.tolist() == [23, 0, 0, 0]
        assert inputs.states.targets.tolist() == [24, 0, 0, 0]


@torch.inference_mode()
def test_a_replay_would_serve_any_step(tiny: TinyModel, decoder: Decoder, launches: list[Any]) -> None:
    """What a step of one size launches is the same for any lengths, pages and tokens, and for fewer sequences."""
    rank = ParityRank(decoder, kernels=True)
    graphs = DecodeGraphs(decoder, rank.runner.pools, rank.runner.states, largest=4)

    logs = []
    for lengths in ([3, 90, 8, 40], [37, 1, 50]):
        launches.clear()
        chunks = [decode(rank, length, page=1 + 21 * n) for n, length in enumerate(lengths)]
        graphs.logits(chunks, put_awaited=lambda tokens: None)
        graphs._steps[4].inputs.fill(chunks)
        with _Log() as log:
            graphs._steps[4].replay()
        logs.append((log.operations, list(launches)[len(launches) // 2 :]))
    assert logs[0] == logs[1]
    assert len(logs[0][0]) > 20
    if tiny.family == "gemma3":  # the embedding's scale, which shows that such values are seen
        assert [values for *_, values in logs[0][0] if values is not None] == [8.0]
    assert {grid[0] for grid, _, _ in logs[0][1]} == {4}


def test_a_step_ahead_reads_awaited_tokens_from_fixed_inputs(decoder: Decoder) -> None:
    """Decodes launched before the tokens they run are known on the host answer as steps one by one do, by torch."""
    plain, ahead = (OverlappedRank(decoder, overlaps=overlaps) for overlaps in (False, True))
    ahead.runner = TorchRunner(decoder, ahead.layout, kernels=True, graph_decodes=2)
    ahead.shadow = ShadowRunner(ahead.runner, ahead.layout, generations=ahead.scheduler.generations)
    answers = []
    for rank in (plain, ahead):
        requests = [Request(name, (5, 7, len(name), 9), Sampling(6, ignore_eos=True)) for name in ("a", "bb")]
        for request in requests:
            rank.scheduler.add(request)
        while rank.scheduler.has_work:
            rank.step()
        answers.append([request.output for request in requests])
    assert answers[0] == answers[1]
    assert ahead.ahead >= 4
    assert ahead.runner._graphs.sizes == [2]


def test_needles(tmp_path: Path) -> None:
    """Questions over one cached text of 600 tokens, the kernels reading it through a window and whole."""
    card = read_card("needle")
    rank = ParityRank(
        load_decoder(card),
        page_tokens=16,
        pool_tokens=2048,
        window_pool_tokens=480,
        chunk_tokens=256,
        eos_token_ids=frozenset(card.eos_token_ids),
        record=False,
        kernels=True,
        graph_decodes=4,
    )
    known = facts(4, seed=1)
    text = haystack(600, known, seed=2)
    for fact in known:
        ids = card.tokenizer.encode(text + fact.question, add_special_tokens=False).ids
        request = rank.generate({fact.key: ids}, max_tokens=4)[fact.key]
        assert [card.tokenizer.id_to_token(token) for token in request.output] == [fact.value, "<|im_end|>"]
    assert rank.scheduler.stats().cached_tokens >= 3 * 560
