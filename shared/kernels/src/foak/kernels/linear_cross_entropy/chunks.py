"""How many tokens' logits exist at a time."""

from collections.abc import Iterator

GPU_FROZEN_BYTES = 128 * 2**20
"""Logits in one chunk of a frozen head on a GPU: 512 tokens of bf16 at a vocabulary of 128256."""

GPU_TRAINED_BYTES = 256 * 2**20
"""The same for a head that is trained: each chunk reads and writes the fp32 sum of the weight's gradient once, so
fewer and larger chunks are faster."""

GPU_LEAST_ROWS = 512
"""Below this many rows a product no longer fills the GPU, whatever the vocabulary."""

CPU_BYTES = 96 * 2**20
"""The same on a CPU. Measured at V 49152, H 576, 1024 tokens, fp32, one core: the products are faster the more rows
they have (64 rows 1.64 s, 128: 1.44, 256: 1.33, 512: 1.29), and the loss's own passes cost little at any size."""

ROW_MULTIPLE = 128
"""Rows of a chunk are a multiple of a matrix product's tile."""


def chunk_rows(count: int, vocab_size: int, itemsize: int, device_type: str, trained: bool) -> int:
    """Rows of one chunk of logits [rows, vocab_size] for `count` tokens, a multiple of `ROW_MULTIPLE`.

    The chunks of one call are of nearly equal size, so that no small last one runs at a low rate.
    """
    if device_type == "cpu":
        budget, least = CPU_BYTES, ROW_MULTIPLE
    else:
        budget, least = GPU_TRAINED_BYTES if trained else GPU_FROZEN_BYTES, GPU_LEAST_ROWS
    rows = max(budget // (vocab_size * itemsize) // ROW_MULTIPLE * ROW_MULTIPLE, least)
    chunks = max(1, -(-count // rows))
    return -(-count // (chunks * ROW_MULTIPLE)) * ROW_MULTIPLE


def spans(count: int, rows: int) -> Iterator[slice]:
    """The slices of `rows` tokens each (the last may be shorter) that cover `count` tokens."""
    for start in range(0, count, max(rows, 1)):
        yield slice(start, min(start + rows, count))
