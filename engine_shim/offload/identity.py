"""What decides the contents of a page: the model to its last weight, the numbers it is made of, how pages are cut."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from hashlib import blake2b

import torch
import xxhash
from torch import Tensor

from engine_shim.model.decoder import Decoder
from engine_shim.model.linear import plain
from engine_shim.offload.disk import FINGERPRINT_BYTES
from engine_shim.types import CacheLayout

#: Another meaning of the same bytes, such as another order of a page's tensors, is another number.
_CONTENTS_VERSION = 1


def fingerprint(decoder: Decoder, layout: CacheLayout, *, contents: str) -> bytes:
    """The same for two ranks if, and only if, a page of one is of use to the other. Reads every weight once.

    ``contents`` names what pages are made of (``TensorPages``). How matrices are laid out says nothing.
    """
    digest = blake2b(digest_size=FINGERPRINT_BYTES)
    for part in (_CONTENTS_VERSION, decoder.config, decoder.dtype, layout.page_tokens, layout.groups, contents):
        digest.update(repr(part).encode())
    for tensor in _tensors(decoder.weights):
        digest.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
        data = plain(tensor.detach()).contiguous().view(-1).view(torch.uint8).cpu().numpy()
        digest.update(xxhash.xxh3_128_digest(data.data))
    return digest.digest()


def _tensors(value: object) -> Iterator[Tensor]:
    """All tensors of nested dataclasses and tuples, in the order of their fields."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple):
        for each in value:
            yield from _tensors(each)
    elif is_dataclass(value):
        for field in fields(value):
            yield from _tensors(getattr(value, field.name))
