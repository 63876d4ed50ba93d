"""Text to token ids: by Hugging Face's ``tokenizers``, or by ``fastokens`` where it is installed and gives the same.

``fastokens`` (the extra ``fast``) reads the same ``tokenizer.json`` and takes about a third of the time. It is only
used for a tokenizer on whose probes both agree.
"""

from __future__ import annotations

import importlib
from array import array
from collections.abc import Callable
from types import ModuleType

from tokenizers import Tokenizer

Encode = Callable[[str], "array[int]"]

#: What tokenizers differ on: scripts, marks that combine, blanks, digits, contractions, bytes that are no letters.
_PROBES = (
    "Hello, world! It's 1,234.50; we'LL see.",
    "def f(x):\n\treturn x  # 0x1f\n\n\n    pass\r\n",
    "日本語のテキスト、中文文本，한국어 עברית العربية ไทย",
    "e\u0301 n\u0303 \u212b ﬁ İ ß \u00a0\u2028\u200d \x00\x7f",
    "👍🏽 👨‍👩‍👧‍👦 🇩🇪 \U0001f9d1\u200d\U0001f680",
    "  leading and trailing  ",
    "a" * 300 + "_snake_caseCamelCase" * 10 + "https://example.org/a?b=c&d=%20",
)
_MAX_PROBED_TOKENS = 256


def encoder_of(tokenizer: Tokenizer) -> Encode:
    """How this tokenizer's texts are encoded, no special tokens added around them. Any thread may call it."""

    def encode(text: str) -> array[int]:
        # The batch call lets go of the interpreter lock, and computes no offsets.
        return array("I", tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids)

    return _faster(tokenizer, encode) or encode


def _faster(tokenizer: Tokenizer, encode: Encode) -> Encode | None:
    try:
        fastokens: ModuleType = importlib.import_module("fastokens")
    except ImportError:
        return None
    try:
        native = fastokens.Tokenizer.from_json_str(tokenizer.to_str())
        native.no_truncation()
        native.no_padding()

        def encode_native(text: str) -> array[int]:
            return array("I", native.encode(text, add_special_tokens=False).ids)

        added = [token.content for token in tokenizer.get_added_tokens_decoder().values()][:_MAX_PROBED_TOKENS]
        around = [f"a {token}b{token} {token}\n" for token in added]
        agree = all(encode_native(text) == encode(text) for text in (*_PROBES, *around))
    except (RuntimeError, TypeError, ValueError):  # a kind of tokenizer it does not know
        return None

    def encode_fast(text: str) -> array[int]:
        try:
            return encode_native(text)
        except ValueError:  # its expressions run out of stack in a megabyte of blanks
            return encode(text)

    return encode_fast if agree else None
