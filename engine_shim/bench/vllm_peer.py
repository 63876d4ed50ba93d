"""vLLM at the work of ``homing bench cpu``: a script for a Python that has vLLM's CPU build.

It imports nothing of this project. Arguments: model directory, dtype, context tokens, largest batch. When the model is
loaded it prints "ready", on its own standard output; then each line of standard input is a JSON object with ``prompts``
(lists of token ids) and ``new_tokens``, and is answered by one with the tokens and the processor seconds until the last
prompt had its first token and from there to the end.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

_SETTINGS = {
    # In this very process: no other one's time has to be counted, and no message is copied between two.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_LOOPBACK_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
}


def main() -> None:
    """Load the model, then answer lines until there are no more."""
    folder, dtype, context_tokens, batch = sys.argv[1:]
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # vLLM logs on standard output, too
    os.environ.update(_SETTINGS)
    from vllm import LLM  # type: ignore[import-not-found, unused-ignore]

    llm = LLM(
        folder,
        dtype=dtype,
        max_model_len=int(context_tokens),
        max_num_seqs=int(batch),
        block_size=32,
        skip_tokenizer_init=True,
        enable_prefix_caching=True,
    )
    print("ready", file=answers)
    for number, line in enumerate(sys.stdin):
        work = json.loads(line)
        print(json.dumps(_run(llm.llm_engine, number, work["prompts"], work["new_tokens"])), file=answers)


def _run(engine: Any, number: int, prompts: list[list[int]], new_tokens: int) -> dict[str, object]:
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0.0, max_tokens=new_tokens, ignore_eos=True, detokenize=False)
    tokens: list[list[int]] = [[] for _ in prompts]
    first = 0.0
    start = time.process_time()
    for place, prompt in enumerate(prompts):
        engine.add_request(f"{number} {place}", {"prompt_token_ids": prompt}, sampling)
    early = 0
    while engine.has_unfinished_requests():
        for output in engine.step():
            tokens[int(output.request_id.split()[1])] = list(output.outputs[0].token_ids)
        if not first and all(tokens):
            first, early = time.process_time(), sum(map(len, tokens))
    return {
        "prefill_seconds": first - start,
        "decode_seconds": time.process_time() - first,
        "decoded_tokens": sum(map(len, tokens)) - early,
        "tokens": tokens,
    }


if __name__ == "__main__":
    main()
