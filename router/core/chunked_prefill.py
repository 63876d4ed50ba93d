"""Prompts that an engine computes in pieces, by SGLang's rule: a pass computes no more than so many tokens of them.

``PrefillAdder`` fills a pass with prompts in the order in which they came. Of the one that does not fit it takes as
many whole pages as do, and goes on with it in the next pass. Each piece enters the tree before the next pass looks
prompts up, its last one when it has been computed. So a prompt behind another finds all of it but its last piece.
"""

from __future__ import annotations


def found_behind(
    prompt_tokens: int, *, cached_tokens: int, waiting_tokens: int, chunk_tokens: int, page_tokens: int
) -> int:
    """How many tokens of a prompt those behind it will find, though it is not computed yet: 0 if it is one piece.

    Of it ``cached_tokens`` are there; ``waiting_tokens`` of others are to be computed before.
    """
    left = chunk_tokens - waiting_tokens % chunk_tokens
    lacking = prompt_tokens - cached_tokens
    chunk = chunk_tokens // page_tokens * page_tokens
    if lacking <= left or not chunk:
        return 0
    first = left // page_tokens * page_tokens
    more = (lacking - first - 1) // chunk * chunk
    return cached_tokens + first + more
