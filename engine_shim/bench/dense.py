"""A plain torch loop to measure beside: the same decoder over one contiguous cache, without pages, batch or plan."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from engine_shim.model.decoder import Decoder


class DenseLoop:
    """As many sequences as rows, all of one length. Full-attention layers only; greedy."""

    def __init__(self, decoder: Decoder, *, rows: int, max_tokens: int) -> None:
        config = decoder.config
        shape = (len(config.layers), rows, config.kv_heads, max_tokens, config.head_dim)
        self._decoder = decoder
        self._keys, self._values = (torch.zeros(shape, device=decoder.device, dtype=decoder.dtype) for _ in range(2))
        self._rows = rows
        self._held = 0
        self._last = torch.empty(rows, 1, dtype=torch.int64, device=decoder.device)

    def start(self, prompts: Sequence[Sequence[int]]) -> None:
        """Forget what was, and run the prompts together to their first tokens."""
        self._held = 0
        self._step(torch.tensor(prompts, device=self._decoder.device))

    def decode(self) -> None:
        """One more token of each."""
        self._step(self._last)

    @torch.inference_mode()
    def _step(self, tokens: Tensor) -> None:
        count = tokens.shape[1]
        positions = torch.arange(self._held, self._held + count, device=tokens.device).repeat(self._rows)
        hidden = self._decoder.hidden(tokens.flatten(), positions, attention=self._attend)
        self._held += count
        last = hidden.view(self._rows, count, -1)[:, -1]
        self._last = self._decoder.logits(last).argmax(-1, keepdim=True)

    def _attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        end = self._held + query.shape[0] // self._rows
        for cache, new in ((self._keys, key), (self._values, value)):
            cache[layer, :, :, self._held : end] = new.view(self._rows, -1, *new.shape[1:]).transpose(1, 2)
        attended = scaled_dot_product_attention(
            query.view(self._rows, -1, *query.shape[1:]).transpose(1, 2),
            self._keys[layer, :, :, :end],
            self._values[layer, :, :, :end],
            is_causal=self._held == 0,
            scale=self._decoder.config.attention_scale,
            enable_gqa=True,
        )
        return attended.transpose(1, 2).reshape(query.shape)
