"""Dropout masks that are computed where they are used, from a seed, and stored nowhere.

An element is kept when 32 bits that belong to its place are at least `p * 2^32`. The bits come from Philox-4x32, the
counter-based generator of Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3" (2011), with 7 rounds, which
pass all the tests reported there. One call of it serves 8 neighbouring columns: the counter is (row, column // 8,
stream, 0), and each of its four words gives two numbers, the word and the word with its halves swapped. Each has
exactly the probability asked for; two that share a word decide independently but for ties in their upper 16 bits.
"""

import torch
from torch import Tensor

ROUNDS = 7
COLUMNS_PER_CALL = 8

MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
_LOW = 0xFFFFFFFF


def threshold_of(p: float) -> int:
    """The least 32-bit number at which an element is kept with probability `1 - p`."""
    return min(round(p * 2**32), _LOW)


def draw_seed() -> int:
    """A seed of 62 bits from PyTorch's default generator on the CPU: it moves on, and no device is waited for."""
    return int(torch.randint(2**62, (), device="cpu").item())


def keep_mask(seed: int, stream: int, rows: int, columns: int, p: float, device: torch.device) -> Tensor:
    """Which elements of a [rows, columns] matrix are kept: bool, the same on every device.

    `stream` tells the masks of one seed apart: one for each adapter.
    """
    groups = -(-columns // COLUMNS_PER_CALL)
    row = torch.arange(rows, device=device)[:, None].expand(rows, groups)
    group = torch.arange(groups, device=device)[None, :].expand(rows, groups)
    words = torch.stack(_philox(seed, row, group, stream), dim=-1)  # [rows, groups, 4]
    order = words[..., [0, 2, 1, 3]]  # the order in which the kernels interleave the words
    swapped = (order << 16 & _LOW) | order >> 16
    numbers = torch.stack((order, swapped), dim=-1).reshape(rows, groups * COLUMNS_PER_CALL)
    return numbers[:, :columns] >= threshold_of(p)


def _philox(seed: int, row: Tensor, group: Tensor, stream: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Four words of 32 bits for each counter, held in int64."""
    key0, key1 = seed & _LOW, seed >> 32 & _LOW
    c0, c1, c2, c3 = row, group, torch.full_like(row, stream), torch.zeros_like(row)
    for _ in range(ROUNDS):
        high0, low0 = _multiply(c0, MULTIPLIERS[0])
        high1, low1 = _multiply(c2, MULTIPLIERS[1])
        c0, c1, c2, c3 = high1 ^ c1 ^ key0, low1, high0 ^ c3 ^ key1, low0
        key0, key1 = key0 + WEYL[0] & _LOW, key1 + WEYL[1] & _LOW
    return c0, c1, c2, c3


def _multiply(word: Tensor, factor: int) -> tuple[Tensor, Tensor]:
    """Upper and lower half of a 64-bit product of two 32-bit numbers, in int64 arithmetic that cannot overflow."""
    low = (word & 0xFFFF) * factor  # < 2^48
    high = (word >> 16) * factor + (low >> 16)  # < 2^49
    return high >> 16, (high & 0xFFFF) << 16 | low & 0xFFFF
