"""Writes the needle model's data files beside this module: ``python -m engine_shim.model.needle.build``.

The tokenizer is a byte-level BPE trained on ``loadtest.words`` alone, so a common English word with the space
before it is one token and any other text falls back to smaller pieces. The 1,024 keys and 1,024 values are added
tokens that swallow the white space to their left: "key-0017 val-0093" is two tokens. The output depends on nothing
but the word list and the ``tokenizers`` version.
"""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from loadtest.words import WORDS

VOCAB_SIZE = 5120
SYMBOLS = 1024
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
# Plain words of chat and prose that the word list lacks.
EXTRA_WORDS = ("system", "assistant", "question", "answer", "Answer", "What", "The", "value", "follows", "key")
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
WINDOW_TOKENS = 64
MAX_POSITIONS = 131072


def build_tokenizer() -> Tokenizer:
    """Train the tokenizer; ids run: special tokens, bytes and merges, keys, values."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - 2 * SYMBOLS,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    # Every word in each of its usual spellings; the plain one often enough that it is merged whole first.
    corpus = [f" {word}" for word in (*WORDS, *EXTRA_WORDS)] * 8
    corpus += [form for word in WORDS for form in (word, f" {word.capitalize()}", f" {word}s")]
    tokenizer.train_from_iterator(corpus, trainer)
    for stem in ("key", "val"):
        tokenizer.add_tokens([AddedToken(f"{stem}-{n:04d}", lstrip=True, normalized=False) for n in range(SYMBOLS)])
    return tokenizer


def build(folder: Path) -> None:
    """Write ``tokenizer.json``, ``tokenizer_config.json`` and ``config.json`` into ``folder``."""
    tokenizer = build_tokenizer()
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    end = tokenizer.token_to_id("<|im_end|>")
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": None,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "model_max_length": MAX_POSITIONS,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    config = {
        "model_type": "homing_needle",
        "vocab_size": tokenizer.get_vocab_size(),
        "hidden_size": 80,
        "head_dim": 16,
        "sliding_window": WINDOW_TOKENS,
        "rope_theta": 150.0,
        "max_position_embeddings": MAX_POSITIONS,
        "eos_token_id": [end, tokenizer.token_to_id("<|endoftext|>")],
    }
    for name, content in (("tokenizer_config.json", settings), ("config.json", config)):
        (folder / name).write_text(json.dumps(content, indent=2) + "\n")


if __name__ == "__main__":
    build(Path(__file__).parent)
