"""Where a text may be cut so that its pieces, tokenized one by one, give the tokens of the whole.

``tokenizers`` takes added tokens out of the raw text first and treats what stands between them apart: normalizer,
pre-tokenizer and merges never cross one. So a text may be cut *before* an added token whose occurrences depend on
nothing around them. Where the pre-tokenizer is one of the known byte-level patterns, a long stretch without such a
token may also be cut before a line: after ``x\\n`` and before a letter every one of those patterns has a boundary, on
whichever side of it one looks.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tokenizers import Tokenizer

#: A stretch without a special token is cut at a line only after so many characters.
LINE_CUT_CHARS = 4096
#: No other thread runs while one is searched.
_MOST_WINDOW_CHARS = 1024 * 1024
_LINE = re.compile(r"\n(?<=\S\n)(?=[A-Za-z])")  # begins with a literal, which is what makes the search fast
#: Split patterns under which a line is a safe cut: those of GPT-4 and Llama 3, of Qwen2 and later, of DeepSeek.
_LINE_PATTERNS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    r"\p{N}{1,3}",
    "[一-龥\u3040-ゟ゠-ヿ]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|"""
    r"\s*[\r\n]+|\s+(?!\S)|\s+",
)


class Cutter:
    """Cuts for one tokenizer: before each of the ``special`` texts, none of which may overlap another, and at lines."""

    def __init__(self, special: Sequence[str], *, lines: bool) -> None:
        self._special = re.compile("|".join(map(re.escape, special))) if special else None
        self._longest = max(map(len, special), default=0)
        self._lines = lines

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> Cutter:
        """The cuts that are exact for ``tokenizer``; none at all if it says nothing that allows them."""
        description = json.loads(tokenizer.to_str())
        added = description.get("added_tokens") or []
        if (description.get("model") or {}).get("dropout") or any(token["single_word"] for token in added):
            return cls((), lines=False)
        contents = [token["content"] for token in added]
        lines = _is_cut_by_lines(description) and not any("\n" in content for content in contents)
        lines = lines and not any(token["lstrip"] or token["rstrip"] for token in added)
        return cls(_independent(added), lines=lines)

    def next_cut(self, text: str, start: int) -> int:
        """The first cut behind ``start``, itself a cut or the beginning; the text's end if there is none."""
        line_from = start + LINE_CUT_CHARS
        begin, window = start + 1, 2 * LINE_CUT_CHARS
        while begin < len(text):
            # In windows that grow, so that neither kind of cut is looked for far behind the other.
            end = begin + window
            special = self._special.search(text, begin, end + self._longest) if self._special else None
            if special:
                end = special.start()
            if self._lines and end > line_from and (line := _LINE.search(text, max(begin - 1, line_from), end + 1)):
                return line.end()
            if special:
                return end
            begin, window = end, min(2 * window, _MOST_WINDOW_CHARS)
        return len(text)

    def pieces(self, text: str, start: int) -> Iterator[str]:
        """The rest of the text in pieces, the last of which may grow as the text does."""
        while start < len(text):
            end = self.next_cut(text, start)
            yield text[start:end]
            start = end


def _independent(added: Sequence[Mapping[str, Any]]) -> list[str]:
    """Added tokens that are found wherever they stand: taken from the raw text, sharing characters with no other."""
    contents = {token["content"] for token in added if token["content"]}
    heads = {content[:size] for content in contents for size in range(1, len(content))}
    tails = {content[size:] for content in contents for size in range(1, len(content))}
    joined = "\0".join(contents)
    inside = [content for content in contents if joined.count(content) > 1]
    chosen: list[str] = []
    for token in added:
        content = token["content"]
        is_plain = not (token["normalized"] or token["lstrip"] or token["rstrip"]) and content == content.strip() != ""
        cuts = range(1, len(content))
        overlaps = any(content[size:] in heads or content[:size] in tails for size in cuts)
        if is_plain and not overlaps and not any(other in content for other in inside):
            chosen.append(content)
    return chosen


def _is_cut_by_lines(description: Mapping[str, Any]) -> bool:
    """Byte-level, without a space put before each piece, and split by known patterns only."""
    normalizer = description.get("normalizer") or {"type": "NFC"}
    if normalizer["type"] == "Sequence":
        if normalizer["normalizers"]:
            return False
    elif normalizer["type"] not in ("NFC", "NFD", "NFKC", "NFKD"):
        return False
    splits = description.get("pre_tokenizer") or {}
    steps = splits["pretokenizers"] if splits.get("type") == "Sequence" else [splits]
    is_byte_level = False
    for step in steps:
        match step:
            case {"type": "ByteLevel", "add_prefix_space": False}:
                is_byte_level = True
            case {"type": "Digits"}:
                pass
            case {"type": "Split", "pattern": {"Regex": str(pattern)}, "behavior": "Isolated", "invert": False}:
                if pattern.replace("\r", r"\r").replace("\n", r"\n") not in _LINE_PATTERNS:
                    return False
            case _:
                return False
    return is_byte_level
