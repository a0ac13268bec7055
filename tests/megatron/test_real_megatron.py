"""The patches on real Megatron-Core wheels: the names exist, te runs our kernel, only te's refusal is lifted.

The installed megatron-core is tested as it is. Other versions are read from the folder that the environment
variable MCE_MEGATRON_WHEELS names, with one unpacked wheel under ``<version>/`` each.
"""

from __future__ import annotations

import ast
import importlib.metadata
import json
import os
from pathlib import Path

import pytest
from interpreters import start_python

from megatron_ce_adaptor.megatron.patch_specs import load_patch_specs, version_in

PROGRAM = Path(__file__).with_name("real_megatron_program.py")
UNPACKED = ("0.16.1", "0.17.1", "0.18.2", "0.19.0")
REFUSING = ("0.18.2", "0.19.0")
WITHOUT_TRAINING = ("0.16.1",)  # the wheel holds megatron.core alone
NO_TE = "Trying to use a TE block when it's not present."


def installed_version() -> str:
    try:
        return importlib.metadata.version("megatron-core")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("megatron-core is not installed")


def wheel(version: str) -> Path:
    """The folder that holds ``megatron/`` of this version."""
    if version == "installed":
        files = importlib.metadata.files("megatron-core") if installed_version() else None
        marker = next(path for path in files or () if str(path) == "megatron/core/package_info.py")
        return Path(str(marker.locate())).parents[2]
    folder = os.environ.get("MCE_MEGATRON_WHEELS")
    if not folder:
        pytest.skip(
            f"MCE_MEGATRON_WHEELS is not set: it names a folder with megatron-core {version} unpacked"
        )
    path = Path(folder) / version
    assert (path / "megatron" / "core").is_dir(), (
        f"MCE_MEGATRON_WHEELS={folder} holds no {version}/megatron/core"
    )
    return path


def names_of(source: Path) -> set[str]:
    """Dotted names that a module defines, in whatever branch of an ``if`` or ``try``."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(source.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ClassDef):
            names |= {f"{node.name}.{item.name}" for item in node.body if isinstance(item, ast.FunctionDef)}
        elif isinstance(node, ast.FunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.ImportFrom):
            names |= {alias.asname or alias.name for alias in node.names}
    return names


@pytest.mark.parametrize("version", ["installed", *UNPACKED])
def test_every_target_in_range_exists(version):
    root = wheel(version)
    number = installed_version() if version == "installed" else version
    looked_up = 0
    for spec in load_patch_specs():
        if version in WITHOUT_TRAINING and spec.module.startswith("megatron.training"):
            continue
        if spec.required is not None and version_in(number, spec.required):
            source = root.joinpath(*spec.module.split(".")).with_suffix(".py")
            assert ".".join(spec.attribute) in names_of(source), f"{spec.file} in {number}"
            looked_up += 1
    assert looked_up >= 4


@pytest.mark.slow
@pytest.mark.parametrize(
    ("version", "order"),
    [
        ("installed", "adaptor_first"),
        ("0.16.1", "adaptor_first"),
        ("0.17.1", "megatron_first"),
        ("0.18.2", "megatron_first"),
        ("0.19.0", "adaptor_first"),
    ],
)
def test_te_on_a_real_megatron(tmp_path, version, order):
    # HAZARDS 12, 15, 16
    number = installed_version() if version == "installed" else version
    result = start_python(
        f"import sys, runpy; sys.argv = ['', {order!r}]; runpy.run_path({str(PROGRAM)!r})",
        tmp_path,
        wheel(version),
        RANK="0",
        WORLD_SIZE="1",
        TORCHDYNAMO_DISABLE="1",  # Megatron's jit fuser compiles for half a minute
        CUDA_VISIBLE_DEVICES="",
    )
    lines = [line for line in result.stdout.splitlines() if line.startswith("REPORT ")]
    assert len(lines) == 1, result.stdout + result.stderr
    report = json.loads(lines[0].removeprefix("REPORT "))
    # A wheel that lies in some repository's work tree takes that repository's commit for its own
    assert report["version"].partition("+")[0] == number

    states = {name.rpartition(".")[2]: state for name, state in report["status"].items()}
    for name in (
        "te_parallel_cross_entropy",
        "fused_vocab_parallel_cross_entropy",
        "vocab_parallel_cross_entropy",
    ):
        assert states[name] == "applied"
    assert report["calls after te"] == {"te": 1, "native": 0}
    assert report["calls"] == {"te": 2, "native": 2}
    assert result.stdout.endswith(
        "[rank 0] cross entropy: te 2 calls, native 2 calls, implementation reference\n"
    )
    assert report["finite with label -1 masked"]
    assert report["dtype"] == "torch.float32"
    for kind, difference in report["difference to native"].items():
        assert difference["total"] < 1e-5, kind
        assert difference["loss"] < 1e-5, kind
        # Megatron's fused path rounds its gradient to bf16, for fp32 logits too
        assert difference["gradient"] < (5e-3 if kind == "fused" else 1e-5), kind
    assert report["te after removal"] == NO_TE

    if version in WITHOUT_TRAINING:
        assert states["validate_args"] == "waiting for import"
        return
    refuses = version in REFUSING
    assert states["validate_args"] == ("applied" if refuses else "not needed in this version")
    assert report["arguments"] == "accepted te"
    assert report["native arguments"] == "accepted native"
    assert report["deterministic arguments"].startswith("refused: ")
    assert "disabled due to stability" not in report["deterministic arguments"]
    without = ["arguments after removal"]
    if order == "megatron_first":
        assert report["te without the adaptor"] == NO_TE
        without.append("arguments without the adaptor")
    for key in without:
        if refuses:
            assert report[key].startswith(
                "refused: Transformer Engine cross entropy loss fusion is disabled"
            ), key
        else:
            assert report[key] == "accepted te", key
