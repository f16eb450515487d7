"""Ragged lengths of sequences, in a packed batch and in a cache."""

from __future__ import annotations

import math
import random

SHORTEST, LONGEST = 0.25, 1.75
"""Bounds of the uniform distribution of lengths, in units of its mean."""


def ragged_lengths(num_sequences: int, seq_len: int, seed: int) -> list[int]:
    """Unequal lengths that attend to as many pairs as ``num_sequences`` of ``seq_len`` tokens.

    Drawn uniformly between a quarter and seven quarters of their mean, one from each of
    ``num_sequences`` equal parts of that range (so that they differ whatever the seed), put in a
    random order, and scaled until their squares add up to ``num_sequences * seq_len**2``. So the
    root of the mean square is ``seq_len``, and the mean is shorter (0.92 of it, with many
    sequences). Equal pairs make the FLOPs, and so the rates, comparable with a dense batch.
    Equal arguments give equal lengths. Rounding to whole tokens moves the pairs by at most about
    ``1 / seq_len`` of them.
    """
    shares = _shares(num_sequences, seed)
    scale = seq_len / math.sqrt(sum(share**2 for share in shares) / num_sequences)
    return [max(1, round(scale * share)) for share in shares]


def ragged_cache_lengths(num_sequences: int, seq_len: int, seed: int) -> list[int]:
    """Unequal lengths whose mean is ``seq_len``: a decoding step costs by the tokens in the cache.

    Drawn as in :func:`ragged_lengths`; the longest is adjusted so that the mean is exact.
    """
    shares = _shares(num_sequences, seed)
    total = num_sequences * seq_len
    lengths = [round(share * total / sum(shares)) for share in shares]
    longest = lengths.index(max(lengths))
    lengths[longest] += total - sum(lengths)
    return lengths


def _shares(num_sequences: int, seed: int) -> list[float]:
    """A number from each of equal parts of the range of lengths, in a random order."""
    draw = random.Random(seed)
    part = (LONGEST - SHORTEST) / num_sequences
    shares = [SHORTEST + part * (index + draw.random()) for index in range(num_sequences)]
    shares.sort(key=lambda _: draw.random())
    return shares
