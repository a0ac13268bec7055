"""Triton kernels of the cross entropy over vocabulary-sharded logits, for NVIDIA GPUs (and Triton's
interpreter).

Three kernels, one job each: `row_statistics_kernel` reads the logits once; `merge_kernel` joins the shards'
statistics after the all-gather; `gradient_kernel` reads the logits once more and writes the gradient. Nothing
else is launched, nothing is reduced with atomics, so results repeat bit for bit.

The target's column is left out of the sum of exponentials and joined at the end. For a confident token the
sum over the *other* columns is what carries the digits: loss = log(1 + exp(d)), d = max + log(sum) -
x_target, and the gradient at the target is expm1(-loss). Computed from a full sum instead, both lose them to
rounding.

Shapes: N rows (tokens), C columns (this shard's vocabulary), W ranks, K statistics.
"""

import triton
import triton.language as tl

try:
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
except ImportError:  # before Triton 3.4
    gdc_launch_dependents = gdc_wait = None

HAS_DEPENDENT_LAUNCH = gdc_wait is not None

LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)

# How the columns of a row lie in memory (LAYOUT of the kernels):
# ALIGNED  unit stride, every row starts at a multiple of 16 bytes, C a multiple of VEC
# PEELED   unit stride, rows start anywhere: 16-byte vectors plus two edges. The pointer is a multiple of
#          16 bytes and the first logit `lead` elements behind it, so that the vectors are provably aligned
# STRIDED  any column stride, or input and output aligned differently
ALIGNED: tl.constexpr = tl.constexpr(0)
PEELED: tl.constexpr = tl.constexpr(1)
STRIDED: tl.constexpr = tl.constexpr(2)

# Elements after the [K, N] statistics in a rank's payload: the number of columns as (high, low) parts of
# 2^16, padding.
HEADER: tl.constexpr = tl.constexpr(4)


# Integers keep one type and no special cases for their value, and small tensors none for their address: a
# kernel then depends on what the launch code knows (see cuda.py), and no vocabulary, batch or rank compiles
# it anew.
_INTEGERS = [
    "lead", "inner_rows", "outer_stride", "inner_stride", "column_stride",
    "g_inner_rows", "g_outer_stride", "g_inner_stride", "g_column_stride", "target_stride", "grad_stride",
    "n_rows", "n_cols", "tiles_per_row", "first_column", "total_columns", "ignore_index",
]  # fmt: skip
_SMALL_TENSORS = [
    "Y", "PAYLOAD", "GATHERED", "LOSS", "SAVED", "STATS", "G_LOSS", "COLUMN_WEIGHTS", "ROW_WEIGHTS"
]  # fmt: skip


@triton.jit
def _begin(OVERLAP: tl.constexpr):
    """With OVERLAP the launch does not wait for the kernel before it on the stream (programmatic dependent
    launch): this does, and lets the next such kernel be launched. Nothing may be read or written before.
    """
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()


@triton.jit
def _row_offset(row, inner_rows, outer_stride, inner_stride, TWO_LEVEL: tl.constexpr):
    """Element offset of a row; TWO_LEVEL for 3-D logits whose two leading dimensions do not collapse into
    one.
    """
    if TWO_LEVEL:
        offset = (row // inner_rows) * outer_stride + (row % inner_rows) * inner_stride
    else:
        offset = row * inner_stride
    return offset


@triton.jit
def _add_tile(x, peak, total, weighted, STATISTICS: tl.constexpr):
    """Adds a tile x [R, VEC] to a lane group's running max, sum of exp, sum of exp * (x - max): [R]."""
    new_peak = tl.maximum(peak, tl.max(x, 1))
    # A group that has only seen -inf would compute (-inf) - (-inf); any finite reference gives the right 0.
    reference = tl.where(new_peak == float("-inf"), 0.0, new_peak)
    # exp2((a - b) * c), never exp2(a * c - b * c): contracted to an FMA, that gives NaN for a = b = inf.
    shift = peak - reference
    scale = tl.exp2(shift * LOG2_E)
    distance = x - reference[:, None]
    e = tl.exp2(distance * LOG2_E)
    if STATISTICS:
        carried = tl.where(total == 0.0, 0.0, weighted + total * shift)
        weighted = scale * carried + tl.sum(tl.where(e == 0.0, 0.0, e * distance), 1)
    total = total * scale + tl.sum(e, 1)
    return new_peak, total, weighted


@triton.jit
def _loss_of_row(
    peak, total, x_target, sum_x, weighted, known, live,
    label_smoothing, z_loss_weight, total_columns, row_weight, all_weights,
    SMOOTH: tl.constexpr, Z_LOSS: tl.constexpr, STATISTICS: tl.constexpr, WEIGHTED: tl.constexpr,
):  # fmt: skip
    """Loss, what backward needs, and statistics, from a row's merged statistics.

    peak, total, weighted: max, sum of exp(x - peak), sum of exp(x - peak) * (x - peak) over all columns but
        the target's.
    known: the label is a class; live: it is not the ignored one. Formulas: softplus and expm1 forms of -log
        softmax.
    """
    log_total = tl.log(total)
    d = (peak - x_target) + log_total
    small = tl.exp(-tl.abs(d))
    one_plus = 1.0 + small
    # log1p(small) without losing small to rounding (W. Kahan): log(u) * small / (u - 1) for u = 1 + small
    log1p_small = tl.where(one_plus == 1.0, small, tl.log(one_plus) * (small / (one_plus - 1.0)))
    nll = tl.maximum(d, 0.0) + log1p_small
    nll = tl.where(d != d, d, nll)
    nll = tl.where(x_target == float("inf"), float("nan"), nll)  # as dense softmax: inf - inf
    # A label that is no class counts as the row's maximum, as on Megatron's native path: loss = lse - max.
    nll = tl.where(known, nll, log_total + (peak - peak))

    joint_peak = tl.where(known, tl.maximum(peak, x_target), peak)
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
        loss = nll * row_weight
    if SMOOTH:
        if WEIGHTED:
            others = (all_weights * lse - sum_x) / total_columns
        else:
            others = lse - sum_x / total_columns
        loss = (1.0 - label_smoothing) * loss + label_smoothing * others
    if Z_LOSS:
        loss += z_loss_weight * lse * lse
    loss = tl.where(live, loss, 0.0)

    entropy = lse
    if STATISTICS:
        d_target = tl.where(e_target == 0.0, 0.0, e_target * (x_target - joint_peak))
        d_others = tl.where(total == 0.0, 0.0, (weighted + total * (peak - joint_peak)) * rescale)
        entropy = log_joint - (d_others + d_target) / joint_total
    joint_peak = tl.where(live, joint_peak, 0.0)
    log_joint = tl.where(live, log_joint, 0.0)
    grad_target = tl.where(live, grad_target, 0.0)
    return loss, joint_peak, log_joint, grad_target, lse, nll, entropy


@triton.jit
def _store_row(
    LOSS, SAVED, STATS, offsets, n_rows, mask,
    loss, peak, log_total, grad_target, lse, nll, entropy, correct, known, live,
    STATISTICS: tl.constexpr,
):  # fmt: skip
    """LOSS: [N]; SAVED: [3, N] = max, log of the sum, gradient at the target; STATS: [4, N]."""
    tl.store(LOSS + offsets, loss, mask=mask)
    tl.store(SAVED + offsets, peak, mask=mask)
    tl.store(SAVED + n_rows + offsets, log_total, mask=mask)
    tl.store(SAVED + 2 * n_rows + offsets, grad_target, mask=mask)
    if STATISTICS:
        shown = known & live
        tl.store(STATS + offsets, lse, mask=mask)
        tl.store(STATS + n_rows + offsets, tl.where(shown, -nll, 0.0), mask=mask)
        tl.store(STATS + 2 * n_rows + offsets, entropy, mask=mask)
        tl.store(STATS + 3 * n_rows + offsets, tl.where(shown & correct, 1.0, 0.0), mask=mask)


@triton.jit(do_not_specialize=_INTEGERS, do_not_specialize_on_alignment=_SMALL_TENSORS)
def row_statistics_kernel(
    X,                                  # logits: N rows of C columns
    Y,                                  # [N] class ids
    PAYLOAD,                            # [K * N + HEADER] if SPLIT_VOCAB
    LOSS, SAVED, STATS,                 # [N], [3, N], [4, N] otherwise
    COLUMN_WEIGHTS, ROW_WEIGHTS,        # [C], [N + 1] if WEIGHTED
    lead: tl.int32,                     # of X, see PEELED
    inner_rows: tl.int64, outer_stride: tl.int64, inner_stride: tl.int64, column_stride: tl.int64,
    target_stride: tl.int64,
    n_rows: tl.int64, n_cols: tl.int32,
    first_column: tl.int64, total_columns: tl.int64, ignore_index: tl.int64,
    label_smoothing: tl.float64, z_loss_weight: tl.float64,
    BLOCK: tl.constexpr, VEC: tl.constexpr, LAYOUT: tl.constexpr, TWO_LEVEL: tl.constexpr,
    SMOOTH: tl.constexpr, Z_LOSS: tl.constexpr, STATISTICS: tl.constexpr, SPLIT_VOCAB: tl.constexpr,
    WEIGHTED: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """One program a row. Every lane group of VEC columns (16 bytes) keeps its own running (max, sum), so the
    loop
    holds no cross-thread reduction; one reduction ends the row."""
    _begin(OVERLAP)
    R: tl.constexpr = BLOCK // VEC
    ACC = SAVED.dtype.element_ty
    row = tl.cast(tl.program_id(0), tl.int64)
    label = tl.cast(tl.load(Y + row * target_stride), tl.int64)
    live = label != ignore_index
    shifted = label - first_column
    here = (shifted >= 0) & (shifted < n_cols)
    t = tl.cast(tl.where(here, shifted, -1), tl.int32)
    known = (label >= 0) & (label < total_columns)

    start = _row_offset(row, inner_rows, outer_stride, inner_stride, TWO_LEVEL)
    groups = tl.arange(0, R)[:, None]
    lanes = tl.arange(0, VEC)[None, :]
    # An ignored row has loss 0 and no gradient whatever its logits are: do not read them.
    end = n_cols
    if not STATISTICS:
        end = tl.where(live, n_cols, 0)

    peak = tl.full([R], float("-inf"), ACC)
    total = tl.zeros([R], ACC)
    weighted = tl.zeros([R], ACC)
    sums = tl.zeros([R], ACC)
    peeled = 0
    if LAYOUT == PEELED:
        # columns before the row's first 16-byte boundary
        boundary = (start + lead + (VEC - 1)) // VEC * VEC
        peeled = tl.minimum(tl.cast(boundary - (start + lead), tl.int32), end)
        base = X + boundary
    elif LAYOUT == ALIGNED:
        base = X + start // VEC * VEC
    else:
        base = X + start
    n_groups = (end - peeled) // VEC
    for i in range(0, end, BLOCK):
        g = i // VEC + groups
        c = g * VEC + lanes
        if LAYOUT == STRIDED:
            inside = c < end
            x = tl.load(base + tl.cast(c, tl.int64) * column_stride, mask=inside, other=float("-inf")).to(ACC)
        else:
            inside = g < n_groups
            x = tl.load(base + c, mask=inside, other=float("-inf")).to(ACC)
        if SMOOTH:
            summand = tl.where(inside, x, 0.0)
            if WEIGHTED:
                summand *= tl.load(COLUMN_WEIGHTS + peeled + c, mask=inside, other=0.0)
            sums += tl.sum(summand, 1)
        inner_t = t - peeled
        if (inner_t >= i) & (inner_t < i + BLOCK):
            x = tl.where(c == inner_t, float("-inf"), x)
        peak, total, weighted = _add_tile(x, peak, total, weighted, STATISTICS)

    sum_x = tl.sum(sums, 0)
    if LAYOUT == PEELED:
        # both edges of the row in one small tile: VEC columns before the boundary, VEC after the last whole
        # vector
        e_lane = tl.arange(0, 2 * VEC)
        e_col = tl.where(e_lane < VEC, e_lane, peeled + n_groups * VEC + (e_lane - VEC))
        e_in = tl.where(e_lane < VEC, e_lane < peeled, e_col < end)
        x_edge = tl.load(X + lead + start + e_col, mask=e_in, other=float("-inf")).to(ACC)
        if SMOOTH:
            e_summand = tl.where(e_in, x_edge, 0.0)
            if WEIGHTED:
                e_summand *= tl.load(COLUMN_WEIGHTS + e_col, mask=e_in, other=0.0)
            sum_x += tl.sum(e_summand, 0)
        x_edge = tl.where(e_col == t, float("-inf"), x_edge)
        edge_peak, edge_total, edge_weighted = _add_tile(
            x_edge[None, :],
            tl.full([1], float("-inf"), ACC),
            tl.zeros([1], ACC),
            tl.zeros([1], ACC),
            STATISTICS,
        )
        edge_peak, edge_total, edge_weighted = (
            tl.max(edge_peak, 0),
            tl.sum(edge_total, 0),
            tl.sum(edge_weighted, 0),
        )
    row_peak = tl.max(peak, 0)
    if LAYOUT == PEELED:
        row_peak = tl.maximum(row_peak, edge_peak)
    reference = tl.where(row_peak == float("-inf"), 0.0, row_peak)
    scale = tl.exp2((peak - reference) * LOG2_E)
    row_weighted = tl.sum(weighted, 0)
    if STATISTICS:
        row_weighted = tl.sum(tl.where(total == 0.0, 0.0, (weighted + total * (peak - reference)) * scale), 0)
    row_total = tl.sum(total * scale, 0)
    if LAYOUT == PEELED:
        edge_scale = tl.exp2((edge_peak - reference) * LOG2_E)
        if STATISTICS:
            edge_all = (edge_weighted + edge_total * (edge_peak - reference)) * edge_scale
            row_weighted += tl.where(edge_total == 0.0, 0.0, edge_all)
        row_total += edge_total * edge_scale

    at_target = X + lead + start + tl.cast(t, tl.int64) * column_stride
    x_target = tl.load(at_target, mask=here & (end > 0), other=float("-inf")).to(ACC)
    if SPLIT_VOCAB:
        tl.store(PAYLOAD + row, row_peak)
        tl.store(PAYLOAD + n_rows + row, row_total)
        tl.store(PAYLOAD + 2 * n_rows + row, x_target)
        k = 3
        if SMOOTH:
            tl.store(PAYLOAD + 3 * n_rows + row, sum_x)
            k = 4
        if STATISTICS:
            tl.store(PAYLOAD + k * n_rows + row, row_weighted)
            k += 1
        if row == 0:
            header = PAYLOAD + k * n_rows
            tl.store(header, tl.cast(n_cols // 65536, ACC))
            tl.store(header + 1, tl.cast(n_cols % 65536, ACC))
            tl.store(header + 2, tl.cast(0, ACC))
            tl.store(header + 3, tl.cast(0, ACC))
    else:
        row_weight = tl.full((), 1.0, ACC)
        all_weights = row_weight
        if WEIGHTED:
            row_weight = tl.load(ROW_WEIGHTS + row)
            all_weights = tl.load(ROW_WEIGHTS + n_rows)
        loss, saved_peak, log_total, grad_target, lse, nll, entropy = _loss_of_row(
            row_peak, row_total, x_target, sum_x, row_weighted, known, live,
            tl.full((), label_smoothing, ACC), tl.full((), z_loss_weight, ACC), total_columns,
            row_weight, all_weights, SMOOTH, Z_LOSS, STATISTICS, WEIGHTED,
        )  # fmt: skip
        _store_row(
            LOSS, SAVED, STATS, row, n_rows, None,
            loss, saved_peak, log_total, grad_target, lse, nll, entropy, x_target >= row_peak, known, live,
            STATISTICS,
        )  # fmt: skip


@triton.jit(do_not_specialize=_INTEGERS, do_not_specialize_on_alignment=_SMALL_TENSORS)
def merge_kernel(
    GATHERED,                           # [W, K * N + HEADER]
    Y,                                  # [N] class ids
    LOSS, SAVED, STATS,                 # [N], [3, N], [4, N]
    ROW_WEIGHTS,                        # [N + 1] if WEIGHTED
    target_stride: tl.int64, n_rows: tl.int64, total_columns: tl.int64, ignore_index: tl.int64,
    label_smoothing: tl.float64, z_loss_weight: tl.float64,
    WORLD: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr,
    SMOOTH: tl.constexpr, Z_LOSS: tl.constexpr, STATISTICS: tl.constexpr, EQUAL_SHARDS: tl.constexpr,
    WEIGHTED: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Joins the shards' statistics, in rank order on every rank, so that the loss is bitwise the same
    everywhere.
    """
    _begin(OVERLAP)
    ACC = SAVED.dtype.element_ty
    rows = tl.cast(tl.program_id(0), tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = rows < n_rows
    label = tl.cast(tl.load(Y + rows * target_stride, mask=mask, other=0), tl.int64)
    live = label != ignore_index
    known = (label >= 0) & (label < total_columns)

    peak = tl.full([BLOCK], float("-inf"), ACC)
    x_target = tl.full([BLOCK], float("-inf"), ACC)
    disagreement = tl.full((), 0.0, ACC)
    for w in range(WORLD):
        shard = GATHERED + w * (K * n_rows + HEADER)
        x_w = tl.load(shard + 2 * n_rows + rows, mask=mask, other=0.0)
        peak = tl.maximum(peak, tl.load(shard + rows, mask=mask, other=0.0))
        # one rank holds the target, the others say -inf; no maximum here: it would drop a NaN
        x_target = tl.where(x_w == float("-inf"), x_target, x_w)
        if EQUAL_SHARDS:
            disagreement += tl.abs(tl.load(shard + K * n_rows) - tl.load(GATHERED + K * n_rows))
            disagreement += tl.abs(tl.load(shard + K * n_rows + 1) - tl.load(GATHERED + K * n_rows + 1))
    reference = tl.where(peak == float("-inf"), 0.0, peak)
    total = tl.zeros([BLOCK], ACC)
    weighted = tl.zeros([BLOCK], ACC)
    sum_x = tl.zeros([BLOCK], ACC)
    for w in range(WORLD):
        shard = GATHERED + w * (K * n_rows + HEADER)
        shift = tl.load(shard + rows, mask=mask, other=0.0) - reference
        total_w = tl.load(shard + n_rows + rows, mask=mask, other=1.0)
        scale = tl.exp(shift)
        total += total_w * scale
        if SMOOTH:
            sum_x += tl.load(shard + 3 * n_rows + rows, mask=mask, other=0.0)
        if STATISTICS:
            weighted_w = tl.load(shard + (K - 1) * n_rows + rows, mask=mask, other=0.0)
            weighted += tl.where(total_w == 0.0, 0.0, (weighted_w + total_w * shift) * scale)
    row_weight = tl.full([BLOCK], 1.0, ACC)
    all_weights = tl.full((), 1.0, ACC)
    if WEIGHTED:
        row_weight = tl.load(ROW_WEIGHTS + rows, mask=mask, other=0.0)
        all_weights = tl.load(ROW_WEIGHTS + n_rows)
    loss, saved_peak, log_total, grad_target, lse, nll, entropy = _loss_of_row(
        peak, total, x_target, sum_x, weighted, known, live,
        tl.full((), label_smoothing, ACC), tl.full((), z_loss_weight, ACC), total_columns,
        row_weight, all_weights, SMOOTH, Z_LOSS, STATISTICS, WEIGHTED,
    )  # fmt: skip
    if EQUAL_SHARDS:
        # Shards of unequal sizes give column offsets that are wrong on every rank. The host check raises
        # where it can look; where it cannot (a captured graph) the numbers must at least be unusable, on all
        # ranks alike.
        loss = tl.where(disagreement == 0.0, loss, float("nan"))
        saved_peak = tl.where(disagreement == 0.0, saved_peak, float("nan"))
    _store_row(
        LOSS, SAVED, STATS, rows, n_rows, mask,
        loss, saved_peak, log_total, grad_target, lse, nll, entropy, x_target >= peak, known, live,
        STATISTICS,
    )  # fmt: skip


@triton.jit
def _gradient_of_tile(
    x, at_target, peak, log2_total, grad_target, lse, scale, label_smoothing, z_loss_weight, per_class,
    row_weight, mean_weight, column_weights,
    SMOOTH: tl.constexpr, Z_LOSS: tl.constexpr, WEIGHTED: tl.constexpr,
):  # fmt: skip
    """The gradient as `reference.gradient` states it."""
    p = tl.exp2((x - peak) * LOG2_E - log2_total)
    if WEIGHTED:
        own = (1.0 - label_smoothing) * row_weight
        shared = label_smoothing * mean_weight + 2.0 * z_loss_weight * lse
        grad = tl.where(at_target, grad_target * own + (grad_target + 1.0) * shared, p * (own + shared))
        grad -= per_class * column_weights
    else:
        grad = tl.where(at_target, grad_target, p)
        if Z_LOSS:
            p_target = tl.where(at_target, grad_target + 1.0, p)
            grad += p_target * (2.0 * z_loss_weight * lse)
        if SMOOTH:
            grad = tl.where(at_target, grad + label_smoothing, grad) - per_class
    return grad * scale


@triton.jit(do_not_specialize=_INTEGERS, do_not_specialize_on_alignment=_SMALL_TENSORS)
def gradient_kernel(
    X,                                  # logits: N rows of C columns
    G_X,                                # their gradient; may be X itself
    Y,                                  # [N] class ids
    G_LOSS,                             # [N], stride 0 if expanded
    SAVED,                              # [3, N]
    COLUMN_WEIGHTS, ROW_WEIGHTS,        # [C], [N + 1] if WEIGHTED
    lead: tl.int32,                     # of X and of G_X, see PEELED
    inner_rows: tl.int64, outer_stride: tl.int64, inner_stride: tl.int64, column_stride: tl.int64,
    g_inner_rows: tl.int64, g_outer_stride: tl.int64, g_inner_stride: tl.int64, g_column_stride: tl.int64,
    target_stride: tl.int64, grad_stride: tl.int64,
    n_rows: tl.int64, n_cols: tl.int32, tiles_per_row: tl.int32,
    first_column: tl.int64, total_columns: tl.int64, ignore_index: tl.int64,
    label_smoothing: tl.float64, z_loss_weight: tl.float64,
    BLOCK: tl.constexpr, VEC: tl.constexpr, LAYOUT: tl.constexpr,
    TWO_LEVEL: tl.constexpr, G_TWO_LEVEL: tl.constexpr, SMOOTH: tl.constexpr, Z_LOSS: tl.constexpr,
    WEIGHTED: tl.constexpr, KEEP: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """One program a tile of one row: a flat grid keeps every SM busy to the end, where a loop over the row
    loses 4-7 %.

    With LAYOUT other than STRIDED, X and G_X lie alike relative to 16-byte boundaries (`lead` is that of
    both). With KEEP what is read is the last that the L2 cache gives up.
    """
    _begin(OVERLAP)
    R: tl.constexpr = BLOCK // VEC
    ACC = SAVED.dtype.element_ty
    program = tl.program_id(0)
    # From the last row to the first: what forward read last is still in the L2 cache.
    row = n_rows - 1 - tl.cast(program // tiles_per_row, tl.int64)
    tile = program % tiles_per_row
    label = tl.cast(tl.load(Y + row * target_stride), tl.int64)
    live = label != ignore_index
    scale = tl.where(live, tl.load(G_LOSS + row * grad_stride).to(ACC), 0.0)
    peak = tl.load(SAVED + row)
    log_total = tl.load(SAVED + n_rows + row)
    grad_target = tl.load(SAVED + 2 * n_rows + row)
    log2_total = log_total * LOG2_E
    lse = peak + log_total
    shifted = label - first_column
    t = tl.cast(tl.where((shifted >= 0) & (shifted < n_cols), shifted, -1), tl.int32)
    smoothing = tl.full((), label_smoothing, ACC)
    z_weight = tl.full((), z_loss_weight, ACC)
    per_class = smoothing / total_columns
    row_weight = tl.full((), 1.0, ACC)
    mean_weight = row_weight
    if WEIGHTED:
        row_weight = tl.load(ROW_WEIGHTS + row)
        mean_weight = tl.load(ROW_WEIGHTS + n_rows) / total_columns

    start = _row_offset(row, inner_rows, outer_stride, inner_stride, TWO_LEVEL)
    g_start = _row_offset(row, g_inner_rows, g_outer_stride, g_inner_stride, G_TWO_LEVEL)
    peeled = 0
    if LAYOUT == PEELED:
        boundary = (start + lead + (VEC - 1)) // VEC * VEC
        g_boundary = (g_start + lead + (VEC - 1)) // VEC * VEC
        peeled = tl.minimum(tl.cast(boundary - (start + lead), tl.int32), n_cols)
        x_base = X + boundary
        g_base = G_X + g_boundary
    elif LAYOUT == ALIGNED:
        x_base = X + start // VEC * VEC
        g_base = G_X + g_start // VEC * VEC
    else:
        x_base = X + start
        g_base = G_X + g_start
    n_groups = (n_cols - peeled) // VEC

    g = tile * R + tl.arange(0, R)[:, None]
    c = g * VEC + tl.arange(0, VEC)[None, :]
    if LAYOUT == ALIGNED:
        c = tile * BLOCK + tl.arange(0, BLOCK)
        inside = c < n_cols // VEC * VEC
        x_at = x_base + c
        g_at = g_base + c
    elif LAYOUT == STRIDED:
        inside = c < n_cols
        x_at = x_base + tl.cast(c, tl.int64) * column_stride
        g_at = g_base + tl.cast(c, tl.int64) * g_column_stride
    else:
        inside = g < n_groups
        x_at = x_base + c
        g_at = g_base + c
    # Ignored rows are written as exact zeros without being read: their logits may hold anything.
    EVICTION: tl.constexpr = "evict_last" if KEEP else ""
    x = tl.load(x_at, mask=inside & live, other=float("-inf"), eviction_policy=EVICTION).to(ACC)
    column_weights = row_weight
    if WEIGHTED:
        column_weights = tl.load(COLUMN_WEIGHTS + peeled + c, mask=inside, other=0.0)
    grad = _gradient_of_tile(
        x, c == t - peeled, peak, log2_total, grad_target, lse, scale, smoothing, z_weight, per_class,
        row_weight, mean_weight, column_weights, SMOOTH, Z_LOSS, WEIGHTED,
    )  # fmt: skip
    tl.store(g_at, tl.where(live, grad, 0.0).to(G_X.dtype.element_ty), mask=inside)
    if LAYOUT == PEELED:  # noqa: SIM102 - decided at compile time, the inner one is not
        if tile == 0:
            e_lane = tl.arange(0, 2 * VEC)
            e_col = tl.where(e_lane < VEC, e_lane, peeled + n_groups * VEC + (e_lane - VEC))
            e_in = tl.where(e_lane < VEC, e_lane < peeled, e_col < n_cols)
            x_edge = tl.load(X + lead + start + e_col, mask=e_in & live, other=float("-inf")).to(ACC)
            e_weights = row_weight
            if WEIGHTED:
                e_weights = tl.load(COLUMN_WEIGHTS + e_col, mask=e_in, other=0.0)
            g_edge = _gradient_of_tile(
                x_edge, e_col == t, peak, log2_total, grad_target, lse, scale, smoothing, z_weight, per_class,
                row_weight, mean_weight, e_weights, SMOOTH, Z_LOSS, WEIGHTED,
            )  # fmt: skip
            g_edge = tl.where(live, g_edge, 0.0).to(G_X.dtype.element_ty)
            tl.store(G_X + lead + g_start + e_col, g_edge, mask=e_in)
