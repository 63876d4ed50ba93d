"""Steps that are launched ahead change no answer: real models, two steps deep, with NaN in every free page."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from overlapped_rank import OverlappedRank
from tiny_models import VOCAB, make_tiny_model
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from engine_shim.model.decoder import Decoder
from engine_shim.model.loading import load_decoder
from engine_shim.model.tokenizer import read_card
from engine_shim.runner.shadow import ShadowRunner
from engine_shim.runner.torch_runner import TorchRunner
from engine_shim.types import Batch, FinishReason, Request, Sampling, StepLanding

PROMPTS = {
    name: tuple((13 * i * i + 7 * i + length) % (VOCAB - 3) + 3 for i in range(length))
    for name, length in {"a": 5, "b": 40, "c": 63, "d": 90, "e": 17, "f": 33}.items()
}
SAMPLINGS = {
    "a": Sampling(40, ignore_eos=True),
    "b": Sampling(25, temperature=0.8, top_p=0.9, seed=3, ignore_eos=True),
    "c": Sampling(30, logprobs=2, ignore_eos=True),
    "d": Sampling(35, temperature=1.2, top_k=20, seed=5, logit_bias=((9, 2.0),), min_tokens=4),
    "e": Sampling(12, ignore_eos=True, presence_penalty=0.7),
    "f": Sampling(33, temperature=1.5, seed=1, stop_token_ids=frozenset(range(0, VOCAB, 9))),
}


@pytest.fixture(scope="module", params=["llama", "gemma3", "qwen3_next"])
def decoder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    """Full attention alone, with sliding windows, with recurrent layers; float64."""
    tiny = make_tiny_model(request.param, tmp_path_factory.mktemp(request.param))
    return load_decoder(read_card(str(tiny.folder)), dtype=torch.float64)


def answers(rank: OverlappedRank) -> dict[str, tuple[list[int], FinishReason | None]]:
    """What all requests come to; then some again, behind what the others have left in the cache."""
    requests = [Request(name, prompt, SAMPLINGS[name]) for name, prompt in PROMPTS.items()]
    requests += [Request(f"{name} again", PROMPTS[name], SAMPLINGS[name]) for name in "bdc"]
    for request in requests:
        rank.scheduler.add(request)
    while rank.scheduler.has_work:
        rank.step()
    return {request.id: (request.output, request.finish) for request in requests}


def test_answers_are_the_same(decoder: Decoder) -> None:
    """Greedy or drawn, with stops, penalties and logprobs, in a pool so small that pages are used again at once."""
    plain = OverlappedRank(decoder, overlaps=False)
    overlapped = OverlappedRank(decoder, overlaps=True)
    assert answers(overlapped) == answers(plain)
    assert overlapped.ahead >= 30
    assert overlapped.scheduler.stats().evicted_pages[0] > 0
    assert overlapped.told.keys() == plain.told.keys()
    for name, logprobs in plain.told.items():
        assert [each.logprob for each in overlapped.told[name]] == pytest.approx([each.logprob for each in logprobs])


class NoWayBack(TorchFunctionMode):
    """Refuses what brings a tensor's contents to the host, or needs them there: on CUDA each would wait for it."""

    refused = frozenset({"item", "tolist", "cpu", "numpy", "nonzero", "__bool__", "__int__", "__float__", "__index__"})

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in self.refused:
            raise AssertionError(f"{name} waits for the device")
        # To bring pageable memory there waits as well: that goes through ``to_device``, and through nothing else.
        goes = [each for each in (*args[1:], *(kwargs or {}).values()) if isinstance(each, torch.device)]
        if goes and (name in {"tensor", "as_tensor"} or (name == "to" and not (kwargs or {}).get("non_blocking"))):
            raise AssertionError(f"{name} to a device waits for the device")
        return func(*args, **(kwargs or {}))


class NoSync(TorchDispatchMode):
    """The same below Python: what torch's own operators ask of the device, boolean indices among them."""

    refused = frozenset({"aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::equal"})

    def __init__(self) -> None:
        super().__init__()
        self.operators = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operators += 1
        name = func._schema.name
        indices = args[1] if name in {"aten::index", "aten::index_put_", "aten::index_put"} else ()
        if name in self.refused or any(index is not None and index.dtype is torch.bool for index in indices):
            raise AssertionError(f"{name} waits for the device")
        return func(*args, **(kwargs or {}))


class StrictRunner(TorchRunner):
    """Launches under both watchmen."""

    operators = 0

    def launch(self, batch: Batch) -> StepLanding:
        with NoWayBack(), NoSync() as watched:
            landing = super().launch(batch)
        self.operators += watched.operators
        return landing


def test_no_step_waits_for_the_device_before_it_lands(decoder: Decoder) -> None:
    """Prefill, decode and every way of sampling are launched without one look at a result."""
    rank = OverlappedRank(decoder, overlaps=True)
    rank.runner = StrictRunner(decoder, rank.layout)
    rank.shadow = ShadowRunner(rank.runner, rank.layout, generations=rank.scheduler.generations)
    expected = answers(OverlappedRank(decoder, overlaps=False))
    assert answers(rank) == expected
    assert rank.runner.operators > 1000


@pytest.mark.parametrize(
    "sync",
    [
        Tensor.item,
        Tensor.tolist,
        lambda x: x[x > 0],
        bool,
        lambda x: torch.tensor([1], device=x.device),
        lambda x: x.to(x.device),
    ],
)
def test_the_watchmen_notice(sync: Any) -> None:
    """A look at a result while a step is launched is an error."""
    with pytest.raises(AssertionError, match="waits for the device"), NoWayBack(), NoSync():
        sync(torch.ones(1))
