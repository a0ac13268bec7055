"""Output layer and cross entropy in token chunks, on plain tensors: the differentiable core.

Two forms. `weighted_loss` returns one number, the losses weighted by numbers that are known before: it
computes all gradients in the forward pass, chunk by chunk, and backward only multiplies them by the upstream
scale; three matrix products together, as without chunks. `loss_per_token` returns every token's loss for
whatever is done with them; backward computes the logits once more, chunk by chunk: four matrix products. If
the upstream gradient can be foreseen but for a factor, it takes three as well. Neither ever holds the logits
of more than one chunk.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_ce_adaptor import dispatch
from megatron_ce_adaptor.chunked import walk
from megatron_ce_adaptor.chunked.exchange import HiddenExchange, NoExchange
from megatron_ce_adaptor.chunked.foresight import agreed_on_factor
from megatron_ce_adaptor.chunked.scaling import scaled
from megatron_ce_adaptor.cross_entropy import CrossEntropyStatistics
from megatron_ce_adaptor.implementations import choose, note_use
from megatron_ce_adaptor.implementations.dtypes import accumulation_dtype
from megatron_ce_adaptor.labels import labels_are_checked, refuse_unknown_labels
from megatron_ce_adaptor.settings import switch
from megatron_ce_adaptor.vocab_shard import VocabShard

_ADDED_ELEMENTS = 1 << 24  # of a weight's gradient at a time, where it is added to another buffer
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class WeightGradientBuffer(Protocol):
    """A buffer of somebody else's that the weight's gradient is added to (Megatron's main_grad)."""

    def buffer(self) -> Tensor:
        """[C, H], which holds a sum already; in the weight's dtype or a wider one."""
        ...

    def stand_in(self) -> Tensor | None:
        """What autograd gets as the weight's gradient, after it was added to the buffer."""
        ...


@dataclasses.dataclass(frozen=True)
class LinearLossOptions:
    """What does not differ from token to token.

    Attributes:
        shard: the vocabulary's columns that this rank's weight holds.
        chunk_tokens: tokens of a chunk: the most that logits are held for.
        ignore_index, label_smoothing, z_loss_weight: as for `parallel_cross_entropy`.
        class_weight: [V] of the whole vocabulary, the same on all ranks, or None: PyTorch's weighted loss.
        exchange: what happens to the hidden states and their gradient between the ranks, once.
        accumulation_dtype: torch.float32 to add up the weight's, the bias's and the hidden gradient (this
            over the ranks) in fp32 and round them once at the end; None: in the gradient's own dtype, fp16
            excepted, which is always added up in fp32.
        accumulate_hidden: accumulation_dtype is the hidden gradient's, too; False: only the parameters'.
        statistics: also return the losses' statistics (`CrossEntropyStatistics`).
        check_labels: as `parallel_cross_entropy`'s: None looks at the labels on the CPU, False does not; the
            environment's MCE_CHECK_LABELS goes before both.
        weight_gradient: where the weight's gradient is added up, None: autograd gets it. Only for
            `loss_per_token`.
    """

    shard: VocabShard
    chunk_tokens: int
    ignore_index: int = -100
    label_smoothing: float = 0.0
    z_loss_weight: float = 0.0
    class_weight: Tensor | None = None
    exchange: HiddenExchange = dataclasses.field(default_factory=NoExchange)
    accumulation_dtype: torch.dtype | None = None
    accumulate_hidden: bool = True
    statistics: bool = False
    check_labels: bool | None = None
    weight_gradient: WeightGradientBuffer | None = None


class WeightedLoss(NamedTuple):
    """total: 0-d, differentiable; loss [N] and statistics, of this rank's gathered tokens, are not."""

    total: Tensor
    loss: Tensor
    statistics: CrossEntropyStatistics | None


def weighted_loss(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    token_weight: Tensor,
    options: LinearLossOptions,
    bias: Tensor | None = None,
) -> WeightedLoss:
    """sum over tokens of token_weight * cross_entropy(hidden @ weight.T + bias, labels).

    Collectives: what `options.exchange` does, once forward and once backward, and one all-gather a chunk
    forward if the vocabulary is split.

    Args:
        hidden: [n, H], fp16, bf16, fp32 or fp64; under autocast multiplied in autocast's dtype.
        weight: [C, H] of this rank's columns; bias [C].
        labels: [N] int32 or int64 (N = n, or as many as `options.exchange` gathers), on all ranks of the
            vocabulary's group the same.
        token_weight: [N], of any strides (an expanded number too), without gradient.

    Returns:
        The total (fp32, fp64 for fp64 hidden states), differentiable with respect to hidden, weight and bias,
        once: a second backward, and second derivatives, raise RuntimeError.

    Raises:
        TypeError, ValueError: what does not fit, in words.
    """
    compute = _check(hidden, weight, labels, bias, options)
    if token_weight.shape != labels.shape:
        raise ValueError(
            f"token_weight has shape {tuple(token_weight.shape)}, expected one number for each of the "
            f"{labels.numel()} labels."
        )
    differentiable = torch.is_grad_enabled()
    wanted = tuple(differentiable and x is not None and x.requires_grad for x in (hidden, weight, bias))
    total, loss, stats = _GradientsInForward.apply(
        hidden, weight, bias, labels, token_weight.detach(), options, compute, wanted
    )
    return WeightedLoss(total, loss, _statistics(stats))


def loss_per_token(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    options: LinearLossOptions,
    bias: Tensor | None = None,
    foreseen: Tensor | None = None,
) -> tuple[Tensor, CrossEntropyStatistics | None]:
    """cross_entropy(hidden @ weight.T + bias, labels) of each token, [N], for any upstream gradient.

    Arguments, collectives and errors are `weighted_loss`'s. Between forward and backward nothing but the
    arguments and three numbers a token are kept.

    Args:
        foreseen: [N], what the upstream gradient is expected to be, but for a factor (a loss mask), without
            gradient. Then the gradients are computed in the forward pass and kept, and backward multiplies
            them by the factor, if there is one: for this question it waits for the device once, and if the
            vocabulary is split there is one all-reduce of a number. If there is none, and in each further
            backward, the gradients are computed again as without `foreseen`.
    """
    compute = _check(hidden, weight, labels, bias, options)
    if foreseen is not None and foreseen.shape != labels.shape:
        raise ValueError(
            f"foreseen has shape {tuple(foreseen.shape)}, expected one number for each of the "
            f"{labels.numel()} labels."
        )
    wanted = tuple(
        torch.is_grad_enabled() and x is not None and x.requires_grad for x in (hidden, weight, bias)
    )
    if foreseen is not None:
        foreseen = foreseen.detach() if any(wanted) else None
    loss, stats = _LossOfEachToken.apply(hidden, weight, bias, labels, foreseen, options, compute, wanted)
    return loss, _statistics(stats)


def _statistics(stats: Tensor | None) -> CrossEntropyStatistics | None:
    if stats is None:
        return None
    lse, target_log_prob, entropy, correct = stats
    return CrossEntropyStatistics(lse, target_log_prob, entropy, correct != 0)


class _GradientsInForward(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        token_weight: Tensor,
        options: LinearLossOptions,
        compute: torch.dtype,
        wanted: tuple[bool, bool, bool],
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        with _without_autocast(hidden):
            layer = _output_layer(weight, bias, labels, options, compute)
            gathered = options.exchange.gather(hidden.to(compute))
            _check_gathered(gathered, hidden, labels)
            acc = accumulation_dtype(gathered)
            token_weight = token_weight.to(acc)
            if not any(wanted):
                found = walk.losses(gathered, labels, layer, statistics=options.statistics, save=False)
            else:
                gradients = _buffers(gathered, weight, bias, compute, options, wanted)
                upstream, later = _split_scale(token_weight, compute)
                found = walk.losses_and_gradients(
                    gathered, labels, layer, upstream, gradients, statistics=options.statistics
                )
                ctx.save_for_backward(gradients.hidden, gradients.weight, gradients.bias, later)
        ctx.exchange, ctx.spent = options.exchange, False
        ctx.dtypes = tuple(x.dtype if x is not None else None for x in (hidden, weight, bias))
        total = (found.loss * token_weight).sum()
        _mark(ctx, found.loss, found.statistics)
        return total, found.loss, found.statistics

    @staticmethod
    def backward(ctx: Any, grad_total: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        _refuse_second_derivative()
        if ctx.spent:
            raise RuntimeError(
                "the chunked loss keeps its gradients once and has given them away in the first backward: "
                "call backward once, on the sum of all losses if there are several."
            )
        ctx.spent = True
        hidden, weight, bias, later = ctx.saved_tensors
        factor = grad_total.to(later.dtype) * later
        if hidden is not None:
            hidden = scaled(ctx.exchange.reduce(hidden), factor, ctx.dtypes[0])
        if weight is not None:
            weight = scaled(weight, factor, ctx.dtypes[1])
        if bias is not None:
            bias = scaled(bias, factor, ctx.dtypes[2])
        return hidden, weight, bias, None, None, None, None, None


class _LossOfEachToken(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        foreseen: Tensor | None,
        options: LinearLossOptions,
        compute: torch.dtype,
        wanted: tuple[bool, bool, bool],
    ) -> tuple[Tensor, Tensor | None]:
        ctx.ahead, later = None, None
        with _without_autocast(hidden):
            layer = _output_layer(weight, bias, labels, options, compute)
            gathered = options.exchange.gather(hidden.to(compute))
            _check_gathered(gathered, hidden, labels)
            if foreseen is None:
                found = walk.losses(gathered, labels, layer, statistics=options.statistics, save=any(wanted))
            else:
                ctx.ahead = _buffers(gathered, weight, bias, compute, options, wanted)
                foreseen = foreseen.to(accumulation_dtype(gathered))
                upstream, later = _split_scale(foreseen, compute)
                found = walk.losses_and_gradients(
                    gathered, labels, layer, upstream, ctx.ahead, statistics=options.statistics, save=True
                )
        ctx.save_for_backward(hidden, weight, bias, labels, found.saved, foreseen, later)
        ctx.options, ctx.compute = options, compute
        _mark(ctx, found.statistics)
        return found.loss, found.statistics

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        _refuse_second_derivative()
        hidden, weight, bias, labels, saved, foreseen, later = ctx.saved_tensors
        options: LinearLossOptions = ctx.options
        gradients, ctx.ahead = ctx.ahead, None  # they are given away
        upstream = grad_loss.to(saved.dtype)
        factor = None
        if gradients is not None:
            factor = agreed_on_factor(upstream, foreseen, options.shard.group)
        with _without_autocast(hidden):
            if factor is not None:
                later = later * factor
                buffer = options.weight_gradient
                if buffer is not None and gradients.weight is not None:
                    _add_scaled(buffer.buffer(), gradients.weight, later)
            else:
                layer = _output_layer(weight, bias, labels, options, ctx.compute)
                gathered = options.exchange.gather(hidden.to(ctx.compute))
                wanted = ctx.needs_input_grad[:3]
                gradients, later = _recomputed(
                    gathered, weight, bias, labels, layer, saved, upstream, options, ctx.compute, wanted
                )
            if gradients.hidden is not None:
                gradients.hidden = options.exchange.reduce(gradients.hidden)
            d_weight = None
            if gradients.weight is not None and options.weight_gradient is not None:
                gradients.weight, d_weight = None, options.weight_gradient.stand_in()
            d_hidden, own_d_weight, d_bias = (
                None if g is None else scaled(g, later, x.dtype)
                for g, x in (
                    (gradients.hidden, hidden),
                    (gradients.weight, weight),
                    (gradients.bias, bias),
                )
            )
        d_weight = own_d_weight if d_weight is None else d_weight
        return d_hidden, d_weight, d_bias, None, None, None, None, None


def _recomputed(
    gathered: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    layer: walk.OutputLayer,
    saved: Tensor,
    upstream: Tensor,
    options: LinearLossOptions,
    compute: torch.dtype,
    wanted: tuple[bool, bool, bool],
) -> tuple[walk.Gradients, Tensor]:
    """The gradients, and the factor that they lack; the weight's is in its buffer with the factor, if there
    is such a buffer."""
    upstream, later = _split_scale(upstream, compute)
    buffer = options.weight_gradient
    # fp16's scale comes after the sum, so the sum cannot be made in a buffer that holds another one
    direct = buffer is not None and compute != torch.float16 and wanted[1]
    gradients = _buffers(
        gathered, weight, bias, compute, options, (wanted[0], wanted[1] and not direct, wanted[2])
    )
    if direct:
        assert buffer is not None
        gradients.accumulate_weight(buffer.buffer())
    walk.recomputed_gradients(gathered, labels, layer, saved, upstream, gradients)
    if buffer is not None and not direct and gradients.weight is not None:
        _add_scaled(buffer.buffer(), gradients.weight, later)
    return gradients, later


def _add_scaled(total: Tensor, gradient: Tensor, factor: Tensor) -> None:
    """total += gradient * factor, in the wider of their dtypes, without a tensor of their size."""
    if total.dim() == 0 or total.numel() == 0:
        return
    rows = max(1, _ADDED_ELEMENTS // max(1, total[0].numel()))
    for part, piece in zip(total.split(rows), gradient.split(rows), strict=True):
        part.add_(piece.to(factor.dtype) * factor)


def _mark(ctx: Any, *tensors: Tensor | None) -> None:
    ctx.mark_non_differentiable(*(t for t in tensors if t is not None))


def _refuse_second_derivative() -> None:
    if torch.is_grad_enabled():
        raise RuntimeError(
            "the chunked loss has no second derivative: call backward() or torch.autograd.grad() without "
            "create_graph=True."
        )


def _without_autocast(hidden: Tensor) -> contextlib.AbstractContextManager[Any]:
    """Casts are made once, not once a chunk."""
    return torch.autocast(hidden.device.type, enabled=False)


def _output_layer(
    weight: Tensor, bias: Tensor | None, labels: Tensor, options: LinearLossOptions, compute: torch.dtype
) -> walk.OutputLayer:
    shard = options.shard
    missing = shard.columns - _given_columns(shard)
    if missing:  # the shard's gather raises on all ranks alike; until then this one keeps up with them
        weight = F.pad(weight, (0, 0, 0, missing))
        bias = None if bias is None else F.pad(bias, (0, missing))
    choice = choose(weight.device.type, shard.columns, shard.group is not None)
    note_use(choice.name)

    def look_at_labels() -> None:
        refuse_unknown_labels(labels, shard.total_columns, options.ignore_index)

    return walk.OutputLayer(
        weight.to(compute),
        None if bias is None else bias.to(compute),
        choice.module,
        dispatch.Terms(shard, options.ignore_index, options.label_smoothing, options.z_loss_weight),
        options.class_weight,
        options.chunk_tokens,
        look_at_labels
        if labels_are_checked(switch("MCE_CHECK_LABELS"), options.check_labels, weight)
        else None,
    )


def _given_columns(shard: VocabShard) -> int:
    """The columns that this rank has; the others of a shard of a described size (see `VocabShard.misfit`) are
    those that it should have."""
    return getattr(shard, "given_columns", shard.columns)


def _buffers(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    compute: torch.dtype,
    options: LinearLossOptions,
    wanted: tuple[bool, bool, bool],
) -> walk.Gradients:
    wide = torch.float32 if compute == torch.float16 else options.accumulation_dtype or compute

    def like(x: Tensor | None, want: bool, wide: torch.dtype) -> Tensor | None:
        if x is None or not want:
            return None
        return torch.empty(x.shape, dtype=torch.promote_types(x.dtype, wide), device=x.device)

    of_hidden = wide if options.accumulate_hidden or compute == torch.float16 else compute
    return walk.Gradients(
        like(hidden, wanted[0], of_hidden), like(weight, wanted[1], wide), like(bias, wanted[2], wide)
    )


def _split_scale(upstream: Tensor, compute: torch.dtype) -> tuple[Tensor, Tensor]:
    """(upstream gradient for the chunks, 0-d factor for their sums).

    In fp16 the numbers in a gradient of 1/N of a loss, times a probability, are too small to be held: there
    the chunks get an upstream gradient of at most 1, and the fp32 sums the factor.
    """
    if compute != torch.float16 or upstream.numel() == 0:
        return upstream, upstream.new_ones(())
    largest = upstream.abs().amax()
    return torch.where(largest > 0, upstream / largest, 0.0), largest


def _check(
    hidden: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None, options: LinearLossOptions
) -> torch.dtype:
    """Checks what needs no other rank; returns the dtype of the matrix products."""
    for name, value in (("hidden", hidden), ("the output layer's weight", weight), ("labels", labels)):
        if not isinstance(value, Tensor):
            raise TypeError(f"{name} is a {type(value).__name__}, expected a torch.Tensor.")
    if labels.dtype not in (torch.int64, torch.int32):
        raise TypeError(
            f"labels have dtype {labels.dtype}, expected int64 or int32 class ids (not probabilities)."
        )
    if hidden.dim() != 2 or weight.dim() != 2 or hidden.shape[1] != weight.shape[1]:
        raise ValueError(
            f"hidden states of shape {tuple(hidden.shape)} do not fit an output layer's weight "
            f"{tuple(weight.shape)}: the last dimensions must be the same hidden size."
        )
    if labels.dim() != 1:
        raise ValueError(f"labels have shape {tuple(labels.shape)}, expected [N], one for each token.")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(
            f"the output layer's bias has shape {tuple(bias.shape)}, expected {tuple(weight.shape[:1])}, "
            "one number for each row of its weight."
        )
    given = _given_columns(options.shard)
    if weight.shape[0] != given:
        raise ValueError(
            f"the output layer's weight has {weight.shape[0]} rows, but the shard was described with {given}."
        )
    devices = {x.device for x in (hidden, weight, labels, bias) if x is not None}
    if len(devices) > 1:
        raise ValueError(
            "hidden, labels and the output layer are on "
            f"{' and '.join(sorted(map(str, devices)))}: move them to one device."
        )
    check_options(options)
    check_class_weight(options.class_weight, options.shard.total_columns, hidden.device)
    return _compute_dtype(hidden, weight, bias)


def _compute_dtype(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> torch.dtype:
    kind = hidden.device.type
    if torch.is_autocast_enabled(kind) and hidden.dtype != torch.float64:
        return torch.get_autocast_dtype(kind)
    dtypes = [x.dtype for x in (hidden, weight, bias) if x is not None]
    if len(set(dtypes)) > 1:
        raise TypeError(
            f"hidden states are {hidden.dtype} and the output layer is "
            f"{' with a bias of '.join(map(str, dtypes[1:]))}: cast one of them, or use torch.autocast."
        )
    if hidden.dtype not in _FLOATS:
        raise TypeError(f"hidden has dtype {hidden.dtype}, expected float16, bfloat16, float32 or float64.")
    return hidden.dtype


def check_options(options: LinearLossOptions) -> None:
    """Raises for numbers out of range."""
    if isinstance(options.chunk_tokens, bool) or not isinstance(options.chunk_tokens, int):
        raise TypeError(f"chunk_tokens is {options.chunk_tokens!r}, expected an int.")
    if options.chunk_tokens < 1:
        raise ValueError(f"chunk_tokens is {options.chunk_tokens}, expected at least 1.")
    if not 0.0 <= options.label_smoothing < 1.0:
        raise ValueError(f"label_smoothing is {options.label_smoothing}, expected 0 <= label_smoothing < 1.")
    if not math.isfinite(options.z_loss_weight):
        raise ValueError(f"z_loss_weight is {options.z_loss_weight}, expected a finite number.")
    if options.accumulation_dtype not in (None, torch.float32):
        raise ValueError(
            f"accumulation_dtype is {options.accumulation_dtype}, expected torch.float32 or None."
        )


def check_class_weight(class_weight: Tensor | None, classes: int, device: torch.device) -> None:
    """Raises for class weights that do not belong to this vocabulary."""
    if class_weight is None:
        return
    if not isinstance(class_weight, Tensor) or not class_weight.is_floating_point():
        found = class_weight.dtype if isinstance(class_weight, Tensor) else type(class_weight).__name__
        raise TypeError(f"the class weight is {found}, expected a floating-point tensor [V].")
    if class_weight.shape != (classes,):
        raise ValueError(
            f"the class weight has shape {tuple(class_weight.shape)}, expected ({classes},): one weight for "
            "each class of the whole vocabulary, on every rank."
        )
    if class_weight.device != device:
        raise ValueError(
            f"the class weight is on {class_weight.device} and the hidden states on {device}: move both to "
            "one device."
        )


def _check_gathered(gathered: Tensor, hidden: Tensor, labels: Tensor) -> None:
    if gathered.shape[0] != labels.shape[0]:
        what = f"{hidden.shape[0]} hidden states"
        if gathered.shape[0] != hidden.shape[0]:
            what += f" on this rank, {gathered.shape[0]} on all,"
        raise ValueError(f"there are {labels.shape[0]} labels for {what}: expected one label for each token.")
