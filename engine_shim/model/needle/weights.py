"""The needle model's weights, set by hand: it looks up, anywhere in its context, the value that followed a key.

The residual stream is a row of named sections. A token's embedding fills ``key`` or ``value`` with its symbol's
number, ten bits written as ±1, and ``next`` with the token that follows where nobody asked for anything.

- Layer 0, window and rope, copies ``key`` sections. Head 0: a value's score peaks at distance 1, so the key before
  it goes to ``previous``; any other token looks away from keys, and gets nothing. Head 1: scores are zero for all
  but keys and fall with distance, so the latest key of the window goes to ``asked``.
- Layer 1, full attention without positions, compares ``asked`` with every position's ``previous`` and copies the
  ``value`` of the position that matches to ``answer``. Where none does, ordinary tokens attract it: no answer.
- The head prefers a value's end of sequence to ``answer``, and ``answer`` to ``next``.

So a wrong slot in the window pool shows as a wrong key, and one in the full pool as a wrong value. All numbers but
the rotations are exact in float32. Scores are sharp enough for 128 k positions: the runner-up is ``e**-32`` behind
in layer 1, ``e**-20`` in layer 0, where only 64 positions compete.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from engine_shim.model.decoder import LayerWeights, Weights, rope_frequencies
from engine_shim.model.needle.build import SYMBOLS
from engine_shim.model.tokenizer import ModelCard
from loadtest.words import WORDS

SYMBOL_BITS = 10
TOKEN_BITS = 13


# Columns of the residual stream. A symbol's section ends with a flag that says it is there.
KEY = slice(0, 11)
PREVIOUS = slice(11, 22)
ASKED = slice(22, 33)
VALUE = slice(33, 44)
ANSWER = slice(44, 54)
NEXT = slice(54, 67)
ONE = 67
IS_A_KEY = KEY.stop - 1
IS_A_VALUE = VALUE.stop - 1

# Layer 0: sharpness of "the token before", and of "the latest key" with the phase that keeps its score positive
# and falling over the whole window.
BEFORE = 48.0
LATEST = 2500.0
LATEST_PHASE = 0.7
# Layer 1. Equal keys match in 10 bits, different ones at most 9 to 1, which is 8. So a fact scores 1 if it is the
# one asked for and -1 or less if not, an ordinary token 0, a value without a key -1, a key itself far less.
SHARP = 32.0
AFTER_KEY = -8.0
IS_VALUE = -1.0
IS_KEY = -20.0
# The head: 13 matching bits of ``next`` weigh 13, ten of ``answer`` 640, and a value's own ``next`` outweighs both.
ANSWER_WEIGHT = 64.0
END_WEIGHT = 1024.0


def needle_weights(card: ModelCard, *, device: torch.device, dtype: torch.dtype) -> Weights:
    """Weights for the needle model's config and tokenizer."""
    embedding, head = _tables(card)
    layers = (_copy_layer(card), _lookup_layer(card))

    def place(tensor: Tensor) -> Tensor:
        return tensor.to(device, dtype)

    return Weights(
        embedding=place(embedding),
        layers=tuple(LayerWeights(qkv=place(layer.qkv), output=place(layer.output)) for layer in layers),
        final_norm=None,
        head=place(head),
    )


def _tables(card: ModelCard) -> tuple[Tensor, Tensor]:
    """Embedding and head, ``[vocab, hidden]``."""
    vocab_size, hidden_size = card.config.vocab_size, card.config.hidden_size
    token_bits = _bits(vocab_size, TOKEN_BITS)
    symbol_bits = _bits(SYMBOLS, SYMBOL_BITS)
    keys = _ids(card, [f"key-{n:04d}" for n in range(SYMBOLS)])
    values = _ids(card, [f"val-{n:04d}" for n in range(SYMBOLS)])
    words = _ids(card, [f"Ġ{word}" for word in WORDS])

    # Filler walks through all words in one cycle (a full-period linear congruence); any other token enters it.
    step = torch.arange(len(WORDS)) * 613 + 29
    following = words[torch.arange(vocab_size) % len(WORDS)]
    following[words] = words[step % len(WORDS)]
    following[values] = card.eos_token_ids[0]

    embedding = torch.zeros(vocab_size, hidden_size)
    embedding[keys, KEY] = _flagged(symbol_bits)
    embedding[values, VALUE] = _flagged(symbol_bits)
    embedding[:, NEXT] = token_bits[following]
    embedding[values, NEXT] *= END_WEIGHT
    embedding[:, ONE] = 1.0

    head = torch.zeros(vocab_size, hidden_size)
    head[:, NEXT] = token_bits
    head[values, ANSWER] = ANSWER_WEIGHT * symbol_bits
    return embedding, head


def _copy_layer(card: ModelCard) -> LayerWeights:
    """Layer 0. Pair i of a head is dimensions i and i + head_dim / 2; the slowest pair is head 1's alone."""
    config = card.config
    rope = config.layers[0].rope
    assert rope is not None
    half = config.head_dim // 2
    frequencies = rope_frequencies(rope, config.head_dim)
    slowest = half - 1

    query, key, value = _projections(card)
    # A query turned back by one position meets an unturned key at distance 1.
    query[0, :slowest, IS_A_VALUE] = BEFORE * frequencies[:slowest].cos()
    query[0, half : half + slowest, IS_A_VALUE] = -BEFORE * frequencies[:slowest].sin()
    latest = LATEST * torch.tensor([math.cos(LATEST_PHASE), math.sin(LATEST_PHASE)])
    query[1, [slowest, half + slowest], ONE] = latest
    query[0, [slowest, half + slowest], ONE] = -latest
    query[0, [slowest, half + slowest], IS_A_VALUE] = latest
    key[0, :slowest, ONE] = 1.0
    key[0, slowest, IS_A_KEY] = 1.0
    value[0, :11, KEY] = torch.eye(11)

    output = torch.zeros(config.hidden_size, config.heads, config.head_dim)
    output[PREVIOUS, 0, :11] = torch.eye(11)
    output[ASKED, 1, :11] = torch.eye(11)
    return _layer(query, key, value, output)


def _lookup_layer(card: ModelCard) -> LayerWeights:
    """Layer 1, head 0; head 1 stays empty."""
    query, key, value = _projections(card)
    bits = SYMBOL_BITS
    query[0, :bits, ASKED] = SHARP * torch.eye(bits, bits + 1)
    query[0, bits, ONE] = SHARP
    key[0, :bits, PREVIOUS] = torch.eye(bits, bits + 1)
    key[0, bits, [PREVIOUS.stop - 1, IS_A_VALUE, IS_A_KEY]] = torch.tensor([AFTER_KEY, IS_VALUE, IS_KEY])
    value[0, :bits, VALUE] = torch.eye(bits, bits + 1)

    output = torch.zeros(card.config.hidden_size, card.config.heads, card.config.head_dim)
    output[ANSWER, 0, :bits] = torch.eye(bits)
    return _layer(query, key, value, output)


def _projections(card: ModelCard) -> tuple[Tensor, Tensor, Tensor]:
    """Empty query, key and value projections, ``[heads, head_dim, hidden]``."""
    config = card.config
    query = torch.zeros(config.heads, config.head_dim, config.hidden_size)
    key, value = torch.zeros(2, config.kv_heads, config.head_dim, config.hidden_size)
    return query, key, value


def _layer(query: Tensor, key: Tensor, value: Tensor, output: Tensor) -> LayerWeights:
    qkv = torch.cat([part.flatten(0, 1) for part in (query, key, value)])
    return LayerWeights(qkv=qkv, output=output.flatten(1))


def _bits(count: int, width: int) -> Tensor:
    """Numbers 0 to count - 1 as rows of ``width`` bits, each -1 or 1."""
    return ((torch.arange(count)[:, None] >> torch.arange(width)) & 1) * 2.0 - 1.0


def _flagged(bits: Tensor) -> Tensor:
    return torch.cat((bits, torch.ones(len(bits), 1)), dim=1)


def _ids(card: ModelCard, tokens: list[str]) -> Tensor:
    vocabulary = card.tokenizer.get_vocab()
    return torch.tensor([vocabulary[token] for token in tokens])
