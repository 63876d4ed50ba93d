"""Models: config, tokenizer and loading (no torch at import), decoder and weights (torch)."""
