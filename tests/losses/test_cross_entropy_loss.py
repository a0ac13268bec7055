"""CrossEntropyLoss on one process."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from dense import Problem, all_terms, assert_close, assert_number, reference

from megatron_ce_adaptor import CrossEntropyLoss


@pytest.mark.parametrize("case", range(5))
@pytest.mark.parametrize("shape", [(5,), (3, 7), (2, 2, 5)])
def test_equals_dense(shape, case):
    p = Problem.make(shape, 6, 11, seed=case)
    terms = all_terms(p)[case]
    expected = reference(p, divisor=p.valid, upstream=-0.75, **terms)
    hidden = p.hidden.clone().requires_grad_()
    logits = F.linear(hidden, p.weight, p.bias)
    loss, metrics = CrossEntropyLoss(report_metrics=True, **terms)(logits, p.labels, p.valid)
    (loss * -0.75).backward()
    assert loss.shape == () and loss.dtype == torch.float64
    assert_number(loss, expected.loss, "loss")
    assert_close(hidden.grad, expected.hidden, "hidden")
    assert metrics.keys() == expected.metrics.keys()
    for name, value in expected.metrics.items():
        assert metrics[name].shape == () and not metrics[name].requires_grad
        assert_number(metrics[name], value, name)


def test_count_decides_the_divisor():
    p = Problem.make((4, 6), 6, 11)
    logits = F.linear(p.hidden, p.weight, p.bias)
    total = reference(p, divisor=1).loss
    loss_of = CrossEntropyLoss()
    assert loss_of(logits, p.labels)[1] == {}
    assert_number(loss_of(logits, p.labels)[0], total, "sum without a count, as TorchTitan's")
    for count in (7, 7.0, torch.tensor(7), torch.tensor([7.0], dtype=torch.float64)):
        assert_number(loss_of(logits, p.labels, global_valid_tokens=count)[0], total / 7, f"{count!r}")


def test_no_valid_token_is_zero_and_not_nan():
    # HAZARDS 28
    p = Problem.make((2, 3), 6, 11, ignored=2.0)
    logits = F.linear(p.hidden, p.weight, p.bias).requires_grad_()
    for count in (None, 0, torch.tensor(0)):
        loss, metrics = CrossEntropyLoss(report_metrics=True)(logits, p.labels, count)
        assert not loss.any() and not any(value.any() for value in metrics.values())
        (gradient,) = torch.autograd.grad(loss, logits)
        assert not gradient.any()


def test_bare():
    p = Problem.make((2, 3), 6, 11)
    logits = F.linear(p.hidden, p.weight, p.bias)
    loss = CrossEntropyLoss(bare=True)(logits, p.labels, p.valid)
    assert isinstance(loss, torch.Tensor)
    assert_number(loss, reference(p, divisor=p.valid).loss, "loss")


def test_labels_and_logits_are_left_alone():
    # HAZARDS 26
    p = Problem.make((2, 9), 6, 11)
    logits = F.linear(p.hidden, p.weight, p.bias)
    before = p.labels.clone(), logits.clone()
    CrossEntropyLoss(weight=p.class_weight, report_metrics=True)(logits, p.labels, p.valid)
    assert torch.equal(p.labels, before[0]) and torch.equal(logits, before[1])


def test_low_precision_logits_have_an_fp32_loss():
    p = Problem.make((2, 9), 6, 11, dtype=torch.bfloat16)
    logits = F.linear(p.hidden, p.weight, p.bias)
    loss, _ = CrossEntropyLoss()(logits, p.labels, p.valid)
    assert loss.dtype == torch.float32
    dense = F.cross_entropy(logits.double().flatten(0, 1), p.labels.flatten(), reduction="sum") / p.valid
    assert_number(loss, float(dense), "loss", 1e-6)


def test_agrees_with_torchs_loss_of_the_same_sum():
    p = Problem.make((3, 8), 6, 11)
    logits = F.linear(p.hidden, p.weight, p.bias)
    dense = F.cross_entropy(logits.transpose(1, 2), p.labels, label_smoothing=0.1)
    loss, _ = CrossEntropyLoss(label_smoothing=0.1)(logits, p.labels, p.valid)
    assert_number(loss, float(dense), "loss")
