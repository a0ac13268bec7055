"""What the wheel needs on every device, against the real megatron-core."""

from __future__ import annotations

from training_runs import run_python

_NORMS = """
from types import SimpleNamespace
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron_ce_adaptor.megatron import wheel_fixes

def build(**changes):
    config = SimpleNamespace(layernorm_zero_centered_gamma=False, persist_layer_norm=False,
                             sequence_parallel=False, memory_efficient_layer_norm=False, normalization="RMSNorm")
    vars(config).update(changes)
    return WrappedTorchNorm(config=config, hidden_size=8, eps=1e-5), config

def refused(**changes):
    try:
        build(**changes)
    except AssertionError:
        return True
    return False

assert refused(sequence_parallel=True)
wheel_fixes.apply()
wheel_fixes.apply()
norm, config = build(sequence_parallel=True)
assert all(p.sequence_parallel for p in norm.parameters()) and list(norm.parameters())
assert config.sequence_parallel is True
assert refused(sequence_parallel=True, persist_layer_norm=True)
norm, _ = build()
assert not any(hasattr(p, "sequence_parallel") for p in norm.parameters())
"""

_HELPERS = """
from pathlib import Path
from megatron.core.datasets import utils
from megatron_ce_adaptor.megatron import wheel_fixes

original = utils.compile_helpers
assert not Path(utils.__file__).with_name("Makefile").exists()
wheel_fixes.apply()
utils.compile_helpers()  # the original would exit the process here

utils.compile_helpers = original
utils.__file__ = "CHECKOUT/utils.py"
wheel_fixes.apply()
assert utils.compile_helpers is original
"""


def test_the_norm_allows_sequence_parallelism_and_keeps_its_other_checks() -> None:
    done = run_python("-c", _NORMS, timeout=120)
    assert done.status == 0, done.log


def test_compile_helpers_is_replaced_only_where_there_is_no_makefile(tmp_path) -> None:
    (tmp_path / "Makefile").write_text("default:\n")
    done = run_python("-c", _HELPERS.replace("CHECKOUT", str(tmp_path)), timeout=120)
    assert done.status == 0, done.log
