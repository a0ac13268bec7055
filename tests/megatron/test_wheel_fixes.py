"""What the wheel needs on every device, against the real megatron-core."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from training_runs import in_a_fork

from megatron_ce_adaptor.megatron import wheel_fixes

pytestmark = pytest.mark.slow


def norm_config(**changes: object) -> SimpleNamespace:
    """What WrappedTorchNorm reads of a TransformerConfig."""
    config = SimpleNamespace(
        layernorm_zero_centered_gamma=False,
        persist_layer_norm=False,
        sequence_parallel=False,
        memory_efficient_layer_norm=False,
        normalization="RMSNorm",
    )
    vars(config).update(changes)
    return config


def build_norm(config: SimpleNamespace) -> Any:
    torch_norm = importlib.import_module("megatron.core.transformer.torch_norm")
    return torch_norm.WrappedTorchNorm(config=config, hidden_size=8, eps=1e-5)


@in_a_fork
def test_the_norm_allows_sequence_parallelism_and_keeps_its_other_checks() -> None:
    parallel = norm_config(sequence_parallel=True)
    with pytest.raises(AssertionError, match="sequence parallel not supported"):
        build_norm(parallel)
    wheel_fixes.apply()
    wheel_fixes.apply()
    marks = [parameter.sequence_parallel for parameter in build_norm(parallel).parameters()]
    assert marks == [True]
    assert parallel.sequence_parallel is True
    with pytest.raises(AssertionError, match="persist_layer_norm not supported"):
        build_norm(norm_config(sequence_parallel=True, persist_layer_norm=True))
    assert not hasattr(build_norm(norm_config()).weight, "sequence_parallel")


@in_a_fork
def test_compile_helpers_is_replaced_only_where_there_is_no_makefile(tmp_path: Path) -> None:
    utils = importlib.import_module("megatron.core.datasets.utils")
    original = utils.compile_helpers
    wheel_fixes.apply()
    assert utils.compile_helpers is wheel_fixes.require_compiled_helpers
    utils.compile_helpers()  # the original would exit the process here

    (tmp_path / "Makefile").write_text("default:\n")
    utils.compile_helpers, utils.__file__ = original, str(tmp_path / "utils.py")
    wheel_fixes.apply()
    assert utils.compile_helpers is original
