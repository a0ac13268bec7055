"""Extreme and special values, special labels, determinism, z-loss and statistics."""

from __future__ import annotations

import math

import pytest
import torch
from conftest import Device
from oracle import Reference, dense_cross_entropy
from tolerances import assert_gradient_close, assert_loss_close, assert_statistics_close, storage_error

from megatron_ce_adaptor.cross_entropy import parallel_cross_entropy

pytestmark = pytest.mark.usefixtures("poisoned_empty")

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


def check_against_dense(
    device: Device, logits: torch.Tensor, target: torch.Tensor, **options: float
) -> tuple[torch.Tensor, torch.Tensor, Reference]:
    """Loss and gradient of `logits` on `device` equal the reference's; returns both and the reference."""
    upstream = torch.randn(target.shape, generator=torch.Generator().manual_seed(99)) + 2.0
    reference = dense_cross_entropy(logits, target, upstream=upstream, **options)
    leaf = logits.to(device.type).detach().clone().requires_grad_()
    loss = parallel_cross_entropy(leaf, target.to(device.type), **options)
    assert_loss_close(loss, reference, logits.dtype)
    (gradient,) = torch.autograd.grad(loss, leaf, upstream.to(device.type))
    assert_gradient_close(gradient, reference, logits.dtype)
    return loss, gradient, reference


# --- accuracy -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("target_logit", [8.0, 12.0, 16.0, 20.0])
def test_bf16_gradient_of_a_confident_target(device: Device, target_logit: float) -> None:
    """HAZARDS 6: one rounding. A bf16 softmax is 18 % off here in norm, 32 % at the target."""
    generator = torch.Generator().manual_seed(int(target_logit))
    rows = device.rows(4, 32_000)
    logits = torch.randn(rows, 32_000, generator=generator).bfloat16()
    target = torch.randint(0, 32_000, (rows,), generator=generator)
    logits[torch.arange(rows), target] = target_logit
    _, gradient, reference = check_against_dense(device, logits, target)
    actual = gradient.double().cpu()
    norm_error = (actual.norm() - reference.gradient.norm()).abs() / reference.gradient.norm()
    assert norm_error < (3e-3 if device.name != "interpreter" else 2**-7)  # it cuts bf16 off
    at_target = actual.gather(1, target[:, None])
    expected = reference.gradient.gather(1, target[:, None])
    assert ((at_target - expected) / expected).abs().max() < 0.01


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("margin", [20.0, 40.0])
def test_gradient_at_the_target_is_not_a_difference_from_one(
    device: Device, margin: float, dtype: torch.dtype
) -> None:
    """p - 1 in fp32 is 0 or 6e-8 when p is nearly 1; the analytic value keeps its relative accuracy."""
    leaf = torch.zeros(3, 50, dtype=dtype)
    target = torch.tensor([0, 20, 49])
    leaf[torch.arange(3), target] = margin
    leaf = leaf.to(device.type).requires_grad_()
    parallel_cross_entropy(leaf, target.to(device.type)).sum().backward()
    others = 49 * math.exp(-margin)
    assert leaf.grad.cpu().gather(1, target[:, None])[:, 0].tolist() == pytest.approx(
        [-others / (1 + others)] * 3, rel=1e-5
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("vocab", [1, 3, 5000])
def test_equal_logits_of_1e8(device: Device, dtype: torch.dtype, vocab: int) -> None:
    """log V exactly, where `lse - x_y` is off by up to 8."""
    logits = torch.full((2, vocab), 1e8, dtype=dtype)
    loss, _, _ = check_against_dense(device, logits, torch.tensor([0, vocab - 1]))
    assert loss.tolist() == pytest.approx([math.log(vocab)] * 2, rel=1e-6)


@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_logits_times_1000(device: Device, dtype: torch.dtype, label_smoothing: float) -> None:
    generator = torch.Generator().manual_seed(3)
    logits = (torch.randn(5, 3000, generator=generator) * 1000).to(dtype)
    target = torch.randint(0, 3000, (5,), generator=generator)
    target[0] = logits[0].argmax()
    check_against_dense(device, logits, target, label_smoothing=label_smoothing)


@pytest.mark.parametrize("offset", [2000.0, -2000.0])
def test_shifted_logits(device: Device, offset: float) -> None:
    """The probabilities come from x - max - log_sum in this order: x - lse would be off by 1e-4 here."""
    generator = torch.Generator().manual_seed(4)
    logits = torch.randn(4, 200, generator=generator) + offset
    check_against_dense(device, logits, torch.tensor([0, 199, 7, int(logits[3].argmax())]))


@pytest.mark.parametrize("vocab", [1, 2, 5, 17, 100, 1023])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_vocabulary_smaller_than_a_block(device: Device, dtype: torch.dtype, vocab: int) -> None:
    """HAZARDS 35: the lanes of a block beyond the vocabulary count for nothing, also when all logits are
    negative."""
    generator = torch.Generator().manual_seed(5)
    logits = (torch.randn(4, vocab, generator=generator) - 500.0).to(dtype)
    target = torch.randint(0, vocab, (4,), generator=generator)
    loss, gradient, _ = check_against_dense(device, logits, target, label_smoothing=0.1)
    assert loss.isfinite().all()
    assert gradient.isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_finfo_min_as_mask_value(device: Device, dtype: torch.dtype) -> None:
    """Masked columns, a row masked but for its target, and a row masked whole: equal logits."""
    generator = torch.Generator().manual_seed(6)
    lowest = torch.finfo(dtype).min
    logits = torch.randn(3, 300, generator=generator).to(dtype)
    logits[0, 100:] = lowest
    logits[1, :250] = lowest
    logits[1, 251:] = lowest
    logits[2] = lowest
    loss, _, _ = check_against_dense(device, logits, torch.tensor([3, 250, 7]))
    assert loss[2].item() == pytest.approx(math.log(300))


# --- infinities and NaN -------------------------------------------------------------------------------------


@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_minus_infinity_in_places(device: Device, dtype: torch.dtype, label_smoothing: float) -> None:
    """A few columns, all before or after the target, all but the target, and the target itself (loss inf,
    as dense)."""
    generator = torch.Generator().manual_seed(8)
    logits = torch.randn(6, 70, generator=generator).to(dtype)
    logits[0, ::3] = -torch.inf
    logits[1, :40] = -torch.inf
    logits[2, 40:] = -torch.inf
    logits[3, :12] = -torch.inf
    logits[3, 13:] = -torch.inf
    logits[4, 9] = -torch.inf
    target = torch.tensor([1, 50, 39, 12, 9, 69])
    loss, _, _ = check_against_dense(device, logits, target, label_smoothing=label_smoothing)
    assert loss.isinf().tolist() == ([True] * 5 + [False] if label_smoothing else [False] * 4 + [True, False])


@pytest.mark.parametrize("target_column", [32_768, 39_999, 5])
def test_leading_blocks_of_minus_infinity(device: Device, target_column: int) -> None:
    """HAZARDS 11: the first 32768 of 40000 columns."""
    logits = torch.randn(1, 40_000, generator=torch.Generator().manual_seed(9))
    logits[:, :32_768] = -torch.inf
    loss, gradient, _ = check_against_dense(device, logits, torch.tensor([target_column]))
    assert loss.isfinite().item() == (target_column != 5)
    assert gradient.isfinite().all()


def test_trailing_blocks_of_minus_infinity(device: Device) -> None:
    logits = torch.randn(1, 40_000, generator=torch.Generator().manual_seed(10))
    logits[:, 3:] = -torch.inf
    check_against_dense(device, logits, torch.tensor([2]))


@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
@pytest.mark.parametrize("column", [4, 11], ids=["at_the_target", "elsewhere"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_nan_and_plus_infinity_stay_in_their_row(
    device: Device, value: float, column: int, label_smoothing: float
) -> None:
    """As dense PyTorch: the row's loss and whole gradient are NaN; its neighbours are right."""
    logits = torch.randn(5, 30, generator=torch.Generator().manual_seed(11))
    logits[2, column] = value
    loss, gradient, _ = check_against_dense(
        device, logits, torch.full((5,), 4), label_smoothing=label_smoothing
    )
    assert loss.isnan().tolist() == [False, False, True, False, False]
    assert gradient.isnan().any(-1).tolist() == [False, False, True, False, False]


# --- labels -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reduce_loss", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_all_targets_ignored(device: Device, dtype: torch.dtype, reduce_loss: bool) -> None:
    """HAZARDS 13, 28: loss 0 and gradient exactly 0, even over logits of NaN, where PyTorch's mean is NaN."""
    leaf = torch.full((3, 4, 40), torch.nan, dtype=dtype, device=device.type, requires_grad=True)
    target = torch.full((3, 4), -100, device=device.type)
    loss = parallel_cross_entropy(leaf, target, 0.1, reduce_loss, z_loss_weight=0.1)
    assert loss.shape == (() if reduce_loss else (3, 4))
    assert not loss.detach().ne(0).any()  # NaN != 0
    loss.backward(torch.full_like(loss, 3.0))
    assert not leaf.grad.ne(0).any()


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
def test_ignored_rows_may_hold_nan(device: Device, label_smoothing: float, overwrite: bool) -> None:
    logits = torch.randn(6, 40, generator=torch.Generator().manual_seed(13))
    logits[1] = torch.nan
    logits[4, ::2] = torch.inf
    target = torch.tensor([0, -100, 3, 4, -100, -100])
    reference = dense_cross_entropy(
        logits, target, label_smoothing=label_smoothing, reduce_loss=True, z_loss_weight=0.01
    )
    leaf = logits.to(device.type).requires_grad_()
    loss = parallel_cross_entropy(
        leaf * 1, target.to(device.type), label_smoothing, True, overwrite_input=overwrite, z_loss_weight=0.01
    )
    assert_loss_close(loss, reference, torch.float32)
    loss.backward()
    # `leaf * 1` hands NaN * 1 nowhere: its gradient is the upstream one times 1
    assert_gradient_close(leaf.grad, reference, torch.float32)


def test_ignore_idx_inside_the_vocabulary(device: Device) -> None:
    """Such a row is skipped; the class stays in the softmax of the others."""
    logits = torch.randn(4, 12, generator=torch.Generator().manual_seed(14))
    logits[:, 5] = 8.0
    loss, gradient, _ = check_against_dense(device, logits, torch.tensor([5, 0, 5, 11]), ignore_idx=5)
    assert (loss.detach()[[1, 3]] > 6.0).all()
    assert (gradient[[1, 3], 5] > 0.5).all()


def test_ignore_idx_far_outside_the_vocabulary(device: Device) -> None:
    """An ignore_idx beyond int32, and a label of it."""
    logits = torch.randn(3, 12, generator=torch.Generator().manual_seed(15))
    check_against_dense(device, logits, torch.tensor([3, -(2**40), 4]), ignore_idx=-(2**40))


@pytest.mark.parametrize("bad", [-1, 40, 777, -101, 2**33])
@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
def test_label_out_of_range_is_named(
    device: Device, monkeypatch: pytest.MonkeyPatch, bad: int, label_smoothing: float
) -> None:
    """The first of them, with its position; on a GPU when MCE_CHECK_LABELS=1."""
    if device.type != "cpu":
        monkeypatch.setenv("MCE_CHECK_LABELS", "1")
    target = torch.zeros(30, dtype=torch.int64, device=device.type)
    target[2] = -100
    target[13] = bad
    target[20] = 888
    with pytest.raises(ValueError, match=rf"(?s)(?<!\d){bad}\b") as error:
        parallel_cross_entropy(torch.randn(30, 40, device=device.type), target, label_smoothing)
    message = str(error.value)
    assert "13" in message
    assert "888" not in message


def test_minus_100_is_out_of_range_when_another_index_is_ignored(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MCE_CHECK_LABELS", "1")
    target = torch.tensor([1, 5, -100], device=device.type)
    with pytest.raises(ValueError, match="-100"):
        parallel_cross_entropy(torch.randn(3, 9, device=device.type), target, ignore_idx=5)


@pytest.mark.parametrize("bad", [-1, 40, 777, -101])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_unchecked_label_out_of_range_is_finite(
    device: Device, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, bad: int
) -> None:
    """HAZARDS 12: its target logit counts as the row maximum (Megatron's native loss), its gradient is the
    softmax."""
    monkeypatch.setenv("MCE_CHECK_LABELS", "0")
    generator = torch.Generator().manual_seed(16)
    logits = torch.randn(4, 40, generator=generator).to(dtype)
    target = torch.tensor([3, bad, 5, bad])
    stand_in = target.clone()
    stand_in[[1, 3]] = logits[[1, 3]].float().argmax(-1)
    upstream = torch.randn(4, generator=generator)
    reference = dense_cross_entropy(logits, stand_in, upstream=upstream)
    expected_gradient = reference.gradient.clone()
    softmax = logits.double().softmax(-1) * upstream.double()[:, None]
    expected_gradient[[1, 3]] = softmax[[1, 3]]

    leaf = logits.to(device.type).requires_grad_()
    loss, statistics = parallel_cross_entropy(leaf, target.to(device.type), return_statistics=True)
    assert_loss_close(loss, reference, dtype)
    (gradient,) = torch.autograd.grad(loss, leaf, upstream.to(device.type))
    torch.testing.assert_close(
        gradient.double().cpu(), expected_gradient, rtol=storage_error(dtype) + 4e-6, atol=1e-9
    )
    assert statistics.target_log_prob[[1, 3]].tolist() == [0.0, 0.0]
    assert statistics.correct[[1, 3]].tolist() == [False, False]

    masked = parallel_cross_entropy(leaf, target.to(device.type)) * (target >= 0).to(device.type)
    assert masked.sum().isfinite()


# --- the logits are only read; the same result every time ---------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("overwrite", [False, True])
def test_forward_leaves_the_logits_bit_identical(device: Device, dtype: torch.dtype, overwrite: bool) -> None:
    """HAZARDS 7: under no_grad and with a graph, twice on the same logits, and read after the loss."""
    generator = torch.Generator().manual_seed(17)
    logits = (torch.randn(4, 500, generator=generator) * 4).to(dtype).to(device.type)
    target = torch.randint(0, 500, (4,), generator=generator).to(device.type)
    before = logits.clone()
    version = logits._version
    with torch.no_grad():
        first = parallel_cross_entropy(logits, target, 0.1, overwrite_input=overwrite)
        second = parallel_cross_entropy(logits, target, 0.1, overwrite_input=overwrite)
    assert torch.equal(logits, before)
    assert logits._version == version
    tracked = logits.clone().requires_grad_() * 1
    third = parallel_cross_entropy(tracked, target, 0.1, overwrite_input=overwrite)
    assert torch.equal(tracked.detach(), before)
    assert torch.equal(first, second)
    assert torch.equal(first, third.detach())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_bitwise_equal_over_repeats(device: Device, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(18)
    rows = device.rows(64, 4000)
    logits = torch.randn(rows, 4000, generator=generator).to(dtype).to(device.type)
    target = torch.randint(0, 4000, (rows,), generator=generator).to(device.type)
    runs = []
    for _ in range(4):
        leaf = logits.clone().requires_grad_()
        loss = parallel_cross_entropy(leaf, target, 0.1, True)
        loss.backward()
        runs.append((loss.detach(), leaf.grad))
    for loss, gradient in runs[1:]:
        assert torch.equal(loss, runs[0][0])
        assert torch.equal(gradient, runs[0][1])


def test_a_row_does_not_depend_on_its_neighbours(device: Device) -> None:
    generator = torch.Generator().manual_seed(19)
    logits = torch.randn(9, 300, generator=generator).to(device.type)
    target = torch.randint(0, 300, (9,), generator=generator).to(device.type)
    together = parallel_cross_entropy(logits, target)
    alone = torch.cat([parallel_cross_entropy(logits[i : i + 1], target[i : i + 1]) for i in range(9)])
    assert torch.equal(together, alone)


# --- z-loss and statistics ----------------------------------------------------------------------------------


@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
@pytest.mark.parametrize("scale", [1.0, 30.0])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_z_loss(device: Device, dtype: torch.dtype, scale: float, label_smoothing: float) -> None:
    generator = torch.Generator().manual_seed(20)
    logits = (torch.randn(6, 200, generator=generator) * scale).to(dtype)
    target = torch.randint(0, 200, (6,), generator=generator)
    target[2] = -100
    check_against_dense(device, logits, target, label_smoothing=label_smoothing, z_loss_weight=1e-2)


@pytest.mark.parametrize("reduce_loss", [False, True])
@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_statistics(device: Device, dtype: torch.dtype, label_smoothing: float, reduce_loss: bool) -> None:
    generator = torch.Generator().manual_seed(21)
    logits = (torch.randn(4, 5, 150, generator=generator) * 3).to(dtype)
    target = logits.float().argmax(-1)
    target[0] = torch.randint(0, 150, (5,), generator=generator)
    target[1, 0] = -100
    options = {"label_smoothing": label_smoothing, "reduce_loss": reduce_loss, "z_loss_weight": 0.01}
    reference = dense_cross_entropy(logits, target, **options)
    leaf = logits.to(device.type).requires_grad_()
    loss, statistics = parallel_cross_entropy(leaf, target.to(device.type), return_statistics=True, **options)
    assert_statistics_close(statistics, reference, dtype)
    assert_loss_close(loss, reference, dtype)
    loss.sum().backward()
    reference = dense_cross_entropy(logits, target, upstream=torch.ones_like(reference.loss), **options)
    assert_gradient_close(leaf.grad, reference, dtype)
    plain = parallel_cross_entropy(leaf, target.to(device.type), **options)
    assert torch.equal(plain, loss)


def test_statistics_of_special_rows(device: Device) -> None:
    """Ties count as correct, logits of -inf add nothing to the entropy, uniform rows have entropy log V."""
    logits = torch.randn(5, 64, generator=torch.Generator().manual_seed(22))
    logits[0, 3] = logits[0, 60] = 9.0
    logits[1] = 2.0
    logits[2, 10:] = -torch.inf
    logits[3] = -torch.inf
    logits[3, 7] = 1.0
    logits[4] *= 1000
    target = torch.tensor([60, 63, 4, 7, int(logits[4].argmax())])
    reference = dense_cross_entropy(logits, target)
    _, statistics = parallel_cross_entropy(
        logits.to(device.type), target.to(device.type), return_statistics=True
    )
    assert_statistics_close(statistics, reference, torch.float32)
    assert statistics.correct.tolist()[:2] == [True, True]
    assert statistics.entropy[1].item() == pytest.approx(math.log(64), rel=1e-5)
    assert statistics.entropy[3].item() == 0.0


def test_statistics_of_no_rows(device: Device) -> None:
    logits = torch.zeros(0, 4, 9, device=device.type)
    target = torch.zeros(0, 4, dtype=torch.int64, device=device.type)
    _, statistics = parallel_cross_entropy(logits, target, return_statistics=True)
    for name in ("log_sum_exp", "target_log_prob", "entropy", "correct"):
        assert getattr(statistics, name).shape == (0, 4)
