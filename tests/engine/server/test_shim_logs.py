"""What the shim logs of errors, in a process of its own: logging is set up once for all of one."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from engine_shim.api import ApiError, CompletionRequest, decode

FAILING = """
import logging, structlog
from engine_shim.logs import configure_logging

configure_logging("info")

def serve(headers, prompt):
    raise ValueError("what went wrong")

try:
    serve({"authorization": "Bearer sk-" + "SECRET"}, "a private " + "prompt")
except ValueError as error:
    structlog.get_logger("shim").error("failed", exc_info=error)
    logging.getLogger("uvicorn.error").exception("failed as well")
"""


def test_a_traceback_tells_no_values() -> None:
    """Where it happened and what was said, a JSON object a line; nothing of what the functions were called with."""
    done = subprocess.run([sys.executable, "-c", FAILING], capture_output=True, text=True, check=True)
    assert "SECRET" not in done.stderr
    assert "private prompt" not in done.stderr
    first, second = map(json.loads, done.stderr.splitlines())
    for line in (first, second):
        assert "ValueError: what went wrong" in line["exception"]
        assert "in serve" in line["exception"]


@pytest.mark.parametrize("key", ["9" * 5000, "1e3", "-1", "²"])
def test_odd_token_ids_are_the_clients_fault(key: str) -> None:
    """Refused with the field's name, and not repeated at length."""
    asked = decode(json.dumps({"prompt": "a", "logit_bias": {key: 1}}).encode(), CompletionRequest)
    with pytest.raises(ApiError, match="logit_bias") as refused:
        asked.sampling(max_tokens=1, vocab_tokens=100)
    assert refused.value.param == "logit_bias"
    assert len(refused.value.message) < 200
