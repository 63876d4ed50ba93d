"""What the index finds, against what vLLM's own scheduler and SGLang's own radix cache found at the same moments
(``tests/data/kv_scheduler``).
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from router.core.index import PrefixIndex
from router.core.provisional import Ticket
from router.core.usable import Geometry
from router.wire.block_keys import block_keys, namespace_seed
from router.wire.kv_events import decode_batch

RECORDED = sorted((Path(__file__).parents[2] / "data" / "kv_scheduler").glob("*.json.gz"))
OF_SGLANG = [path for path in RECORDED if path.name.startswith("sglang-")]


def name_of(path: Path) -> str:
    return path.name.removesuffix(".json.gz")


@pytest.mark.parametrize("path", [path for path in RECORDED if path not in OF_SGLANG], ids=name_of)
def test_the_index_finds_what_the_engines_scheduler_does(path: Path) -> None:
    """Requests several at once over a full pool, in blocks of one and of several sizes, with drafts and without."""
    recorded = json.loads(gzip.decompress(path.read_bytes()))
    unit, retention = recorded["unit_tokens"], recorded["retention_tokens"]
    index = PrefixIndex(block_tokens=unit)
    geometry = Geometry(recorded["chunk_tokens"], recorded["eagle"])
    index.add_rank(0, domain="engine", geometry=geometry, retention_tokens=1 if retention is None else retention)
    tickets: dict[str, Ticket] = {}
    found, expected = [], []
    for what, *told in recorded["happened"]:
        match what, told:
            case "sent", [name, prompt]:
                keys = block_keys(prompt, block_tokens=unit, parent=namespace_seed("", ""))
                tickets[name] = index.promise(0, keys, prompt_tokens=len(prompt))
            case "told", [payload]:
                for event in decode_batch(bytes.fromhex(payload)).events:
                    index.apply(0, event)
                index.end_batch(0)
            case "ended", [name]:
                index.provisional.drop(tickets.pop(name))
            case "found", [prompt, tokens]:
                keys = block_keys(prompt, block_tokens=unit, parent=namespace_seed("", ""))
                found.append(index.reusable_tokens(keys, prompt_tokens=len(prompt)).get(0, 0))
                expected.append(tokens)
    assert sum(tokens > 0 for tokens in expected) > 20
    assert found == expected


@pytest.mark.parametrize("is_told", [False, True], ids=["", "eagle-is-set"])
@pytest.mark.parametrize("path", OF_SGLANG, ids=name_of)
def test_the_index_finds_what_the_engines_radix_cache_does(path: Path, *, is_told: bool) -> None:
    """Requests several at once over a full pool, in pages of several sizes, under salts and adapters, over host memory,
    with drafts, whether the model's setting says so or not, and without.
    """
    recorded = json.loads(gzip.decompress(path.read_bytes()))
    unit = recorded["unit_tokens"]
    index = PrefixIndex(block_tokens=unit)
    index.add_rank(0, domain="engine", geometry=Geometry(eagle=is_told and recorded["eagle"]))
    found, expected = [], []
    for what, *told in recorded["happened"]:
        match what, told:
            case "told", [payload]:
                for event in decode_batch(bytes.fromhex(payload)).events:
                    index.apply(0, event)
                index.end_batch(0)
            case "found", [prompt, tokens, _, salt, adapter, below]:
                keys = block_keys(prompt, block_tokens=unit, parent=namespace_seed(adapter, salt))
                reusable = index.reusable_tokens(keys, prompt_tokens=len(prompt), tokens=prompt).get(0, 0)
                loadable = index.loadable_tokens(keys, prompt_tokens=len(prompt), tokens=prompt).get(0, 0)
                found.append((reusable, max(reusable, loadable)))
                expected.append((tokens, below))
    assert sum(tokens > 0 for tokens, _ in expected) > 20
    assert "-host" not in path.name or sum(below > tokens for tokens, below in expected) > 5
    assert found == expected
