"""The signature, and bad input: each gives one clear sentence that names the value."""

from __future__ import annotations

import inspect
import os
import warnings
from typing import Any

import pytest
import torch
from conftest import Device

from megatron_ce_adaptor.cross_entropy import parallel_cross_entropy


def logits_and_target(device: Device, *leading: int) -> tuple[torch.Tensor, torch.Tensor]:
    shape = leading or (2, 3)
    return torch.randn(*shape, 7, device=device.type), torch.zeros(
        shape, dtype=torch.int64, device=device.type
    )


# --- the signature ------------------------------------------------------------------------------------------


def test_positional_order_is_that_of_transformer_engine_2_17() -> None:
    parameters = list(inspect.signature(parallel_cross_entropy).parameters.values())
    positional = [(p.name, p.default) for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert positional[1:] == [
        ("target", inspect.Parameter.empty),
        ("label_smoothing", 0.0),
        ("reduce_loss", False),
        ("dist_process_group", None),
        ("ignore_idx", -100),
        ("is_cg_capturable", False),
    ]
    assert positional[0] == ("inp", inspect.Parameter.empty)
    keywords = {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}
    assert keywords == {
        "overwrite_input": False,
        "z_loss_weight": 0.0,
        "return_statistics": False,
        "_input": None,
    }


def test_is_the_packages_public_name() -> None:
    import megatron_ce_adaptor

    assert megatron_ce_adaptor.parallel_cross_entropy is parallel_cross_entropy


def test_deprecated_input_keyword_warns_and_takes_precedence(device: Device) -> None:
    logits, target = logits_and_target(device)
    other = torch.randn_like(logits)
    with pytest.warns(FutureWarning, match="_input"):
        loss = parallel_cross_entropy(other, target, _input=logits)
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        expected = parallel_cross_entropy(logits, target)
    assert torch.equal(loss, expected)
    with pytest.warns(FutureWarning, match="_input"):
        assert torch.equal(parallel_cross_entropy(None, target, _input=logits), expected)


@pytest.mark.parametrize("value", [True, False])
def test_is_cg_capturable_changes_nothing(device: Device, value: bool) -> None:
    logits, target = logits_and_target(device)
    expected = parallel_cross_entropy(logits, target)
    assert torch.equal(parallel_cross_entropy(logits, target, 0.0, False, None, -100, value), expected)


# --- logits -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(), (7,), (2, 3, 4, 7)], ids=str)
def test_wrong_number_of_dimensions(device: Device, shape: tuple[int, ...]) -> None:
    target = torch.zeros(shape[:-1], dtype=torch.int64, device=device.type)
    with pytest.raises(ValueError, match=rf"(?i)dim.*\b{len(shape)}\b|\b{len(shape)}.*dim|shape"):
        parallel_cross_entropy(torch.zeros(shape, device=device.type), target)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.bool, torch.complex64], ids=str)
def test_logits_that_are_not_floating_point(device: Device, dtype: torch.dtype) -> None:
    _, target = logits_and_target(device)
    with pytest.raises(TypeError, match=str(dtype).removeprefix("torch.")):
        parallel_cross_entropy(torch.zeros(2, 3, 7, device=device.type).to(dtype), target)


@pytest.mark.parametrize("logits", [None, [[1.0, 2.0]], 3.0], ids=str)
def test_logits_that_are_no_tensor(device: Device, logits: Any) -> None:
    with pytest.raises(TypeError, match=type(logits).__name__):
        parallel_cross_entropy(logits, torch.zeros(1, dtype=torch.int64, device=device.type))


# --- labels -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool], ids=str)
def test_target_of_a_dtype_that_holds_no_labels(device: Device, dtype: torch.dtype) -> None:
    logits, target = logits_and_target(device)
    with pytest.raises(TypeError, match=str(dtype).removeprefix("torch.")):
        parallel_cross_entropy(logits, target.to(dtype))


def test_target_that_is_no_tensor(device: Device) -> None:
    logits, _ = logits_and_target(device)
    with pytest.raises(TypeError, match="list"):
        parallel_cross_entropy(logits, [0] * 6)  # type: ignore[arg-type]


@pytest.mark.parametrize("shape", [(5,), (2, 4), (2, 3, 7), (), (0,), (7,)], ids=str)
def test_target_of_the_wrong_size(device: Device, shape: tuple[int, ...]) -> None:
    logits, _ = logits_and_target(device)
    target = torch.zeros(shape, dtype=torch.int64, device=device.type)
    with pytest.raises(ValueError, match=rf"\b{target.numel()}\b|\({', '.join(map(str, shape))}"):
        parallel_cross_entropy(logits, target)


@pytest.mark.parametrize("shape", [(6,), (2, 3), (3, 2), (6, 1), (1, 2, 3)], ids=str)
def test_target_of_any_shape_with_as_many_elements(device: Device, shape: tuple[int, ...]) -> None:
    logits, _ = logits_and_target(device)
    target = torch.arange(6, device=device.type)
    loss = parallel_cross_entropy(logits, target.view(shape))
    assert loss.shape == (2, 3)
    assert torch.equal(loss, parallel_cross_entropy(logits, target.view(2, 3)))


def test_tensors_on_different_devices(device: Device) -> None:
    logits, target = logits_and_target(device)
    with pytest.raises(ValueError, match=rf"(?s){device.type}.*meta|meta.*{device.type}"):
        parallel_cross_entropy(logits, target.to("meta"))


# --- options ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [-0.1, 1.0, 1.5, float("nan")])
def test_label_smoothing_out_of_range(device: Device, value: float) -> None:
    logits, target = logits_and_target(device)
    with pytest.raises(ValueError, match=rf"label_smoothing.*{value}"):
        parallel_cross_entropy(logits, target, value)


@pytest.mark.parametrize("value", ["fastest", "cuda", "TRITON "])
def test_unknown_implementation(device: Device, monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("MCE_IMPLEMENTATION", value)
    logits, target = logits_and_target(device)
    with pytest.raises(ValueError, match=rf"MCE_IMPLEMENTATION.*{value}.*auto.*triton.*reference"):
        parallel_cross_entropy(logits, target)


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="TRITON_INTERPRET=1 is set: it can run")
def test_triton_on_cpu_without_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing falls back silently."""
    monkeypatch.setenv("MCE_IMPLEMENTATION", "triton")
    with pytest.raises(RuntimeError, match="TRITON_INTERPRET=1"):
        parallel_cross_entropy(torch.randn(2, 7), torch.zeros(2, dtype=torch.int64))


def test_automatic_choice_runs(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    logits, target = logits_and_target(device)
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="none")
    for value in ("auto", None):
        monkeypatch.delenv("MCE_IMPLEMENTATION") if value is None else monkeypatch.setenv(
            "MCE_IMPLEMENTATION", value
        )
        torch.testing.assert_close(parallel_cross_entropy(logits, target), expected.view(2, 3))


@pytest.mark.parametrize("value", ["true", "yes", "2"])
def test_a_switch_that_is_neither_on_nor_off(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("MCE_CHECK_LABELS", value)
    with pytest.raises(ValueError, match=rf"MCE_CHECK_LABELS is '{value}', expected 0 .* or 1"):
        parallel_cross_entropy(torch.zeros(1, 3), torch.tensor([0]))


def test_an_empty_switch_is_unset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MCE_CHECK_LABELS", "")
    with pytest.raises(ValueError, match="expected a class"):
        parallel_cross_entropy(torch.zeros(1, 3), torch.tensor([7]))


@pytest.mark.parametrize("group", [2, "tp", [0, 1]])
def test_a_group_that_is_none(group: object) -> None:
    with pytest.raises(
        TypeError, match=r"dist_process_group is .*, expected a torch.distributed process group"
    ):
        parallel_cross_entropy(torch.zeros(1, 3), torch.tensor([0]), dist_process_group=group)
