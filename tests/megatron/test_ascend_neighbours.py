"""MegatronAdaptor, TransformerEngineNPU and MindSpeed beside us, in every order that a script may import."""

from __future__ import annotations

import importlib
import json
import re
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from ascend_stack import NAMES, PREDICTED_LOGITS, build_ascend_stack
from fake_megatron import build_fake_megatron
from interpreters import start_python

from megatron_ce_adaptor.megatron import (
    apply_patches,
    install_import_hook,
    patch_status,
    pretrain,
    remove_patches,
)
from megatron_ce_adaptor.megatron.call_counter import call_counts
from megatron_ce_adaptor.megatron.patching import PatchWarning, TargetState

ARGUMENTS = "megatron.training.arguments"
INITIALIZE = "megatron.training.initialize"
LANGUAGE_MODULE = "megatron.core.models.common.language_module.language_module"
GPT_MODEL = "megatron.core.models.gpt.gpt_model"
EXTENSION = "megatron.core.extensions.transformer_engine"
NATIVE = "megatron.core.tensor_parallel.cross_entropy"

# Importing MindSpeed imports and patches Megatron, as the real one does.
STEPS: dict[str, Callable[[], object]] = {
    "ours": install_import_hook,
    "adaptor": lambda: importlib.import_module("megatron_adaptor"),
    "engine": lambda: importlib.import_module("transformer_engine.pytorch"),
    "mindspeed": lambda: importlib.import_module("mindspeed.megatron_adaptor"),
    "megatron": lambda: [
        importlib.import_module(name) for name in (INITIALIZE, LANGUAGE_MODULE, NATIVE, GPT_MODEL)
    ],
}
ORDERS = [
    "ours adaptor engine mindspeed megatron",
    "adaptor engine mindspeed ours megatron",
    "adaptor engine mindspeed megatron ours",
    "adaptor ours mindspeed engine megatron",
    "megatron ours mindspeed engine adaptor",
    "megatron adaptor engine mindspeed ours",
]


@pytest.fixture
def stack(
    fake_megatron: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[str], None]]:
    """Imports the stand-ins and a Megatron that refuses te, in the order given; forgets them afterwards."""
    before = {name: module for name, module in sys.modules.items() if name.partition(".")[0] in NAMES}
    for name in before:
        del sys.modules[name]

    def enter(order: str) -> None:
        fake_megatron("0.18.3", te=True, refuses_te=True, extra={NATIVE: PREDICTED_LOGITS})
        monkeypatch.syspath_prepend(build_ascend_stack(tmp_path / "stack"))
        importlib.invalidate_caches()
        for step in order.split():
            STEPS[step]()

    yield enter
    for name in [name for name in sys.modules if name.partition(".")[0] in NAMES]:
        del sys.modules[name]
    sys.modules.update(before)


def validate_args() -> types.SimpleNamespace:
    """What the name that Megatron's initialize bound by value does to arguments that ask for te."""
    args = types.SimpleNamespace(
        cross_entropy_loss_fusion=True, cross_entropy_fusion_impl="te", deterministic_mode=False
    )
    sys.modules[INITIALIZE].validate_args(args)
    return args


def assert_te_is_ours() -> None:
    logits, labels = torch.randn(3, 2, 11), torch.randint(0, 11, (3, 2))
    before = call_counts()["te"]
    loss = sys.modules[LANGUAGE_MODULE].loss("te", logits, labels)
    dense = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
    torch.testing.assert_close(loss, dense.view(3, 2), rtol=0, atol=1e-6)
    assert call_counts()["te"] == before + 1


@pytest.mark.parametrize("order", ORDERS)
def test_all_work_in_every_order(stack: Callable[[str], None], order: str) -> None:
    stack(order)
    assert_te_is_ours()
    args = validate_args()
    assert args.cross_entropy_fusion_impl == "te"
    assert args.seen_by_megatron_adaptor and args.seen_by_mindspeed
    assert sys.modules[NATIVE].VocabParallelCrossEntropy.calculate_predicted_logits() == "mindspeed"
    assert sys.modules["transformer_engine"].__version__ == "2.2.0"
    assert sys.modules["transformer_engine.pytorch"].parallel_cross_entropy() == "npu"
    status = patch_status()
    assert status.ok, status
    waiting = [t.target for t in status.targets if t.state is not TargetState.APPLIED]
    assert waiting == ["megatron.core.model_parallel_config.ModelParallelConfig.__post_init__"]


@pytest.mark.parametrize("order", ORDERS)
def test_their_registries_hold_only_their_own(stack: Callable[[str], None], order: str) -> None:
    stack(order)
    theirs = {
        "mindspeed.patch_utils": {f"{ARGUMENTS}.validate_args", f"{NATIVE}.VocabParallelCrossEntropy"},
        "megatron_adaptor.patch_manager": {f"{ARGUMENTS}.validate_args"},
    }
    for module, expected in theirs.items():
        names = {
            re.sub(r"\.calculate_predicted_logits$", "", name) for name in sys.modules[module].patches_info
        }
        assert names == expected
        functions = [
            f for p in sys.modules[module].patches_info.values() for f in (p.replacement, *p.wrappers)
        ]
        assert not [f for f in functions if f is not None and f.__module__.startswith("megatron_ce_adaptor")]


@pytest.mark.parametrize("order", ORDERS)
def test_after_our_removal_theirs_is_what_is_left(stack: Callable[[str], None], order: str) -> None:
    stack(order)
    remove_patches()
    with pytest.raises(AssertionError, match="te is disabled"):
        validate_args()
    assert sys.modules[EXTENSION].te_parallel_cross_entropy(0, 0, 0) == "transformer engine"
    assert sys.modules[NATIVE].VocabParallelCrossEntropy.calculate_predicted_logits() == "mindspeed"


@pytest.mark.parametrize(
    "order", ["ours mindspeed megatron", "mindspeed megatron ours", "megatron ours mindspeed"]
)
def test_mindspeeds_repatch_keeps_us_or_is_told(stack: Callable[[str], None], order: str) -> None:
    """repatch() puts back the original of its first application, so what came on top later is lost."""
    stack(order)
    sys.modules["mindspeed.patch_utils"].repatch()
    assert_te_is_ours()
    target = f"{ARGUMENTS}.validate_args"
    if order.endswith("ours"):
        assert patch_status()[target].state is TargetState.TAKEN_OVER
        assert "call apply_patches()" in patch_status()[target].detail
    apply_patches(strict=True)
    args = validate_args()
    assert args.cross_entropy_fusion_impl == "te" and args.seen_by_mindspeed


def test_a_replacement_of_te_by_them_is_theirs_and_told(stack: Callable[[str], None]) -> None:
    """If the stack one day brings its own te: whoever comes last has it, and both are told."""
    stack("ours adaptor engine mindspeed megatron")
    manager = sys.modules["mindspeed.patch_utils"]

    def te_parallel_cross_entropy(*logits: object) -> str:
        return "npu"

    target = f"{EXTENSION}.te_parallel_cross_entropy"
    manager.register_patch(target, te_parallel_cross_entropy)
    with pytest.raises(RuntimeError, match="exist"):  # a second replacement in their registry raises
        manager.register_patch(target, lambda *logits: "another")
    manager.apply_patches()
    assert sys.modules[LANGUAGE_MODULE].loss("te", 0, 0) == "npu"
    with pytest.warns(PatchWarning, match="taken over by another package"):
        apply_patches()
    assert not patch_status().ok
    # Where ours comes after theirs, ours computes.
    remove_patches()
    assert sys.modules[LANGUAGE_MODULE].loss("te", 0, 0) == "npu"
    apply_patches(strict=True)
    assert_te_is_ours()


def test_neighbours_are_named_from_what_is_imported(stack: Callable[[str], None]) -> None:
    from megatron_ce_adaptor.megatron import neighbours

    stack("ours adaptor engine mindspeed megatron")
    assert set(neighbours.active()) == {
        "megatron_adaptor",
        "transformer_engine",
        "mindspeed.megatron_adaptor",
    }
    owners = neighbours.owners()
    assert owners["te"].startswith("megatron_ce_adaptor")
    assert owners["native predicted logits"] == "mindspeed.megatron_adaptor"
    layers = owners["validate_args"].split(" over ")
    assert set(layers) == {"mindspeed.megatron_adaptor", "megatron_adaptor", "megatron_ce_adaptor", ARGUMENTS}
    assert layers[-1] == ARGUMENTS
    line = neighbours.report()
    assert json.loads(line.removeprefix(neighbours.LINE))["computed by"] == owners


@pytest.mark.parametrize(
    ("line", "adaptors"),
    [
        ("import megatron_adaptor", ["megatron_adaptor"]),
        ("import mindspeed.megatron_adaptor  # noqa", ["mindspeed.megatron_adaptor"]),
        ("from mindspeed import megatron_adaptor", ["mindspeed.megatron_adaptor"]),
        ("from mindspeed_llm import megatron_adaptor", ["mindspeed_llm.megatron_adaptor"]),
        (
            "import megatron_adaptor\nimport mindspeed.megatron_adaptor",
            ["megatron_adaptor", "mindspeed.megatron_adaptor"],
        ),
        ("# import mindspeed.megatron_adaptor", ["megatron_adaptor"]),  # none is named: what is installed
        ("import megatron_adaptor_tools", ["megatron_adaptor"]),
    ],
)
def test_the_scripts_adaptors_are_imported_before_megatron(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, adaptors: list[str]
) -> None:
    monkeypatch.syspath_prepend(build_ascend_stack(tmp_path / "stack"))
    script = tmp_path / "pretrain_gpt.py"
    script.write_text(f"import torch\n{line}\nfrom megatron.training import pretrain\n")
    assert pretrain.npu_adaptors(script) == adaptors
    assert pretrain.npu_adaptors(None) == ["megatron_adaptor"]


@pytest.mark.parametrize("named", [True, False])
def test_an_npu_is_prepared_with_the_scripts_adaptors(
    stack: Callable[[str], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: bool
) -> None:
    stack("ours")
    monkeypatch.setitem(sys.modules, "torch_npu", types.ModuleType("torch_npu"))
    script = tmp_path / "pretrain_gpt.py"
    script.write_text("import torch\n" + "import mindspeed.megatron_adaptor\n" * named)
    pretrain._prepare_npu(script)
    assert "megatron_adaptor" in sys.modules
    assert ("mindspeed.megatron_adaptor" in sys.modules) == named


def test_doctor_says_who_owns_what(tmp_path: Path) -> None:
    megatron = build_fake_megatron(
        tmp_path / "fake", "0.18.3", te=True, refuses_te=True, extra={NATIVE: PREDICTED_LOGITS}
    )
    stack = build_ascend_stack(tmp_path / "stack")
    imports = ["transformer_engine", "mindspeed.megatron_adaptor", "mindspeed.no_such_adaptor"]
    words = ["doctor", *(word for name in imports for word in ("--import", name))]
    program = f"import sys; from megatron_ce_adaptor.cli import main; sys.exit(main({words}))"
    done = start_python(program, tmp_path, stack, megatron)
    assert done.returncode == 1, done.stdout + done.stderr
    wrong = [line for line in done.stdout.splitlines() if line.startswith("!")]
    assert len(wrong) == 1 and "mindspeed.no_such_adaptor cannot be imported" in wrong[0]
    assert "beside Megatron: megatron_adaptor " in done.stdout
    assert "transformer_engine 2.2.0" in done.stdout
    assert "  te: megatron_ce_adaptor" in done.stdout
    assert "  native predicted logits: mindspeed.megatron_adaptor" in done.stdout


def test_no_warning_beside_the_whole_stack(stack: Callable[[str], None]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", PatchWarning)
        stack("adaptor engine mindspeed ours megatron")
