"""What a rank's requests waited for, as its thread sees it: booked in ``Latencies``."""

from __future__ import annotations

from dataclasses import dataclass

from engine_shim.metrics import Latencies
from engine_shim.types import Batch, FinishReason, Output, Request


@dataclass(slots=True)
class _Times:
    request: Request
    scheduled_seconds: float | None = None
    first_token_seconds: float | None = None
    last_token_seconds: float = 0.0


class Timing:
    """The times of all requests of one rank that have not ended. Only the rank's thread calls it."""

    def __init__(self, latencies: Latencies) -> None:
        self._latencies = latencies
        self._requests: dict[str, _Times] = {}

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._requests

    def began(self, request: Request) -> None:
        """A request has come to the rank."""
        self._requests[request.id] = _Times(request)

    def scheduled(self, batch: Batch, now: float) -> None:
        """A step is launched, of requests that have not ended."""
        self._latencies.step_tokens.observe(batch.tokens)
        for chunk in batch.chunks:
            times = self._requests[chunk.request.id]
            if times.scheduled_seconds is None:
                times.scheduled_seconds = now
                self._latencies.queue.observe(now - chunk.request.arrival_seconds)

    def told(self, output: Output, now: float) -> None:
        """A step's output about one request; an end is the last that is heard of it."""
        times = self._requests[output.request.id]
        if output.tokens:
            self._tokens(times, now, len(output.tokens))
        if output.finish is not None:
            self._end(times, now, output.finish)
            del self._requests[output.request.id]

    def _tokens(self, times: _Times, now: float, tokens: int) -> None:
        """Book what one step brought; as in vLLM the gap between two steps is one gap, however many tokens came."""
        self._latencies.generated_tokens += tokens
        if times.first_token_seconds is None:
            times.first_token_seconds = now
            self._latencies.first_token.observe(now - times.request.arrival_seconds)
        else:
            self._latencies.inter_token.observe(now - times.last_token_seconds)
        times.last_token_seconds = now

    def _end(self, times: _Times, now: float, finish: FinishReason) -> None:
        seen, request = self._latencies, times.request
        output_tokens = len(request.tokens) - len(request.prompt)
        seen.finished[finish] += 1
        seen.end_to_end.observe(now - request.arrival_seconds)
        seen.prompt_tokens.observe(len(request.prompt))
        seen.output_tokens.observe(output_tokens)
        seen.max_tokens.observe(request.sampling.max_tokens)
        seen.choices.observe(1)
        if times.scheduled_seconds is None or times.first_token_seconds is None:
            return
        decode_seconds = times.last_token_seconds - times.first_token_seconds
        seen.prefilled_tokens.observe(len(request.prompt) - request.cached_tokens)
        seen.prefill.observe(times.first_token_seconds - times.scheduled_seconds)
        seen.decode.observe(decode_seconds)
        seen.inference.observe(times.last_token_seconds - times.scheduled_seconds)
        if output_tokens > 1:
            seen.per_output_token.observe(decode_seconds / (output_tokens - 1))
