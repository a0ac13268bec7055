"""``import megatron_ce_adaptor`` in fresh interpreters: what it does to Megatron, and what it costs."""

from __future__ import annotations

import json

import pytest
from fake_megatron import build_fake_megatron
from interpreters import start_python

# A module's loading is counted where it is executed: executed twice, it would keep two counters of calls.
LOOK = """
import collections, json, sys
from importlib.machinery import PathFinder
executed = collections.Counter()

class Count:
    @staticmethod
    def find_spec(name, path=None, target=None):
        spec = PathFinder.find_spec(name, path, target) if name.startswith("megatron_ce_adaptor") else None
        if spec is not None and hasattr(spec.loader, "exec_module"):
            execute = spec.loader.exec_module
            spec.loader.exec_module = lambda module: (executed.update([name]), execute(module))
        return spec

sys.meta_path.insert(0, Count)
MEGATRON = "import megatron.training.initialize, megatron.core.models.common.language_module.language_module"
"""
REPORT = """
from megatron.core.models.common.language_module import language_module
from megatron.core.extensions import transformer_engine
from megatron_ce_adaptor import patch_status
from megatron_ce_adaptor.megatron.call_counter import call_counts
import torch
calls = None
if language_module.te_parallel_cross_entropy is not None:
    language_module.loss("te", torch.randn(2, 1, 5), torch.zeros(2, 1, dtype=torch.long))
    calls = call_counts()
print(json.dumps({
    "same": language_module.te_parallel_cross_entropy is transformer_engine.te_parallel_cross_entropy,
    "calls": calls,
    "states": {target.target.rpartition(".")[2]: target.state.value for target in patch_status().targets},
    "executed twice": [name for name, times in executed.items() if times > 1],
    "executed": len(executed),
}), file=sys.stderr)
"""


@pytest.fixture
def look(tmp_path):
    def run(*lines: str, **variables: str):
        root = build_fake_megatron(tmp_path / "fake", "0.18.2", refuses_te=True)
        result = start_python(LOOK + "\n".join(lines) + REPORT, tmp_path, root, **variables)
        assert result.returncode == 0, result.stderr
        return json.loads(result.stderr.splitlines()[-1])

    return run


@pytest.mark.parametrize("order", [["import megatron_ce_adaptor", "exec(MEGATRON)"], ["exec(MEGATRON)", "import megatron_ce_adaptor"]])  # fmt: skip  # noqa: E501
def test_the_import_alone_patches_in_either_order(look, order):
    # HAZARDS 15
    report = look(*order)
    assert report["same"]
    assert report["calls"] == {"te": 1, "native": 0}
    assert report["states"]["te_parallel_cross_entropy"] == "applied"
    assert report["states"]["validate_args"] == "applied"
    assert report["executed"] > 5
    assert report["executed twice"] == []


def test_auto_patch_0_patches_nothing(look):
    report = look("exec(MEGATRON)", "import megatron_ce_adaptor", MCE_AUTO_PATCH="0")
    assert report["calls"] is None
    assert set(report["states"].values()) == {"not applied"}


def test_the_import_loads_next_to_nothing(tmp_path):
    program = """
import sys
before = set(sys.modules)
import megatron_ce_adaptor
assert sys.meta_path[0].__class__.__name__ == "PatchingFinder"
print(*sorted(name for name in set(sys.modules) - before if not name.startswith("megatron_ce_adaptor")))
"""
    result = start_python(program, tmp_path, options=("-S",))
    assert result.returncode == 0, result.stderr
    loaded = set(result.stdout.split())
    assert not loaded & {
        "torch",
        "megatron",
        "yaml",
        "packaging",
        "numpy",
        "inspect",
        "dataclasses",
        "importlib.metadata",
    }
    assert len(loaded) < 40  # what typing needs, at most: a few milliseconds
