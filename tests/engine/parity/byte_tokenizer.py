"""A tokenizer for tiny models that can say anything: every byte, and a few pieces of JSON that are one token."""

from __future__ import annotations

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

EOS = 2
_PIECES = ['{"', '":', '",', '"}', '"]', "[{", "}]", "true", "false", "null", "12", "0.", "ab", "Ġ{", "[[", "ĊĊ"]


def byte_tokenizer() -> Tokenizer:
    """Ids 0 to 2 are special, then come 256 bytes and the pieces."""
    special = ["<pad>", "<s>", "</s>"]
    words = [*special, *sorted(pre_tokenizers.ByteLevel.alphabet()), *_PIECES]
    tokenizer = Tokenizer(models.BPE(vocab={word: number for number, word in enumerate(words)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(word, special=True) for word in special])
    return tokenizer
