"""Triton kernels of the cross entropy over vocabulary-sharded logits, for Ascend NPUs (and interpreters).

Three kernels, one job each: `row_statistics_kernel` reads the logits once, `merge_kernel` joins the shards'
statistics, `gradient_kernel` reads the logits once more and writes the gradient; the first and the last have
a form for short rows. Results, payload and what is saved for backward are those of the CUDA kernels and of
`reference`. What differs is how a row is walked, because a vector core of an NPU is programmed like a DSP: it
copies tiles into 192 KiB of local memory (the unified buffer, UB), computes on whole tiles, and every number
that goes from the vector unit to the scalar unit stops both.

- A grid of at most as many programs as there are vector cores; each loops over rows. More programs than cores
  run one after the other at a cost each, and 65535 is the most a grid can have.
- The target's column is left out of the sum by walking a row as two ranges, [0, y) and [y + 1, C). To compare
  in the loop would cost two more tiles of UB and, with integers, a loop over single elements on the oldest
  compiler. Masks are used in loads and stores only, where they are free.
- The gradient is never read back: the target's column is overwritten by one store of its closed form, which
  the compiler orders after the tile's.
- No atomics; no 64-bit integers in vectors (they become loops over single elements): row offsets are 64-bit
  scalars. Labels are compared as scalars, or, in vectors of rows, as fp32, which is exact below 2^24.
- All computation is fp32; there is no fp64 in the vector unit.

`megatron-ce npu-check` compiles each of them for the 910B3 and prints what comes out.

Shapes: N rows (tokens), C columns (this shard's vocabulary), W ranks, K statistics. Formulas: see
`cuda_kernels` and `reference`.
"""

import triton
import triton.language as tl

# Elements after the [K, N] statistics in a rank's payload: the number of columns as (high, low) parts of
# 2^16, padding.
HEADER: tl.constexpr = tl.constexpr(4)
# The running maximum starts here and not at -inf, so that no difference of maxima is (-inf) - (-inf).
LOWEST: tl.constexpr = tl.constexpr(-3.4028234663852886e38)
# A distance from the maximum is cut off here before it is multiplied by its exponential, which is 0: 0 * -inf
# is NaN.
FAR: tl.constexpr = tl.constexpr(-1e30)

# Integers keep one type and no special cases for their values: no vocabulary, batch or rank compiles a kernel
# anew.
_INTEGERS = [
    "inner_rows", "outer_stride", "inner_stride", "column_stride",
    "g_inner_rows", "g_outer_stride", "g_inner_stride", "g_column_stride",
    "n_rows", "n_cols", "first_column", "ignore_index",
]  # fmt: skip
_SMALL_TENSORS = [
    "Y", "PAYLOAD", "GATHERED", "LOSS", "SAVED", "STATS", "G_LOSS", "COLUMN_WEIGHTS", "ROW_WEIGHTS"
]  # fmt: skip


@triton.jit
def _row_offset(row, inner_rows, outer_stride, inner_stride, TWO_LEVEL: tl.constexpr):
    """Element offset of a row, a 64-bit scalar; TWO_LEVEL for 3-D logits whose leading dimensions do not
    collapse.
    """
    row = tl.cast(row, tl.int64)
    if TWO_LEVEL:
        offset = (row // inner_rows) * outer_stride + (row % inner_rows) * inner_stride
    else:
        offset = row * inner_stride
    return offset


@triton.jit
def _tile_at(base, i, column_stride, BLOCK: tl.constexpr, STRIDED: tl.constexpr):
    """Pointers to columns i to i + BLOCK of the row at `base`."""
    if STRIDED:  # the tile's start is a 64-bit scalar, a vector holds what lies within a tile
        at = base + tl.cast(i, tl.int64) * column_stride + tl.arange(0, BLOCK) * column_stride
    else:
        at = base + i + tl.arange(0, BLOCK)
    return at


@triton.jit
def _add_tile(
    base, COLUMN_WEIGHTS, column_stride, i, end, peak, total, sum_x, weighted,
    BLOCK: tl.constexpr, WHOLE: tl.constexpr, STRIDED: tl.constexpr,
    SMOOTH: tl.constexpr, STATISTICS: tl.constexpr, WEIGHTED: tl.constexpr,
):  # fmt: skip
    """Adds columns [i, min(i + BLOCK, end)) to a row's max, sum of exp, sum of x and sum of exp * (x - max).

    WHOLE: the tile ends before `end`. A masked load fills its tile first, and waits until that is done.
    """
    at = _tile_at(base, i, column_stride, BLOCK, STRIDED)
    columns = i + tl.arange(0, BLOCK)
    if WHOLE:
        x = tl.load(at).to(tl.float32)
    else:
        x = tl.load(at, mask=columns < end, other=float("-inf")).to(tl.float32)
    if SMOOTH:
        summand = x
        if not WHOLE:  # the -inf beyond the end would spoil the sum: read once more, with zeros there
            summand = tl.load(at, mask=columns < end, other=0.0).to(tl.float32)
        if WEIGHTED:
            if WHOLE:
                summand = summand * tl.load(COLUMN_WEIGHTS + columns)
            else:
                summand = summand * tl.load(COLUMN_WEIGHTS + columns, mask=columns < end, other=0.0)
        sum_x += tl.sum(summand)
    tile_peak = tl.max(x)
    # Seldom true after the first tile, which saves a trip to the vector unit for one exponential. A NaN or a
    # tile of -inf leaves the maximum as it is; a NaN then shows in the sum.
    if tile_peak > peak:
        shift = peak - tile_peak
        scale = tl.exp(shift)
        if STATISTICS:
            weighted = (weighted + total * tl.where(shift > FAR, shift, FAR)) * scale
        total = total * scale
        peak = tile_peak
    distance = x - peak
    e = tl.exp(distance)
    total += tl.sum(e)
    if STATISTICS:
        weighted += tl.sum(e * tl.maximum(distance, FAR, propagate_nan=tl.PropagateNan.ALL))
    return peak, total, sum_x, weighted


@triton.jit
def _store_header(header, columns_high, columns_low):
    """The shard's number of columns, behind the statistics."""
    tl.store(header, columns_high)
    tl.store(header + 1, columns_low)
    tl.store(header + 2, 0.0)
    tl.store(header + 3, 0.0)


@triton.jit(do_not_specialize=_INTEGERS, do_not_specialize_on_alignment=_SMALL_TENSORS)
def row_statistics_kernel(
    X,                                  # logits: N rows of C columns
    Y,                                  # [N] class ids
    PAYLOAD,                            # [K * N + HEADER]
    COLUMN_WEIGHTS,                     # [C] if WEIGHTED
    inner_rows: tl.int64, outer_stride: tl.int64, inner_stride: tl.int64, column_stride: tl.int32,
    n_rows: tl.int64, n_cols: tl.int32, first_column: tl.int64, ignore_index: tl.int64,
    columns_high, columns_low,          # fp32: C = columns_high * 2^16 + columns_low
    BLOCK: tl.constexpr, TWO_LEVEL: tl.constexpr, STRIDED: tl.constexpr,
    SMOOTH: tl.constexpr, STATISTICS: tl.constexpr, WEIGHTED: tl.constexpr,
):  # fmt: skip
    """One row at a time; see `reference.row_statistics` for what is written. Rows without a live label are
    not read
    unless STATISTICS."""
    for row in range(tl.program_id(0), n_rows, tl.num_programs(0)):
        label = tl.cast(tl.load(Y + row), tl.int64)
        base = X + _row_offset(row, inner_rows, outer_stride, inner_stride, TWO_LEVEL)
        end = n_cols
        if not STATISTICS:
            end = tl.where(label == ignore_index, 0, n_cols)
        shifted = label - first_column
        here = (shifted >= 0) & (shifted < end)
        cut = tl.cast(tl.where(here, shifted, end), tl.int32)
        peak = LOWEST
        total = 0.0
        sum_x = 0.0
        weighted = 0.0
        # whole tiles of [0, cut) and of [cut + 1, end), then what is left of both
        before = cut // BLOCK
        after = tl.maximum(end - cut - 1, 0) // BLOCK
        for tile in range(before + after):
            i = tl.where(tile < before, tile * BLOCK, cut + 1 + (tile - before) * BLOCK)
            peak, total, sum_x, weighted = _add_tile(
                base, COLUMN_WEIGHTS, column_stride, i, end, peak, total, sum_x, weighted,
                BLOCK, True, STRIDED, SMOOTH, STATISTICS, WEIGHTED,
            )  # fmt: skip
        for part in range(2):
            i = tl.where(part == 0, before * BLOCK, cut + 1 + after * BLOCK)
            stop = tl.where(part == 0, cut, end)
            if i < stop:
                peak, total, sum_x, weighted = _add_tile(
                    base, COLUMN_WEIGHTS, column_stride, i, stop, peak, total, sum_x, weighted,
                    BLOCK, False, STRIDED, SMOOTH, STATISTICS, WEIGHTED,
                )  # fmt: skip
        x_target = float("-inf")
        if cut < end:
            x_target = tl.load(base + tl.cast(cut, tl.int64) * column_stride).to(tl.float32)
            if SMOOTH:
                if WEIGHTED:
                    sum_x += x_target * tl.load(COLUMN_WEIGHTS + cut)
                else:
                    sum_x += x_target
        tl.store(PAYLOAD + row, peak)
        tl.store(PAYLOAD + n_rows + row, total)
        tl.store(PAYLOAD + 2 * n_rows + row, x_target)
        k = 3
        if SMOOTH:
            tl.store(PAYLOAD + 3 * n_rows + row, sum_x)
            k = 4
        if STATISTICS:
            tl.store(PAYLOAD + k * n_rows + row, weighted)
    if tl.program_id(0) == 0:
        _store_header(PAYLOAD + (3 + SMOOTH + STATISTICS) * n_rows, columns_high, columns_low)


@triton.jit(do_not_specialize=_INTEGERS, do_not_specialize_on_alignment=_SMALL_TENSORS)
def merge_kernel(
    GATHERED,                           # [W, K * N + HEADER]
    Y,                                  # [N] class ids
    LOSS, SAVED, STATS,                 # [N], [3, N], [4, N]
    ROW_WEIGHTS,                        # [N + 1] if WEIGHTED
    n_rows: tl.int64,
    total_columns, ignore_index_fp32, label_smoothing, z_loss_weight,               # fp32
    WORLD: tl.constexpr, BLOCK: tl.constexpr,
    SMOOTH: tl.constexpr, Z_LOSS: tl.constexpr, STATISTICS: tl.constexpr, EQUAL_SHARDS: tl.constexpr,
    WEIGHTED: tl.constexpr,
):  # fmt: skip
    """Joins the shards' statistics, in rank order on every rank, so that the loss is bitwise the same
    everywhere.
    BLOCK rows at a time. See `reference.merge`."""
    K: tl.constexpr = 3 + SMOOTH + STATISTICS
    lanes = tl.arange(0, BLOCK)
    for block in range(tl.program_id(0), tl.cdiv(n_rows, BLOCK), tl.num_programs(0)):
        start = tl.cast(block, tl.int64) * BLOCK
        inside = lanes < tl.cast(tl.minimum(n_rows - start, BLOCK), tl.int32)
        label = tl.load(Y + start + lanes, mask=inside, other=0).to(tl.float32)
        live = label != ignore_index_fp32
        known = (label >= 0.0) & (label < total_columns)

        peak = tl.full([BLOCK], float("-inf"), tl.float32)
        x_target = tl.full([BLOCK], float("-inf"), tl.float32)
        disagreement = 0.0
        for w in range(WORLD):
            shard = GATHERED + w * (K * n_rows + HEADER)
            peak_w = tl.load(shard + start + lanes, mask=inside, other=0.0)
            total_w = tl.load(shard + n_rows + start + lanes, mask=inside, other=1.0)
            # a shard whose other columns are all -inf
            peak_w = tl.where(total_w == 0.0, float("-inf"), peak_w)
            peak = tl.maximum(peak, peak_w, propagate_nan=tl.PropagateNan.ALL)
            # one rank holds the target, the others say -inf; no maximum here: it may drop a NaN
            x_w = tl.load(shard + 2 * n_rows + start + lanes, mask=inside, other=0.0)
            x_target = tl.where(x_w == float("-inf"), x_target, x_w)
            if EQUAL_SHARDS:
                disagreement += tl.abs(tl.load(shard + K * n_rows) - tl.load(GATHERED + K * n_rows))
                disagreement += tl.abs(tl.load(shard + K * n_rows + 1) - tl.load(GATHERED + K * n_rows + 1))
        reference = tl.where(peak == float("-inf"), 0.0, peak)
        total = tl.zeros([BLOCK], tl.float32)
        weighted = tl.zeros([BLOCK], tl.float32)
        sum_x = tl.zeros([BLOCK], tl.float32)
        for w in range(WORLD):
            shard = GATHERED + w * (K * n_rows + HEADER)
            total_w = tl.load(shard + n_rows + start + lanes, mask=inside, other=1.0)
            shift = tl.load(shard + start + lanes, mask=inside, other=0.0) - reference
            scale = tl.exp(shift)
            total += tl.where(total_w == 0.0, 0.0, total_w * scale)
            if SMOOTH:
                sum_x += tl.load(shard + 3 * n_rows + start + lanes, mask=inside, other=0.0)
            if STATISTICS:
                weighted_w = tl.load(shard + (K - 1) * n_rows + start + lanes, mask=inside, other=0.0)
                weighted += tl.where(total_w == 0.0, 0.0, (weighted_w + total_w * shift) * scale)

        log_total = tl.log(total)
        d = (peak - x_target) + log_total
        small = tl.exp(-tl.abs(d))
        one_plus = 1.0 + small
        # log1p(small) without losing small to rounding (W. Kahan): log(u) * small / (u - 1) for u = 1 + small
        log1p_small = tl.where(one_plus == 1.0, small, tl.log(one_plus) * (small / (one_plus - 1.0)))
        nll = tl.maximum(d, 0.0, propagate_nan=tl.PropagateNan.ALL) + log1p_small
        nll = tl.where(d != d, d, nll)
        nll = tl.where(x_target == float("inf"), float("nan"), nll)  # as dense softmax: inf - inf
        # A label that is no class counts as the row's maximum, as on Megatron's native path: loss = lse -
        # max.
        nll = tl.where(known, nll, log_total + (peak - peak))

        joint_peak = tl.where(known, tl.maximum(peak, x_target, propagate_nan=tl.PropagateNan.ALL), peak)
        e_target = tl.where(known, tl.exp(x_target - joint_peak), 0.0)
        rescale = tl.exp(peak - joint_peak)
        joint_total = tl.where(known, total * rescale + e_target, total)
        log_joint = tl.log(joint_total)
        # expm1(-nll) the same way: the gradient at the target, p_target - 1
        em = tl.exp(-nll)
        kahan = tl.where(em == 1.0, -nll, (em - 1.0) * (-nll / tl.log(em)))
        grad_target = tl.where(nll < 1.0, kahan, em - 1.0)

        lse = joint_peak + log_joint
        loss = nll
        if WEIGHTED:
            loss = nll * tl.load(ROW_WEIGHTS + start + lanes, mask=inside, other=0.0)
        if SMOOTH:
            if WEIGHTED:
                others = (lse * tl.load(ROW_WEIGHTS + n_rows) - sum_x) / total_columns
            else:
                others = lse - sum_x / total_columns
            loss = loss * (1.0 - label_smoothing) + others * label_smoothing
        if Z_LOSS:
            loss += lse * lse * z_loss_weight
        if EQUAL_SHARDS:
            # Shards of unequal sizes give wrong column offsets on every rank. The host check raises where it
            # can look; where it cannot (a captured graph) the numbers must at least be unusable, on all ranks
            # alike.
            unusable = tl.where(disagreement == 0.0, 0.0, float("nan"))
            loss += unusable
            joint_peak += unusable
        tl.store(LOSS + start + lanes, tl.where(live, loss, 0.0), mask=inside)
        tl.store(SAVED + start + lanes, tl.where(live, joint_peak, 0.0), mask=inside)
        tl.store(SAVED + n_rows + start + lanes, tl.where(live, log_joint, 0.0), mask=inside)
        tl.store(SAVED + 2 * n_rows + start + lanes, tl.where(live, grad_target, 0.0), mask=inside)
        if STATISTICS:
            d_target = tl.where(e_target == 0.0, 0.0, e_target * (x_target - joint_peak))
            d_others = tl.where(total == 0.0, 0.0, (weighted + total * (peak - joint_peak)) * rescale)
            shown = live & known
            tl.store(STATS + start + lanes, lse, mask=inside)
            tl.store(STATS + n_rows + start + lanes, tl.where(shown, -nll, 0.0), mask=inside)
            tl.store(
                STATS + 2 * n_rows + start + lanes,
                log_joint - (d_others + d_target) / joint_total,
                mask=inside,
            )
            correct = tl.where(x_target >= peak, 1.0, 0.0)
            tl.store(STATS + 3 * n_rows + start + lanes, tl.where(shown, correct, 0.0), mask=inside)


@triton.jit
def _gradient_tile(
    base, g_base, COLUMN_WEIGHTS, column_stride, g_column_stride, i, n_cols,
    peak, log_total, factor, subtrahend,
    BLOCK: tl.constexpr, WHOLE: tl.constexpr, STRIDED: tl.constexpr, G_STRIDED: tl.constexpr,
    SMOOTH: tl.constexpr, WEIGHTED: tl.constexpr,
):  # fmt: skip
    """Writes the gradient of columns [i, min(i + BLOCK, n_cols)) as if none were the target's."""
    at = _tile_at(base, i, column_stride, BLOCK, STRIDED)
    g_at = _tile_at(g_base, i, g_column_stride, BLOCK, G_STRIDED)
    columns = i + tl.arange(0, BLOCK)
    if WHOLE:
        x = tl.load(at).to(tl.float32)
    else:
        x = tl.load(at, mask=columns < n_cols, other=0.0).to(tl.float32)
    # in this order: x - (peak + log_total) would lose the digits of large logits
    gradient = tl.exp((x - peak) - log_total) * factor
    if SMOOTH:
        if WEIGHTED:
            if WHOLE:
                weights = tl.load(COLUMN_WEIGHTS + columns)
            else:
                weights = tl.load(COLUMN_WEIGHTS + columns, mask=columns < n_cols, other=0.0)
            gradient = gradient - weights * subtrahend
        else:
            gradient = gradient - subtrahend
    if WHOLE:
        tl.store(g_at, gradient.to(g_base.dtype.element_ty))
    else:
        tl.store(g_at, gradient.to(g_base.dtype.element_ty), mask=columns < n_cols)


@triton.jit(do_not_specialize=_INTEGERS, do_not_specialize_on_alignment=_SMALL_TENSORS)
def gradient_kernel(
    X,                                  # logits: N rows of C columns
    G_X,                                # their gradient; may be X itself
    Y,                                  # [N] class ids
    G_LOSS,                             # [N], fp32
    SAVED,                              # [3, N]
    COLUMN_WEIGHTS, ROW_WEIGHTS,        # [C], [N + 1] if WEIGHTED
    inner_rows: tl.int64, outer_stride: tl.int64, inner_stride: tl.int64, column_stride: tl.int32,
    g_inner_rows: tl.int64, g_outer_stride: tl.int64, g_inner_stride: tl.int64, g_column_stride: tl.int32,
    n_rows: tl.int64, n_cols: tl.int32, first_column: tl.int64, ignore_index: tl.int64,
    label_smoothing, one_less_smoothing, per_class, one_class, double_z_loss_weight,  # fp32, see ascend.py
    BLOCK: tl.constexpr, TWO_LEVEL: tl.constexpr, G_TWO_LEVEL: tl.constexpr,
    STRIDED: tl.constexpr, G_STRIDED: tl.constexpr, SMOOTH: tl.constexpr, Z_LOSS: tl.constexpr,
    WEIGHTED: tl.constexpr,
):  # fmt: skip
    """One row at a time. The gradient as `reference.gradient` states it; ignored rows become exact zeros
    without
    being read."""
    for row in range(tl.program_id(0), n_rows, tl.num_programs(0)):
        label = tl.cast(tl.load(Y + row), tl.int64)
        live = label != ignore_index
        scale = tl.where(live, tl.load(G_LOSS + row), 0.0)
        peak = tl.load(SAVED + row)
        log_total = tl.load(SAVED + n_rows + row)
        grad_target = tl.load(SAVED + 2 * n_rows + row)
        base = X + _row_offset(row, inner_rows, outer_stride, inner_stride, TWO_LEVEL)
        g_base = G_X + _row_offset(row, g_inner_rows, g_outer_stride, g_inner_stride, G_TWO_LEVEL)

        # grad = scale * (p * (own + shared) - per_class * w[c]), at the target
        #        scale * (grad_target * own + p * shared - per_class * w[y])
        own = one_less_smoothing
        shared = label_smoothing
        factor = scale
        subtrahend = scale * per_class
        if WEIGHTED:
            row_weight = tl.load(ROW_WEIGHTS + row)
            own = own * row_weight
            shared = label_smoothing * (tl.load(ROW_WEIGHTS + n_rows) * one_class)
        if Z_LOSS:
            shared += double_z_loss_weight * (peak + log_total)
            factor = scale * (own + shared)
        elif WEIGHTED:
            factor = scale * (own + shared)
        whole = n_cols // BLOCK * BLOCK
        if live:
            for i in range(0, whole, BLOCK):
                _gradient_tile(
                    base, g_base, COLUMN_WEIGHTS, column_stride, g_column_stride, i, n_cols,
                    peak, log_total, factor, subtrahend,
                    BLOCK, True, STRIDED, G_STRIDED, SMOOTH, WEIGHTED,
                )  # fmt: skip
            if whole < n_cols:
                _gradient_tile(
                    base, g_base, COLUMN_WEIGHTS, column_stride, g_column_stride, whole, n_cols,
                    peak, log_total, factor, subtrahend,
                    BLOCK, False, STRIDED, G_STRIDED, SMOOTH, WEIGHTED,
                )  # fmt: skip
        else:
            for i in range(0, n_cols, BLOCK):
                g_at = _tile_at(g_base, i, g_column_stride, BLOCK, G_STRIDED)
                zeros = tl.zeros([BLOCK], G_X.dtype.element_ty)
                tl.store(g_at, zeros, mask=i + tl.arange(0, BLOCK) < n_cols)
        shifted = label - first_column
        if live & (shifted >= 0) & (shifted < n_cols):
            exact = scale * (grad_target * own + (1.0 + grad_target) * shared)
            if SMOOTH:
                if WEIGHTED:
                    exact -= subtrahend * row_weight
                else:
                    exact -= subtrahend
            tl.store(g_base + shifted * g_column_stride, exact.to(G_X.dtype.element_ty))


# Rows shorter than a tile: several of them in one, [ROWS, BLOCK] with BLOCK >= C. The vector unit then never
# waits for a number of a row, and what a row costs at least is shared. The target's column is found by
# comparing column numbers in fp32, one vector instruction, exact below 2^24; short rows leave room for that.


@triton.jit(do_not_specialize=_INTEGERS, do_not_specialize_on_alignment=_SMALL_TENSORS)
def short_row_statistics_kernel(
    X,                                  # logits: N rows of C columns
    Y,                                  # [N] class ids
    PAYLOAD,                            # [K * N + HEADER]
    COLUMN_WEIGHTS,                     # [C] if WEIGHTED
    inner_stride: tl.int32, n_rows: tl.int64, n_cols: tl.int32,
    first_column, columns_high, columns_low,                                           # fp32
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
    SMOOTH: tl.constexpr, STATISTICS: tl.constexpr, WEIGHTED: tl.constexpr,
):  # fmt: skip
    """What `row_statistics_kernel` writes, for ROWS rows at a time; ignored rows are read too."""
    rows = tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)
    for block in range(tl.program_id(0), tl.cdiv(n_rows, ROWS), tl.num_programs(0)):
        start = tl.cast(block, tl.int64) * ROWS
        there = rows < tl.cast(tl.minimum(n_rows - start, ROWS), tl.int32)
        target = tl.load(Y + start + rows, mask=there, other=0).to(tl.float32) - first_column
        at = X + start * inner_stride + rows[:, None] * inner_stride + columns[None, :]
        inside = there[:, None] & (columns < n_cols)[None, :]
        x = tl.load(at, mask=inside, other=float("-inf")).to(tl.float32)
        is_target = columns.to(tl.float32)[None, :] == target[:, None]
        # a sum and not a maximum, which may drop a NaN
        x_target = tl.sum(tl.where(is_target, x, 0.0), 1)
        x_target = tl.where((target >= 0.0) & (target < n_cols), x_target, float("-inf"))
        x = tl.where(is_target, float("-inf"), x)
        peak = tl.maximum(tl.max(x, 1), LOWEST, propagate_nan=tl.PropagateNan.ALL)
        distance = x - peak[:, None]
        e = tl.exp(distance)
        out = PAYLOAD + start
        tl.store(out + rows, peak, mask=there)
        tl.store(out + n_rows + rows, tl.sum(e, 1), mask=there)
        tl.store(out + 2 * n_rows + rows, x_target, mask=there)
        if SMOOTH:
            summand = tl.load(at, mask=inside, other=0.0).to(tl.float32)
            if WEIGHTED:
                summand = (
                    summand * tl.load(COLUMN_WEIGHTS + columns, mask=columns < n_cols, other=0.0)[None, :]
                )
            tl.store(out + 3 * n_rows + rows, tl.sum(summand, 1), mask=there)
        if STATISTICS:
            weighted = tl.sum(e * tl.maximum(distance, FAR, propagate_nan=tl.PropagateNan.ALL), 1)
            tl.store(out + (3 + SMOOTH) * n_rows + rows, weighted, mask=there)
    if tl.program_id(0) == 0:
        _store_header(PAYLOAD + (3 + SMOOTH + STATISTICS) * n_rows, columns_high, columns_low)


@triton.jit(do_not_specialize=_INTEGERS, do_not_specialize_on_alignment=_SMALL_TENSORS)
def short_row_gradient_kernel(
    X,                                  # logits: N rows of C columns
    G_X,                                # their gradient; may be X itself
    Y,                                  # [N] class ids
    G_LOSS,                             # [N], fp32
    SAVED,                              # [3, N]
    COLUMN_WEIGHTS, ROW_WEIGHTS,        # [C], [N + 1] if WEIGHTED
    inner_stride: tl.int32, g_inner_stride: tl.int32, n_rows: tl.int64, n_cols: tl.int32,
    first_column, ignore_index_fp32,                                                   # fp32
    label_smoothing, one_less_smoothing, per_class, one_class, double_z_loss_weight,   # fp32
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
    SMOOTH: tl.constexpr, Z_LOSS: tl.constexpr, WEIGHTED: tl.constexpr,
):  # fmt: skip
    """What `gradient_kernel` writes, for ROWS rows at a time."""
    rows = tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)
    for block in range(tl.program_id(0), tl.cdiv(n_rows, ROWS), tl.num_programs(0)):
        start = tl.cast(block, tl.int64) * ROWS
        there = rows < tl.cast(tl.minimum(n_rows - start, ROWS), tl.int32)
        label = tl.load(Y + start + rows, mask=there, other=0).to(tl.float32)
        alive = tl.where(label != ignore_index_fp32, 1.0, 0.0)
        scale = tl.where(alive == 1.0, tl.load(G_LOSS + start + rows, mask=there, other=0.0), 0.0)
        peak = tl.load(SAVED + start + rows, mask=there, other=0.0)
        log_total = tl.load(SAVED + n_rows + start + rows, mask=there, other=0.0)
        grad_target = tl.load(SAVED + 2 * n_rows + start + rows, mask=there, other=0.0)

        subtrahend = scale * per_class
        factor = scale
        exact = grad_target * one_less_smoothing + (grad_target + 1.0) * label_smoothing
        if WEIGHTED or Z_LOSS:
            own = grad_target * 0.0 + one_less_smoothing
            shared = grad_target * 0.0 + label_smoothing
            if WEIGHTED:
                row_weight = tl.load(ROW_WEIGHTS + start + rows, mask=there, other=0.0)
                own = row_weight * one_less_smoothing
                shared = shared * (tl.load(ROW_WEIGHTS + n_rows) * one_class)
            if Z_LOSS:
                shared += (peak + log_total) * double_z_loss_weight
            factor = scale * (own + shared)
            exact = grad_target * own + (grad_target + 1.0) * shared
        exact = exact * scale
        if SMOOTH:
            if WEIGHTED:
                exact -= subtrahend * row_weight
            else:
                exact -= subtrahend

        inside = there[:, None] & (columns < n_cols)[None, :]
        at = X + start * inner_stride + rows[:, None] * inner_stride + columns[None, :]
        x = tl.load(at, mask=inside, other=0.0).to(tl.float32)
        gradient = tl.exp((x - peak[:, None]) - log_total[:, None]) * factor[:, None]
        if SMOOTH:
            if WEIGHTED:
                weights = tl.load(COLUMN_WEIGHTS + columns, mask=columns < n_cols, other=0.0)
                gradient = gradient - weights[None, :] * subtrahend[:, None]
            else:
                gradient = gradient - subtrahend[:, None]
        is_target = columns.to(tl.float32)[None, :] == (label - first_column)[:, None]
        gradient = tl.where(is_target, exact[:, None], gradient)
        # an ignored row may hold NaN
        gradient = tl.where(alive[:, None] == 1.0, gradient, 0.0)
        g_at = G_X + start * g_inner_stride + rows[:, None] * g_inner_stride + columns[None, :]
        tl.store(g_at, gradient.to(G_X.dtype.element_ty), mask=inside)
