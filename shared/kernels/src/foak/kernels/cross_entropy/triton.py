"""The row functions as Triton kernels: one program a row, one pass for the numbers, one for the gradient.

A lane takes `PER_LANE` columns in one step along the row and keeps its own running maximum and sums, which are merged
once at the end of the row: the loop has no reduction across threads to wait for. A step's columns are loaded during the
step before it. The maximum starts at the label's logit, so it is finite from the first column even where logits are
minus infinity. `rows.py` says what the functions are for, the op's README the maths.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from foak.kernels.cross_entropy.labels import out_of_range_message
from foak.kernels.cross_entropy.options import LossOptions
from foak.kernels.cross_entropy.rows import RowBuffers, Upstream, position_of
from foak.kernels.launch import next_power_of_two
from foak.kernels.launcher import Launcher, planned

WIDEST_BLOCK = 4096
"""Columns of one step along a row, at most: 16 warps. On an H200 the loss and its gradient take 792 us of 4096 rows of
128256 logits, where steps of 8192 take 819 and of 1024, 828."""

PER_LANE = tl.constexpr(8)
"""Columns that a lane takes in one step: a 16-byte load of bf16."""


@triton.jit
def _step_columns(first, BLOCK: tl.constexpr):
    """The columns of one step, [BLOCK / PER_LANE, PER_LANE]."""
    return first + tl.arange(0, BLOCK // PER_LANE)[:, None] * PER_LANE + tl.arange(0, PER_LANE)[None, :]


@triton.jit
def _load_step(row_ptr, first, vocab_size, BLOCK: tl.constexpr):
    columns = _step_columns(first, BLOCK)
    return tl.load(row_ptr + columns, mask=columns < vocab_size, other=0.0)


@triton.jit
def _log1p(x):
    # Where 1 + x rounds, log(1 + x) is off by as much as the rounded sum is off x, and the quotient mends both.
    y = 1.0 + x
    step = y - 1.0
    return tl.where(step == 0.0, x, tl.log(y) * (x / tl.where(step == 0.0, 1.0, step)))


@triton.jit
def _cap(u):
    """tanh(u) and its derivative, both without cancellation."""
    decay = tl.exp(-2.0 * tl.abs(u))
    far = (1.0 - decay) / (1.0 + decay)
    square = u * u
    near = u * (1.0 - square * (1.0 / 3.0 - square * (2.0 / 15.0)))
    size = tl.abs(u)
    return tl.where(size < 0.1, near, tl.where(u < 0.0, -far, far)), 4.0 * decay / ((1.0 + decay) * (1.0 + decay))


@triton.jit
def _scaled(x, logit_scale, softcap, SOFTCAP: tl.constexpr):
    """The scaled and soft-capped logit."""
    z = x.to(tl.float32) * logit_scale
    if SOFTCAP:
        z, _ = _cap(z / softcap)
        z *= softcap
    return z


@triton.jit
def _scaled_with_slope(x, logit_scale, softcap, SOFTCAP: tl.constexpr):
    """The scaled and soft-capped logit, and its derivative with respect to `x`."""
    z = x.to(tl.float32) * logit_scale
    slope = logit_scale
    if SOFTCAP:
        z, bend = _cap(z / softcap)
        z *= softcap
        slope = bend * logit_scale
    return z, slope


@triton.jit
def _label_log_prob(target, lse, miss):
    return tl.where(miss < 0.5, _log1p(-tl.minimum(miss, 0.5)), target - lse)


@triton.jit
def _write_zeros(row_ptr, vocab_size, BLOCK: tl.constexpr):
    for first in range(0, vocab_size, BLOCK):
        columns = first + tl.arange(0, BLOCK)
        tl.store(row_ptr + columns, tl.zeros([BLOCK], row_ptr.dtype.element_ty), mask=columns < vocab_size)


@triton.jit
def _write_gradient(
    logits_ptr,  # this row's logits
    gradient_ptr,  # where this row's gradient goes, possibly the same
    label,
    target,  # the label's scaled and capped logit
    lse,
    miss,
    entropy,
    d_loss,  # upstream gradients of the row's outputs
    d_log_prob,
    d_entropy,
    vocab_size,
    logit_scale,
    softcap,
    smoothing,
    z_loss,
    SOFTCAP: tl.constexpr,
    ENTROPY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    growth = 2.0 * z_loss * lse
    floor = d_loss * smoothing / vocab_size
    weight = d_loss * (1.0 + growth) - d_log_prob
    at_label = d_loss * (growth * (1.0 - miss) - miss + smoothing) - floor + d_log_prob * miss
    if ENTROPY:
        at_label -= d_entropy * (1.0 - miss) * (_label_log_prob(target, lse, miss) + entropy)
    following = _load_step(logits_ptr, 0, vocab_size, BLOCK)
    for first in range(0, vocab_size, BLOCK):
        x = following
        following = _load_step(logits_ptr, first + BLOCK, vocab_size, BLOCK)
        columns = _step_columns(first, BLOCK)
        z, slope = _scaled_with_slope(x, logit_scale, softcap, SOFTCAP)
        log_p = z - lse
        p = tl.exp(log_p)
        g = weight * p - floor
        if ENTROPY:
            g -= d_entropy * tl.where(p > 0.0, p * (log_p + entropy), 0.0)
        g = tl.where(columns == label, at_label, g) * slope
        tl.store(gradient_ptr + columns, g.to(gradient_ptr.dtype.element_ty), mask=columns < vocab_size)


@triton.jit(do_not_specialize=["out_stride", "ignore_index"])
def _forward_kernel(
    logits_ptr,  # rows of vocab_size, logits_stride apart
    labels_ptr,  # [rows], int32 or int64
    out_ptr,  # [fields, rows], fp32, fields out_stride apart
    gradient_ptr,  # rows of vocab_size, gradient_stride apart; unused without GRADIENT
    valid_ptr,  # [1], int32: 0 is written where a label is out of range
    logits_stride,
    gradient_stride,
    out_stride,
    vocab_size,
    ignore_index,
    logit_scale,
    softcap,
    smoothing,
    z_loss,
    SOFTCAP: tl.constexpr,
    SMOOTHING: tl.constexpr,
    GRADIENT: tl.constexpr,
    LOG_PROBS: tl.constexpr,  # this and the next: the field's place in `out`, -1 when it is not asked for
    ENTROPY: tl.constexpr,
    TOP1: tl.constexpr,
    LOG_SUM_SQ: tl.constexpr,
    MEAN: tl.constexpr,
    FIELDS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * logits_stride
    gradient_ptr += row * gradient_stride
    out_ptr += row
    out_step = tl.cast(out_stride, tl.int64)
    label = tl.load(labels_ptr + row).to(tl.int64)
    if label == ignore_index:
        for field in tl.static_range(FIELDS):
            tl.store(out_ptr + field * out_step, 0.0)
        if GRADIENT:
            _write_zeros(gradient_ptr, vocab_size, BLOCK)
        return
    in_vocabulary = (label >= 0) & (label < vocab_size)
    tl.store(valid_ptr, 0, mask=in_vocabulary == 0)
    label = tl.where(in_vocabulary, label, 0)
    target = _scaled(tl.load(logits_ptr + label), logit_scale, softcap, SOFTCAP)

    LANES: tl.constexpr = BLOCK // PER_LANE
    peaks = tl.full([LANES], 0.0, tl.float32) + tl.maximum(target, -3.0e38)
    others = tl.zeros([LANES], tl.float32)  # sum of exp(z - peak) over the columns that are not the label
    moments = tl.zeros([LANES], tl.float32)  # of exp(z - peak) * (z - peak)
    squares = tl.zeros([LANES], tl.float32)  # of exp(z - peak)^2
    totals = tl.zeros([LANES], tl.float32)  # of z, over all columns
    ahead = tl.zeros([LANES], tl.int32)  # columns that argmax would prefer to the label
    following = _load_step(logits_ptr, 0, vocab_size, BLOCK)
    for first in range(0, vocab_size, BLOCK):
        x = following
        following = _load_step(logits_ptr, first + BLOCK, vocab_size, BLOCK)
        columns = _step_columns(first, BLOCK)
        mask = columns < vocab_size
        z = _scaled(x, logit_scale, softcap, SOFTCAP)
        if SMOOTHING or MEAN >= 0:
            totals += tl.sum(tl.where(mask, z, 0.0), axis=1)
        z = tl.where(mask, z, float("-inf"))
        if TOP1 >= 0:
            ahead += tl.sum(tl.where((z > target) | ((z == target) & (columns < label)), 1, 0), axis=1)
        risen = tl.maximum(peaks, tl.max(z, axis=1))
        decay = tl.exp(peaks - risen)
        gap = z - risen[:, None]
        term = tl.where(columns == label, 0.0, tl.exp(gap))
        if ENTROPY >= 0:
            gap = tl.where(gap < -1000.0, -1000.0, gap)  # exp is 0 there, and 0 * gap is to be 0; a NaN stays a NaN
            moments = decay * (moments + others * (peaks - risen)) + tl.sum(term * gap, axis=1)
        if LOG_SUM_SQ >= 0:
            squares = decay * decay * squares + tl.sum(term * term, axis=1)
        others = decay * others + tl.sum(term, axis=1)
        peaks = risen

    peak = tl.max(peaks, axis=0)
    decay = tl.exp(peaks - peak)
    own = tl.exp(target - peak)
    rest = tl.sum(decay * others, axis=0)
    mass = rest + own
    log_mass = tl.where(target == peak, _log1p(rest), tl.log(mass))
    lse = peak + log_mass
    miss = rest / mass
    nll = log_mass + (peak - target)
    loss = nll
    mean = tl.sum(totals, axis=0) / vocab_size
    if SMOOTHING:
        loss = (1.0 - smoothing) * nll + smoothing * (lse - mean)
    loss += z_loss * lse * lse
    tl.store(out_ptr, lse)
    tl.store(out_ptr + out_step, miss)
    tl.store(out_ptr + 2 * out_step, loss)
    if LOG_PROBS >= 0:
        tl.store(out_ptr + LOG_PROBS * out_step, -nll)
    if ENTROPY >= 0:
        moment = tl.sum(decay * (moments + others * (peaks - peak)), axis=0)
        moment += tl.where(own > 0.0, own * (target - peak), 0.0)
        entropy = log_mass - moment / mass
        tl.store(out_ptr + ENTROPY * out_step, entropy)
    if TOP1 >= 0:
        tl.store(out_ptr + TOP1 * out_step, tl.where(tl.sum(ahead, axis=0) == 0, 1.0, 0.0))
    if LOG_SUM_SQ >= 0:
        square = tl.sum(decay * decay * squares, axis=0) + own * own
        tl.store(out_ptr + LOG_SUM_SQ * out_step, tl.log(square) - 2.0 * log_mass)
    if MEAN >= 0:
        tl.store(out_ptr + MEAN * out_step, mean)
    if GRADIENT:
        _write_gradient(
            logits_ptr,
            gradient_ptr,
            label,
            target,
            lse,
            miss,
            0.0,
            1.0,
            0.0,
            0.0,
            vocab_size,
            logit_scale,
            softcap,
            smoothing,
            z_loss,
            SOFTCAP,
            False,
            BLOCK,
        )


@triton.jit(do_not_specialize=["saved_stride", "ignore_index"])
def _gradient_kernel(
    logits_ptr,  # rows of vocab_size, logits_stride apart
    labels_ptr,  # [rows], int32 or int64
    saved_ptr,  # [fields, rows], fp32, fields saved_stride apart: lse, miss, ...
    d_loss_ptr,  # [rows] each, fp32; the first is unused without HAS_LOSS and so on
    d_log_prob_ptr,
    d_entropy_ptr,
    gradient_ptr,  # rows of vocab_size, gradient_stride apart
    logits_stride,
    gradient_stride,
    saved_stride,
    vocab_size,
    ignore_index,
    logit_scale,
    softcap,
    smoothing,
    z_loss,
    SOFTCAP: tl.constexpr,
    HAS_LOSS: tl.constexpr,
    HAS_LOG_PROBS: tl.constexpr,
    ENTROPY: tl.constexpr,  # the entropy's place in `saved`, -1 when nothing flows into it
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * logits_stride
    gradient_ptr += row * gradient_stride
    saved_ptr += row
    saved_step = tl.cast(saved_stride, tl.int64)
    label = tl.load(labels_ptr + row).to(tl.int64)
    if label == ignore_index:
        _write_zeros(gradient_ptr, vocab_size, BLOCK)
        return
    label = tl.where((label >= 0) & (label < vocab_size), label, 0)
    target = 0.0
    d_loss = 0.0
    d_log_prob = 0.0
    d_entropy = 0.0
    entropy = 0.0
    if HAS_LOSS:
        d_loss = tl.load(d_loss_ptr + row)
    if HAS_LOG_PROBS:
        d_log_prob = tl.load(d_log_prob_ptr + row)
    if ENTROPY >= 0:
        d_entropy = tl.load(d_entropy_ptr + row)
        entropy = tl.load(saved_ptr + ENTROPY * saved_step)
        target = _scaled(tl.load(logits_ptr + label), logit_scale, softcap, SOFTCAP)
        # In place: no thread may write the label's column before every thread has read it.
        tl.debug_barrier()
    _write_gradient(
        logits_ptr,
        gradient_ptr,
        label,
        target,
        tl.load(saved_ptr),
        tl.load(saved_ptr + saved_step),
        entropy,
        d_loss,
        d_log_prob,
        d_entropy,
        vocab_size,
        logit_scale,
        softcap,
        smoothing,
        z_loss,
        SOFTCAP,
        ENTROPY >= 0,
        BLOCK,
    )


@planned
def _forward_plan(vocab_size: int, softcap: bool, smoothing: bool, gradient: bool, fields: tuple[str, ...]) -> Launcher:
    block, warps = _block(vocab_size)
    return Launcher(
        _forward_kernel,
        num_warps=warps,
        SOFTCAP=softcap,
        SMOOTHING=smoothing,
        GRADIENT=gradient,
        LOG_PROBS=position_of("log_probs", fields),
        ENTROPY=position_of("entropy", fields),
        TOP1=position_of("is_top1", fields),
        LOG_SUM_SQ=position_of("log_sum_sq_probs", fields),
        MEAN=position_of("mean_logits", fields),
        FIELDS=len(fields),
        BLOCK=block,
    )


@planned
def _gradient_plan(vocab_size: int, softcap: bool, has_loss: bool, has_log_probs: bool, entropy: int) -> Launcher:
    block, warps = _block(vocab_size)
    return Launcher(
        _gradient_kernel,
        num_warps=warps,
        SOFTCAP=softcap,
        HAS_LOSS=has_loss,
        HAS_LOG_PROBS=has_log_probs,
        ENTROPY=entropy,
        BLOCK=block,
    )


def forward_rows(
    logits: Tensor,
    labels: Tensor,
    out: RowBuffers,
    options: LossOptions,
    gradient: Tensor | None = None,
    overwrite: bool = False,
) -> None:
    """Fills `out` from `logits` [n, V] (rows of unit stride) and `labels` [n]; see `rows.py`.

    A row whose label is `ignore_index` gets zeros and is not read. `overwrite` is of no use here.
    """
    count, vocab_size = logits.shape
    if count == 0:
        return
    valid = torch.ones(1, dtype=torch.int32, device=logits.device)
    target = logits if gradient is None else gradient
    launch = _forward_plan(
        vocab_size, options.softcap is not None, options.label_smoothing != 0.0, gradient is not None, out.fields
    )
    strides = logits.stride(0), target.stride(0), out.values.stride(0)
    launch((count,), (logits, labels, out.values, target, valid), *strides, vocab_size, *_numbers(options))
    if logits.device.type != "cpu":
        torch._assert_async(valid, out_of_range_message(vocab_size, options))


def gradient_rows(
    logits: Tensor, labels: Tensor, saved: RowBuffers, upstream: Upstream, options: LossOptions, gradient: Tensor
) -> None:
    """Writes the gradient of the weighted outputs with respect to `logits` [n, V] into `gradient`; see `rows.py`."""
    count, vocab_size = logits.shape
    if count == 0:
        return
    entropy = -1 if upstream.entropy is None else saved.position("entropy")
    launch = _gradient_plan(
        vocab_size, options.softcap is not None, upstream.loss is not None, upstream.log_probs is not None, entropy
    )
    flowing = (saved.values if value is None else value for value in upstream)
    strides = logits.stride(0), gradient.stride(0), saved.values.stride(0)
    launch((count,), (logits, labels, saved.values, *flowing, gradient), *strides, vocab_size, *_numbers(options))


def _block(vocab_size: int) -> tuple[int, int]:
    """Columns of one step along a row, and the warps that take it: 8 columns a thread."""
    return (block := min(WIDEST_BLOCK, max(256, next_power_of_two(vocab_size)))), block // 256


def _numbers(options: LossOptions) -> tuple[int, float, float, float, float]:
    softcap = 1.0 if options.softcap is None else float(options.softcap)
    scale, smoothing, z_loss = (float(x) for x in (options.logit_scale, options.label_smoothing, options.z_loss))
    return options.ignore_index, scale, softcap, smoothing, z_loss
