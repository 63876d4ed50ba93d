"""What a capture's notes say of the engine: the geometry that an operator would know.

Recorders have changed their words over time, and some write settings down as the engine's own command line has them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from router.core.usable import Geometry, retention_of
from router.fleet.asking import read_number

#: Of the settings that vLLM has among its metrics.
_SETTING = r'vllm:cache_config_info\{{[^}}]*\b{}="(\w+)"'
#: Words by which a setting is told to be off.
_OFF = frozenset({"", "0", "false", "n", "no", "none", "null", "off"})
#: Settings may be nested so deep.
_MOST_DEPTH = 4


def merged(notes: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """All that the notes say, in one mapping; all that stands under ``geometry`` is there under that name, too."""
    everything: dict[str, Any] = {}
    geometry: dict[str, Any] = {}
    for note in notes:
        info = mapping(note.get("info"))
        for part in (info, note):
            everything.update(part)
        for part in (mapping(note.get("geometry")), mapping(info.get("geometry"))):
            geometry.update(part)
    return {**everything, **geometry, "geometry": geometry}


def geometry_of(settings: Mapping[str, Any]) -> Geometry:
    """What no event stream carries.

    The size of a chunk stands under one of several names, or beside its group. SGLang's ``chunked_prefill_size`` is
    something else.
    """
    chunk_tokens = first_number(settings, "attention_chunk_size", "chunk_size", "chunk_tokens", "chunk") or next(
        (
            value
            for name, value in _nested(settings.get("geometry"))
            if "chunk" in name and "prefill" not in name and isinstance(value, int) and value > 1
        ),
        None,
    )
    return Geometry(chunk_tokens=chunk_tokens, eagle=_is_on(settings.get("eagle")) or _is_on(settings.get("use_eagle")))


def _is_on(value: object) -> bool:
    return value.strip().lower() not in _OFF if isinstance(value, str) else bool(value)


def block_tokens_of(settings: Mapping[str, Any], metrics: Sequence[str]) -> int | None:
    """Tokens of the smallest unit that can be found again."""
    units = [name for name in settings if "match_unit" in name.replace("-", "_")]
    told = first_number(settings, "hash_block_size", *units, "block_size")
    return told or _metric(metrics, "prefix_match_unit") or _metric(metrics, "block_size")


def pool_tokens_of(settings: Mapping[str, Any], metrics: Sequence[str]) -> int | None:
    """Tokens that one rank's cache holds."""
    if size := first_number(settings, "pool_tokens", "kv_cache_size_tokens", "max_total_num_tokens"):
        return size
    blocks = first_number(settings, "num_gpu_blocks", "num_gpu_blocks_override")
    block_tokens = first_number(settings, "block_size")
    if blocks and block_tokens:
        return blocks * block_tokens
    return first_number(settings, "max_total_tokens") or _metric(metrics, "kv_cache_size_tokens")


def pool_blocks_of(settings: Mapping[str, Any], metrics: Sequence[str], *, ranks: int) -> int | None:
    """Blocks of one rank of vLLM, which itself counts those of all ranks together, one a rank too many."""
    if told := first_number(settings, "pool_blocks"):
        return told
    blocks = first_number(settings, "num_gpu_blocks", "num_gpu_blocks_override") or _metric(metrics, "num_gpu_blocks")
    return blocks // ranks - 1 if blocks and blocks // ranks > 1 else None


def max_running_of(settings: Mapping[str, Any]) -> int | None:
    """How many requests one rank of SGLang runs at once: what its schedulers say, else what they were told."""
    name = "effective_max_running_requests_per_dp"
    told = (first_number({key: value}, name) for key, value in _nested(settings))
    return next(filter(None, told), None) or first_number(settings, "max_running_requests")


def retention_tokens_of(settings: Mapping[str, Any], metrics: Sequence[str]) -> int | None:
    """Before the end of segments of how many tokens vLLM keeps windows and states."""
    name = "prefix_cache_retention_interval"
    told = map(retention_of, (settings.get("retention_tokens"), settings.get(name), _label(metrics, name)))
    return next((each for each in told if each is not None), None)


def _metric(metrics: Sequence[str], name: str) -> int | None:
    return read_number(_label(metrics, name))


def _label(metrics: Sequence[str], name: str) -> str | None:
    setting = re.compile(_SETTING.format(name))
    return next((match[1] for text in metrics if (match := setting.search(text))), None)


def adapters_of(settings: Mapping[str, Any]) -> frozenset[str]:
    """Names of LoRA adapters: the keys of a mapping, or a list of names, ``NAME=PATH`` or mappings with a name."""
    named = ((key, value) for key, value in _nested(settings) if isinstance(value, Mapping | list))
    told = (value for key, value in named if "lora" in key or "adapter" in key)
    return frozenset(name for value in told for name in _names(value) if name)


def _names(value: object) -> Iterator[str]:
    match value:
        case str():
            yield value.partition("=")[0]
        case {"name": str() as name} | {"lora_name": str() as name}:
            yield name
        case Mapping():
            yield from map(str, value)
        case list():
            for each in value:
                yield from _names(each)
        case _:
            pass


def _nested(value: object, depth: int = 0) -> Iterator[tuple[str, object]]:
    """All names in mappings and lists, with what stands under them."""
    if isinstance(value, Mapping):
        for name, each in value.items():
            yield str(name), each
    if depth < _MOST_DEPTH and isinstance(value, Mapping | list):
        for each in value.values() if isinstance(value, Mapping) else value:
            yield from _nested(each, depth + 1)


def mapping(value: object) -> Mapping[str, Any]:
    """A value that should be a mapping; an empty one if it is not."""
    return value if isinstance(value, Mapping) else {}


def first_number(settings: Mapping[str, Any], *names: str) -> int | None:
    """The first that is a positive integer, and no larger than the router takes of a worker, of what stands under these
    names.
    """
    told = (settings.get(name) for name in names)
    return next(filter(None, (read_number(found) for found in told if isinstance(found, int))), None)
