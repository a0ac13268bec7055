"""The functions that stand in for Megatron's: te's kernel, and the two places that refuse te."""

from __future__ import annotations

import importlib
import sys
import types
import warnings

import pytest
import torch

from megatron_ce_adaptor.megatron import install_import_hook, patch_status, remove_patches
from megatron_ce_adaptor.megatron.patching import TargetState
from megatron_ce_adaptor.megatron.replacements import te_parallel_cross_entropy

CONFIG = "megatron.core.model_parallel_config.ModelParallelConfig.__post_init__"


def intermediate_logits(s=4, b=2, v=9, dtype=torch.float32):
    leaf = torch.randn(s, b, v, generator=torch.Generator().manual_seed(0), dtype=dtype).requires_grad_()
    return leaf, leaf * 1.0


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch):
    for name in ("MCE_OVERWRITE", "MCE_CHECK_LABELS", "MCE_IMPLEMENTATION"):
        monkeypatch.delenv(name, raising=False)


# -------------------------------------------------------------------------------------- te's kernel


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_loss_and_gradient_equal_dense_cross_entropy(dtype):
    leaf, logits = intermediate_logits(dtype=dtype)
    labels = torch.arange(8).view(4, 2) % 9
    dense_leaf = leaf.detach().double().requires_grad_()
    dense = torch.nn.functional.cross_entropy(dense_leaf.flatten(0, 1), labels.flatten(), reduction="none")
    loss = te_parallel_cross_entropy(logits, labels, None)
    assert loss.dtype == torch.float32
    assert loss.shape == (4, 2)
    weights = torch.rand(4, 2, generator=torch.Generator().manual_seed(1))
    (loss * weights).sum().backward()
    (dense.view(4, 2) * weights).sum().backward()
    tolerance = 1e-6 if dtype is torch.float32 else 1e-2
    torch.testing.assert_close(loss.double(), dense.view(4, 2).detach(), rtol=0, atol=1e-6)
    torch.testing.assert_close(leaf.grad.double(), dense_leaf.grad, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("setting", [None, "0", "1"])
def test_gradient_goes_into_the_logits_memory_unless_switched_off(monkeypatch, setting):
    if setting is not None:
        monkeypatch.setenv("MCE_OVERWRITE", setting)
    _, logits = intermediate_logits()
    before = logits.detach().clone()
    loss = te_parallel_cross_entropy(logits, torch.zeros(4, 2, dtype=torch.long), None)
    assert torch.equal(logits, before)
    loss.sum().backward()
    assert torch.equal(logits.detach(), before) == (setting == "0")


def test_a_leaf_keeps_its_values():
    leaf, _ = intermediate_logits()
    before = leaf.detach().clone()
    te_parallel_cross_entropy(leaf, torch.zeros(4, 2, dtype=torch.long), None).sum().backward()
    assert torch.equal(leaf.detach(), before)
    assert leaf.grad.abs().sum() > 0


def test_logits_that_share_memory_are_not_overwritten():
    leaf = torch.randn(4, 1, 9).requires_grad_()
    logits = (leaf * 1.0).expand(4, 2, 9)
    te_parallel_cross_entropy(logits, torch.zeros(4, 2, dtype=torch.long), None).sum().backward()
    dense = 2 * (torch.softmax(leaf.detach(), -1) - torch.nn.functional.one_hot(torch.tensor(0), 9))
    torch.testing.assert_close(leaf.grad, dense, rtol=0, atol=1e-6)


@pytest.mark.parametrize("outside", [-1, 9, 10**6])
def test_a_label_out_of_range_behind_a_loss_mask_is_harmless(outside):
    # HAZARDS 12
    leaf, logits = intermediate_logits()
    labels = torch.arange(8).view(4, 2) % 9
    labels[1, 1] = outside
    mask = torch.ones(4, 2)
    mask[1, 1] = 0
    loss = te_parallel_cross_entropy(logits, labels, None)
    total = (loss * mask).sum()
    assert torch.isfinite(total)
    total.backward()
    assert torch.isfinite(leaf.grad).all()
    assert not leaf.grad[1, 1].any()
    dense = torch.nn.functional.cross_entropy(
        leaf.detach().flatten(0, 1), labels.clamp(0, 8).flatten(), reduction="none"
    )
    torch.testing.assert_close(total.detach(), (dense.view(4, 2) * mask).sum(), rtol=0, atol=1e-5)


def test_labels_are_checked_on_request(monkeypatch):
    monkeypatch.setenv("MCE_CHECK_LABELS", "1")
    labels = torch.zeros(4, 2, dtype=torch.long)
    labels[1, 1] = -1
    with pytest.raises(ValueError, match="-1"):
        te_parallel_cross_entropy(intermediate_logits()[1], labels, None)


def test_without_a_group_megatrons_is_taken(monkeypatch):
    asked = []

    def get_tensor_model_parallel_group(check_initialized=True):
        asked.append(check_initialized)

    parallel_state = types.ModuleType("megatron.core.parallel_state")
    parallel_state.get_tensor_model_parallel_group = get_tensor_model_parallel_group
    monkeypatch.setitem(sys.modules, "megatron.core.parallel_state", parallel_state)
    te_parallel_cross_entropy(intermediate_logits()[1], torch.zeros(4, 2, dtype=torch.long), None, True)
    assert asked == [False]


# ---------------------------------------------------------------------------- the refusals of te


def arguments(**named):
    settings = {
        "cross_entropy_loss_fusion": True,
        "cross_entropy_fusion_impl": "te",
        "deterministic_mode": False,
    }
    return types.SimpleNamespace(**settings | named)


@pytest.fixture
def validate_args(fake_megatron):
    fake_megatron("0.18.2", refuses_te=True)
    install_import_hook()
    return importlib.import_module("megatron.training.arguments").validate_args


def test_te_is_accepted_and_still_te_afterwards(validate_args, capsys):
    args = arguments()
    assert validate_args(args, {"tokenizer_type": "x"}) is args
    assert args.cross_entropy_fusion_impl == "te"
    seen = sys.modules["megatron.training.arguments"].seen[0]
    assert seen["cross_entropy_fusion_impl"] == "native"
    assert seen["cross_entropy_loss_fusion"] is True
    assert "cross_entropy_fusion_impl is te" in capsys.readouterr().out


def test_only_rank_0_says_so(validate_args, capsys):
    validate_args(arguments(rank=3))
    assert capsys.readouterr().out == ""


def test_te_is_refused_without_the_adaptor(validate_args):
    remove_patches()
    with pytest.raises(AssertionError, match="te is disabled"):
        sys.modules["megatron.training.arguments"].validate_args(arguments())
    with pytest.raises(AssertionError, match="te is disabled"):
        validate_args(arguments())


def test_deterministic_mode_still_forbids_loss_fusion(validate_args):
    args = arguments(deterministic_mode=True)
    with pytest.raises(AssertionError, match="not deterministic"):
        validate_args(args)
    assert args.cross_entropy_fusion_impl == "te"


def test_te_is_put_back_after_any_error(validate_args):
    args = arguments(broken=True)
    with pytest.raises(ValueError, match="broken arguments"):
        validate_args(args)
    assert args.cross_entropy_fusion_impl == "te"


@pytest.mark.parametrize(("fusion", "impl"), [(True, "native"), (False, "te"), (False, "native")])
def test_other_settings_pass_untouched(validate_args, capsys, fusion, impl):
    args = arguments(cross_entropy_loss_fusion=fusion, cross_entropy_fusion_impl=impl)
    validate_args(args)
    assert sys.modules["megatron.training.arguments"].seen[0]["cross_entropy_fusion_impl"] == impl
    assert args.cross_entropy_fusion_impl == impl
    assert capsys.readouterr().out == ""


def test_a_validate_args_that_does_not_refuse_is_left_alone(fake_megatron):
    fake_megatron("0.18.0")
    install_import_hook()
    module = importlib.import_module("megatron.training.arguments")
    assert not hasattr(module.validate_args, "__wrapped__")
    assert patch_status()["megatron.training.arguments.validate_args"].state is TargetState.NOT_NEEDED


def test_a_config_that_asserts_accepts_te(fake_megatron):
    fake_megatron("0.18.1", config="asserts")
    module = importlib.import_module("megatron.core.model_parallel_config")

    class TransformerConfig(module.ModelParallelConfig):
        def __post_init__(self):
            super().__post_init__()

    with pytest.raises(AssertionError):
        TransformerConfig(True, "te")
    install_import_hook()
    assert patch_status()[CONFIG].state is TargetState.APPLIED
    assert TransformerConfig(True, "te").cross_entropy_fusion_impl == "te"
    assert module.ModelParallelConfig(True, "native").cross_entropy_fusion_impl == "native"
    remove_patches()
    with pytest.raises(AssertionError):
        TransformerConfig(True, "te")


def test_a_config_that_warns_is_left_alone(fake_megatron):
    fake_megatron("0.18.2", config="warns")
    install_import_hook()
    module = importlib.import_module("megatron.core.model_parallel_config")
    assert patch_status()[CONFIG].state is TargetState.NOT_NEEDED
    with warnings.catch_warnings(), pytest.warns(UserWarning, match="known stability issues"):
        module.ModelParallelConfig(True, "te")
