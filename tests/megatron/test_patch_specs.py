"""The declarations in patches/*.yaml: those that ship, and what is said about a bad one."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

from megatron_ce_adaptor.megatron import patch_specs
from megatron_ce_adaptor.megatron.patch_specs import PatchFileError, load_patch_specs, patch_directory

GOOD = """
target: megatron.training.arguments.validate_args
kind: wrap
replacement: megatron_ce_adaptor.megatron.replacements.allow_te_in_validate_args
version: ">=0.17"
required: true
why: it refuses te
"""


def load(tmp_path: Path, text: str):
    (tmp_path / "one.yaml").write_text(text, encoding="utf-8")
    return load_patch_specs(tmp_path)


def test_shipped_declarations_name_what_exists_here():
    specs = load_patch_specs()
    assert {
        "megatron.core.extensions.transformer_engine.te_parallel_cross_entropy",
        "megatron.core.models.common.language_module.language_module.te_parallel_cross_entropy",
        "megatron.training.arguments.validate_args",
    } <= {spec.target for spec in specs}
    for spec in specs:
        module, _, name = spec.replacement.rpartition(".")
        assert callable(getattr(importlib.import_module(module), name)), spec.file
        assert spec.why


def test_declarations_of_a_wheel_come_before_those_of_a_checkout(tmp_path, monkeypatch):
    package = tmp_path / "megatron_ce_adaptor"
    monkeypatch.setattr(patch_specs, "__file__", str(package / "megatron" / "patch_specs.py"))
    (package / "megatron").mkdir(parents=True)
    with pytest.raises(PatchFileError, match=r"no patch declarations .* reinstall"):
        patch_directory()
    for folder in (tmp_path / "patches", package / "patches"):
        folder.mkdir()
        (folder / "one.yaml").write_text(GOOD)
        assert patch_directory() == folder


def test_fields(tmp_path):
    (spec,) = load(tmp_path, GOOD)
    assert (spec.module, spec.attribute) == ("megatron.training.arguments", ("validate_args",))
    assert (spec.kind, spec.version, spec.required, spec.file) == ("wrap", ">=0.17", ">=0.17", "one.yaml")
    (method,) = load(tmp_path, GOOD.replace("arguments.validate_args", "config.Config.__post_init__"))
    assert (method.module, method.attribute) == ("megatron.training.config", ("Config", "__post_init__"))
    (optional,) = load(tmp_path, GOOD.replace("true", "false"))
    assert optional.required is None
    (ranged,) = load(tmp_path, GOOD.replace("true", '"<0.20"'))
    assert ranged.required == "<0.20"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [", "one.yaml: cannot be read as YAML"),
        ("- a list", "one.yaml: expected a mapping"),
        ("", "one.yaml: expected a mapping"),
        (GOOD + "extra: 1", "one.yaml: unknown key 'extra'"),
        (GOOD.replace("kind: wrap", ""), "one.yaml: key 'kind' is missing"),
        (GOOD.replace("wrap", "wrpa"), "one.yaml: kind must be one of replace, wrap, not 'wrpa'"),
        (GOOD.replace("it refuses te", ""), "one.yaml: why must be a non-empty string"),
        (GOOD.replace('">=0.17"', "0.17"), "one.yaml: version must be a non-empty string, not 0.17"),
        (GOOD.replace('">=0.17"', '"0.17"'), "one.yaml: version must be a PEP 440 range"),
        (GOOD.replace("true", "maybe"), "one.yaml: required must be a PEP 440 range"),
        (GOOD.replace("true", "3"), "one.yaml: required must be true, false or a version range, not 3"),
        (
            GOOD.replace("target: megatron.", "target: torch."),
            "one.yaml: target must be .* starts with 'megatron'",
        ),
        (
            GOOD.replace("megatron.training.arguments.", "megatron.a-b."),
            "one.yaml: target must be a dotted name",
        ),
        (
            GOOD.replace("megatron_ce_adaptor.m", "os.m"),
            "one.yaml: replacement must be .*'megatron_ce_adaptor'",
        ),
    ],
)
def test_a_bad_declaration_is_named(tmp_path, text, message):
    with pytest.raises(PatchFileError, match=message):
        load(tmp_path, text)


def test_two_declarations_of_one_target(tmp_path):
    (tmp_path / "another.yaml").write_text(GOOD)
    with pytest.raises(
        PatchFileError, match=r"one.yaml: target .*validate_args is already declared in another"
    ):
        load(tmp_path, GOOD)


def test_no_declarations(tmp_path):
    with pytest.raises(PatchFileError, match="no patch declarations"):
        load_patch_specs(tmp_path)


def test_a_bad_declaration_stops_megatrons_import(fake_megatron, monkeypatch, tmp_path):
    from megatron_ce_adaptor.megatron import install_import_hook, patching

    fake_megatron()
    install_import_hook()
    (tmp_path / "one.yaml").write_text("kind: [")
    monkeypatch.setattr(patching, "_specs", None)
    with monkeypatch.context() as broken:
        broken.setattr(patch_specs, "patch_directory", lambda: tmp_path)
        with pytest.raises(PatchFileError, match=re.escape("one.yaml: cannot be read as YAML")):
            importlib.import_module("megatron.core")
