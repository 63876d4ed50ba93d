"""Tokens to a chain of 64-bit block keys.

A key names a block *and all that stands before it*: ``key[i] = xxh3_64(tokens[i], seed=key[i-1])``.
The chain starts from a namespace seed, so equal tokens under another model, adapter or salt
have other keys. Keys are a router's and a shim's own names for content; an engine's event hashes are
mapped onto them by the token ids its events carry.

Keys are hints, never proof: a collision predicts a hit that is not there and costs a prefill,
it never reaches an answer.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Sequence
from functools import lru_cache

import xxhash

TOKEN_BYTES = 4
#: Names longer than this are not remembered: clients choose how long their salts are.
_REMEMBERED_CHARS = 1024


def namespace_seed(*parts: str) -> int:
    """The chain's root for a namespace: model, then adapter, salt and whatever else divides caches."""
    return _seed(*parts) if sum(map(len, parts)) > _REMEMBERED_CHARS else _remembered_seed(*parts)


@lru_cache(maxsize=1024)
def _remembered_seed(*parts: str) -> int:
    return _seed(*parts)


def _seed(*parts: str) -> int:
    encoded = [part.encode("utf-8", "surrogatepass") for part in parts]  # JSON's escapes may stand for halves of pairs
    material = b"".join(len(part).to_bytes(4, "little") + part for part in encoded)
    return xxhash.xxh3_64_intdigest(material, seed=0)


def pack_tokens(tokens: Sequence[int]) -> bytes:
    """Token ids as unsigned 32-bit little-endian bytes, the form that is hashed."""
    packed = tokens if isinstance(tokens, array) and tokens.typecode == "I" else array("I", tokens)
    return packed.tobytes()


def block_keys(tokens: Sequence[int], *, block_tokens: int, parent: int) -> list[int]:
    """Keys of the whole blocks of ``tokens``, continuing the chain after ``parent``.

    A partial last block has no key. 100,000 tokens in blocks of 16 are 6,250 keys.
    """
    step = block_tokens * TOKEN_BYTES
    data = pack_tokens(tokens)
    whole = data[: len(data) - len(data) % step]
    digest = xxhash.xxh3_64_intdigest
    return [parent := digest(block, parent) for (block,) in struct.iter_unpack(f"{step}s", whole)]
