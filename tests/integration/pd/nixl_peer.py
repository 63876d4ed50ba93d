"""vLLM's own NIXL connector, asked line by line: run by an interpreter that has vLLM.

Each line of stdin is a request's body; its answer is what the connector's scheduler side made of it: at a prefill rank
the parameters it hands over, at a decode rank what it is going to pull. Neither a GPU nor NIXL itself is needed.
"""

from __future__ import annotations

import json
import sys
import time
from types import SimpleNamespace
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import NixlConnectorMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_scheduler import NixlPullConnectorScheduler
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import RequestStatus

BLOCK_TOKENS = 16


def scheduler(engine_id: str) -> Any:
    """Of a server with one rank and one group of full attention."""
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(
            tensor_parallel_size=1,
            decode_context_parallel_size=1,
            pipeline_parallel_size=1,
            data_parallel_index=0,
        ),
        cache_config=SimpleNamespace(block_size=BLOCK_TOKENS),
        kv_transfer_config=SimpleNamespace(
            get_from_extra_config=lambda _name, default: default, kv_buffer_device="cuda"
        ),
        scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=True),
        num_prefill_lookahead_tokens=0,
    )
    spec = FullAttentionSpec(block_size=BLOCK_TOKENS, num_kv_heads=1, head_size=8, dtype=torch.float32)
    groups = [KVCacheGroupSpec(["layer"], spec)]
    cache = KVCacheConfig(num_blocks=16, kv_cache_tensors=[], kv_cache_groups=groups)
    return NixlPullConnectorScheduler(config, engine_id, cache)


def asked(body: dict[str, Any], number: int) -> Any:
    """The request as vLLM's server reads it: by its protocol and its sampling parameters."""
    if "messages" in body:
        read = ChatCompletionRequest.model_validate(body)
        params = read.to_sampling_params(read.max_completion_tokens or read.max_tokens, {})
    else:
        read = CompletionRequest.model_validate(body)
        params = read.to_sampling_params(read.max_tokens, {})
    tokens = 3 * BLOCK_TOKENS + 5
    return SimpleNamespace(
        request_id=f"cmpl-{number}",
        kv_transfer_params=(params.extra_args or {}).get("kv_transfer_params"),
        prompt_token_ids=list(range(tokens)),
        num_prompt_tokens=tokens,
        num_computed_tokens=tokens,
        status=RequestStatus.FINISHED_LENGTH_CAPPED,
        max_tokens=params.max_tokens,
        stream=bool(read.stream),
    )


class Blocks:
    """Freshly allocated, none of them cached."""

    blocks = (tuple(SimpleNamespace(block_hash=None, is_null=False) for _ in range(4)),)

    def get_unhashed_block_ids_all_groups(self) -> list[list[int]]:
        return [[11, 12, 13, 14]]


def prefill(engine: Any, request: Any) -> dict[str, Any]:
    """What it answers once the prompt is computed."""
    engine.on_new_request(request)
    external, _ = engine.get_num_new_matched_tokens(request, 0)
    engine.update_state_after_alloc(request, Blocks(), external)
    _, handed = engine.request_finished(request, ([1, 2, 3, 4],))
    return {"params": handed, "max_tokens": request.max_tokens, "stream": request.stream}


def decode(engine: Any, request: Any) -> dict[str, Any]:
    """What it is going to pull."""
    engine.on_new_request(request)
    external, _ = engine.get_num_new_matched_tokens(request, 0)
    engine.update_state_after_alloc(request, Blocks(), external)
    pulls = engine._reqs_need_recv.pop(request.request_id, None)
    if pulls is None:
        return {"pulls": None}
    meta = NixlConnectorMetadata()
    meta.add_new_req_to_recv(request.request_id, pulls[1], request.kv_transfer_params)
    remote = meta.reqs_to_recv[request.request_id].remote
    return {
        "pulls": {
            "tokens": external,
            "blocks": [list(group) for group in remote.block_ids],
            "engine": remote.engine_id,
            "request": remote.request_id,
            "address": [remote.host, remote.port],
            "is_kept_alive": request.request_id in engine._heartbeat_req_engine,
        }
    }


def main() -> None:
    """``nixl_peer.py prefill|decode ENGINE``."""
    role, engine_id = sys.argv[1:]
    engine = scheduler(engine_id)
    answer = prefill if role == "prefill" else decode
    print(json.dumps({"ready": time.time()}), flush=True)
    for number, line in enumerate(sys.stdin):
        try:
            told = answer(engine, asked(json.loads(line), number))
        except Exception as error:  # noqa: BLE001 - whatever it is, it is the connector's answer
            told = {"error": repr(error)}
        print(json.dumps(told), flush=True)


if __name__ == "__main__":
    main()
