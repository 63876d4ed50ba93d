"""Speculative decoding: who proposes drafts. Whether they hold is decided where tokens are sampled."""
