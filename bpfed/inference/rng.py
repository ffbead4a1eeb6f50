"""Randomness as a function: every number is a hash of who asks for it and why, so nothing else can change it.

A *key* is two int32 words derived from (seed, round, client, purpose); `normal` and `uniform` hash a key with a
counter. There is no generator whose state passes from one call to the next. Hence a client draws the same numbers
whatever the chunk size, whoever shares its batch, whether the run was resumed, and on every device (up to rounding).
The hash is plain integer arithmetic on tensors, so a compiler fuses it into the kernel that uses the noise.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple, overload

import numpy as np
import torch
from torch import Tensor

_GOLDEN = 0x9E3779B97F4A7C15
_U64 = np.uint64


class Purpose(IntEnum):
    """What a draw is for; one word of the key, so that no two uses share numbers."""

    WEIGHTS = 1  # noise of the local steps: weight draws, dropout
    SHUFFLE = 2  # order of the examples in each local epoch
    PARTICIPATION = 3  # who trains in a round
    ABSENCE = 4  # who of them fails to return
    EVALUATION = 5  # weight draws of the posterior predictive
    INIT = 6  # initial weights
    SAMPLE = 7  # which clients are evaluated
    TUNING = 8  # a client's passes over its own data before it predicts: order and noise
    ADAPTATION = 9  # a newcomer's passes over its examples: order and noise
    HOLD_OUT = 10  # which training examples are kept for calibration
    PRIVACY = 11  # noise on the sum of updates


def client_ids(names: Sequence[str]) -> np.ndarray:
    """A 64-bit word for each client's name, ``[N]`` uint64."""
    digests = b"".join(hashlib.blake2b(name.encode(), digest_size=8).digest() for name in names)
    return np.frombuffer(digests, dtype="<u8").astype(_U64)


def _mix64(x: np.ndarray) -> np.ndarray:
    """The finaliser of SplitMix64, a bijection of 64-bit words that leaves no visible trace of its input."""
    x = (x ^ (x >> _U64(30))) * _U64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> _U64(27))) * _U64(0x94D049BB133111EB)
    return x ^ (x >> _U64(31))


def words(seed: int, round_: int, purpose: Purpose, ids: np.ndarray) -> np.ndarray:
    """One 64-bit word for each client, ``[N]`` uint64, from (seed, round, purpose, client)."""
    with np.errstate(over="ignore"):
        x = np.full(len(ids), seed & 0xFFFFFFFFFFFFFFFF, dtype=_U64)
        for part in (round_, int(purpose)):
            x = _mix64(x + _U64(_GOLDEN)) ^ _U64(part & 0xFFFFFFFFFFFFFFFF)
        return _mix64(_mix64(x + _U64(_GOLDEN)) ^ ids.astype(_U64))


def keys(seed: int, round_: int, purpose: Purpose, ids: np.ndarray) -> Tensor:
    """A key for each client, ``[N, 2]`` int32."""
    pair = words(seed, round_, purpose, ids).astype("<u8").view("<i4").reshape(-1, 2)
    return torch.from_numpy(pair.astype(np.int32))


def key(seed: int, purpose: Purpose, word: int = 0) -> Tensor:
    """A key that belongs to no client, ``[2]`` int32."""
    return keys(seed, word, purpose, np.zeros(1, dtype=_U64))[0]


def _signed(word: int) -> int:
    return word - (1 << 32) if word >= 1 << 31 else word


_M1, _M2, _STEP = _signed(0x7FEB352D), _signed(0x846CA68B), _signed(0x9E3779B9)


def _mix(x: Tensor) -> Tensor:
    """A bijection of 32-bit words (xor-shift and multiply, twice); the shifts are logical, hence the masks."""
    x = x ^ ((x >> 16) & 0xFFFF)
    x = x * _M1
    x = x ^ ((x >> 15) & 0x1FFFF)
    x = x * _M2
    return x ^ ((x >> 16) & 0xFFFF)


class SplitKey(NamedTuple):
    """A key taken apart into its two words, ``[..., 1]`` each, for folds upon folds.

    A fold of a tensor joins words that the next fold takes apart again. A compiler that moves the join to where it is
    used computes both words for either, so its work grows threefold with each fold: minutes instead of seconds.
    """

    first: Tensor
    second: Tensor

    @classmethod
    def of(cls, key: Key) -> SplitKey:
        """The words of a key, ``[..., 2]``."""
        # Slices rather than elements: under vmap an element is a scalar, and the compiler takes a constant that meets
        # a scalar through float32, which costs its last bits (torch 2.13).
        return key if isinstance(key, SplitKey) else cls(key[..., :1], key[..., 1:])


Key = Tensor | SplitKey


@overload
def fold(key: Tensor, word: int | Tensor) -> Tensor: ...
@overload
def fold(key: SplitKey, word: int | Tensor) -> SplitKey: ...
def fold(key: Key, word: int | Tensor) -> Key:
    """A new key ``[..., 2]`` from a key and a further word (a step, a draw, a layer).

    ``word`` is an int or an int32 tensor that broadcasts against ``key[..., 0]``.
    """
    one, other = SplitKey.of(key)
    step = _mix(word[..., None] + _STEP) if isinstance(word, Tensor) else _mixed(word + _STEP)
    first = _mix(one + step)
    second = _mix(other ^ first)
    return SplitKey(first, second) if isinstance(key, SplitKey) else torch.cat([first, second], dim=-1)


def _mixed(x: int) -> int:
    """`_mix` of a number known beforehand."""
    x &= 0xFFFFFFFF
    for shift, factor in ((16, _M1), (15, _M2)):
        x = (x ^ (x >> shift)) * factor & 0xFFFFFFFF
    return _signed(x ^ (x >> 16))


def bits(key: Key, count: int) -> Tensor:
    """``count`` random 32-bit words from each key, ``[..., count]`` int32."""
    first, second = SplitKey.of(key)
    counter = torch.arange(count, dtype=torch.int32, device=first.device)
    return _mix(_mix(counter + first) ^ second)


def uniform(key: Key, count: int) -> Tensor:
    """``count`` numbers in [0, 1) from each key, ``[..., count]`` float32."""
    return ((bits(key, count) >> 8) & 0xFFFFFF).float() * 2.0**-24


def normal(key: Key, count: int) -> Tensor:
    """``count`` standard normal numbers from each key, ``[..., count]`` float32 (Box and Muller, both halves used)."""
    word = bits(key, (count + 1) // 2)
    radius = torch.sqrt(-2.0 * torch.log((((word >> 8) & 0xFFFFFF) + 1).float() * 2.0**-24))
    angle = ((_mix(word + _STEP) >> 8) & 0xFFFFFF).float() * (2.0 * math.pi * 2.0**-24)
    if not word.is_cuda:
        return torch.cat([radius * torch.cos(angle), radius * torch.sin(angle)], dim=-1)[..., :count]
    # The same numbers as one operation, sin(a) = cos(a − π/2): on a GPU the compiler joins this with what uses the
    # noise, on a CPU it could not vectorise it.
    quarter = torch.arange(2, device=word.device)[:, None] * (0.5 * math.pi)
    return (radius[..., None, :] * torch.cos(angle[..., None, :] - quarter)).flatten(-2)[..., :count]


def permutations(key: Tensor, sizes: Tensor, epochs: int, longest: int) -> Tensor:
    """A random order of each client's examples for each epoch.

    Args:
        key: ``[S, 2]``.
        sizes: Number of examples of each client, ``[S]``.
        epochs: Number of orders for each client.
        longest: At least the largest of ``sizes``.

    Returns:
        ``[S, epochs, longest]`` int64; the first ``sizes[s]`` entries of a row are an order of ``range(sizes[s])``,
        and an order does not depend on ``longest``.
    """
    epoch = torch.arange(epochs, dtype=torch.int32, device=key.device)
    rank = bits(fold(key[:, None, :].expand(-1, epochs, -1), epoch), longest).long()
    rank = rank.masked_fill(
        torch.arange(longest, device=key.device) >= sizes[:, None, None], torch.iinfo(torch.int64).max
    )
    return rank.argsort(dim=-1, stable=True)
