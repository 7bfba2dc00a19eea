"""What becomes of factors beside 16-bit activations: the numbers that the kernels' `parts` may be.

A factor is multiplied as that many numbers of the activations' dtype which add up to it.
"""

ROUNDED = 1
"""Rounded to the activations' dtype, as autocast does, or of that dtype already."""

SPLIT = 3
"""Split into three: three bf16 numbers hold all 24 bits of an fp32 number."""

WIDE = 0
"""Not split: both operands are multiplied as fp32 numbers, because fp16 has not the range for what lies between the
factors."""
