"""Texts for tests, as token ids of the tiny model."""

from __future__ import annotations


def prompt(seed: int, length: int = 697) -> list[int]:
    """A text of token ids that depends on its seed from its first token on; no special tokens."""
    state = seed * 2654435761 + 12345
    tokens = []
    for _ in range(length):
        state = (state * 1103515245 + 12345) % 2**31
        tokens.append(6 + (state >> 8) % 990)
    return tokens
