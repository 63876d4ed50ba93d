"""When a request ends: what its sampled tokens say, how many it may have."""

from __future__ import annotations

from dataclasses import dataclass

from engine_shim.types import FinishReason, Request, Sampled


@dataclass(frozen=True, slots=True)
class Limits:
    """Of one rank: ``context_tokens`` are prompt and output of one request together."""

    context_tokens: int
    eos_token_ids: frozenset[int]

    def unsampled_tokens(self, request: Request) -> int:
        """How many more tokens a request may have, unless one of them ends it."""
        known = len(request.tokens)
        return min(request.sampling.max_tokens - (known - len(request.prompt)), self.context_tokens - known)

    def take(self, request: Request, sampled: Sampled) -> tuple[int, ...]:
        """Append what was sampled, up to the token that ends the request; what lies behind that never was.

        Sets ``finish``, and returns what was appended.
        """
        if not sampled.tokens:
            request.finish = FinishReason.ERROR
        for taken, token in enumerate(sampled.tokens, start=1):
            request.tokens.append(token)
            request.finish = self._finish_reason(request, token)
            if request.finish is not None:
                return sampled.tokens[:taken]
        return sampled.tokens

    def _finish_reason(self, request: Request, token: int) -> FinishReason | None:
        sampling = request.sampling
        if token in sampling.stop_token_ids or (token in self.eos_token_ids and not sampling.ignore_eos):
            return FinishReason.STOP
        return FinishReason.LENGTH if self.unsampled_tokens(request) <= 0 else None
