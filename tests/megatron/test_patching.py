"""What is patched, in which order of imports, next to which other packages, and how it is undone."""

from __future__ import annotations

import importlib
import sys
import threading
import types
import warnings

import pytest
import torch

from megatron_ce_adaptor.megatron import (
    apply_patches,
    import_hook,
    install_import_hook,
    patch_status,
    remove_patches,
)
from megatron_ce_adaptor.megatron.call_counter import call_counts
from megatron_ce_adaptor.megatron.patching import PatchError, PatchWarning, TargetState

TE = "megatron.core.extensions.transformer_engine"
LANGUAGE_MODULE = "megatron.core.models.common.language_module.language_module"
FUSED = "megatron.core.fusions.fused_cross_entropy"
UNFUSED = "megatron.core.tensor_parallel.cross_entropy"
ARGUMENTS = "megatron.training.arguments"
CONFIG = "megatron.core.model_parallel_config"
TE_NAME = "te_parallel_cross_entropy"
ALL_MODULES = (TE, LANGUAGE_MODULE, FUSED, UNFUSED, ARGUMENTS, CONFIG)


def import_all():
    return {name: importlib.import_module(name) for name in ALL_MODULES}


def logits_and_labels(s=3, b=2, v=11):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(s, b, v, generator=generator)
    return logits, torch.randint(0, v, (s, b), generator=generator)


def assert_te_is_ours(language_module):
    """The loss that LanguageModule computes with te, counted and equal to dense cross entropy."""
    logits, labels = logits_and_labels()
    before = call_counts()
    loss = language_module.loss("te", logits, labels)
    dense = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
    torch.testing.assert_close(loss, dense.view(labels.shape), rtol=0, atol=1e-6)
    assert loss.dtype == torch.float32
    assert call_counts()["te"] == before["te"] + 1


# ----------------------------------------------------------------------------- order of imports


@pytest.mark.parametrize("te", [False, True], ids=["te absent", "te present"])
@pytest.mark.parametrize("version", ["0.16.1", "0.17.1", "0.18.0", "0.18.2", "0.19.1", "0.20.0rc0+abc"])
@pytest.mark.parametrize("first", ["adaptor", "megatron"])
def test_both_names_are_patched_whichever_package_is_imported_first(fake_megatron, first, version, te):
    # HAZARDS 15
    fake_megatron(version, te=te)
    if first == "adaptor":
        install_import_hook()
        modules = import_all()
    else:
        modules = import_all()
        assert patch_status()[f"{TE}.{TE_NAME}"].state is TargetState.NOT_APPLIED
        install_import_hook()
    language_module = modules[LANGUAGE_MODULE]
    assert language_module.te_parallel_cross_entropy is modules[TE].te_parallel_cross_entropy
    assert_te_is_ours(language_module)
    status = patch_status()
    assert status.megatron_version == version
    assert status[f"{TE}.{TE_NAME}"].state is TargetState.APPLIED
    assert status[f"{LANGUAGE_MODULE}.{TE_NAME}"].state is TargetState.APPLIED


def test_targets_wait_for_their_import(fake_megatron):
    fake_megatron()
    status = apply_patches()
    assert {target.state for target in status.targets} == {TargetState.WAITING}
    assert status.ok
    importlib.import_module(FUSED)
    applied = [t.target for t in patch_status().targets if t.state is TargetState.APPLIED]
    assert applied == [
        f"{FUSED}.fused_vocab_parallel_cross_entropy",
        f"{UNFUSED}.vocab_parallel_cross_entropy",
    ]


def test_language_module_is_patched_where_the_te_extension_cannot_be_imported(fake_megatron):
    # Megatron swallows whatever that import raises, and binds None
    fake_megatron(extra={TE: "raise OSError('a shared library is missing')\n"})
    install_import_hook()
    language_module = importlib.import_module(LANGUAGE_MODULE)
    assert_te_is_ours(language_module)
    assert patch_status()[f"{TE}.{TE_NAME}"].state is TargetState.WAITING


def test_adaptor_imported_in_the_middle_of_megatrons_import(fake_megatron):
    begin = "from megatron_ce_adaptor.megatron import install_import_hook\ninstall_import_hook()\n"
    fake_megatron(extra={TE: f"te_parallel_cross_entropy = None\n{begin}"})
    language_module = importlib.import_module(LANGUAGE_MODULE)
    importlib.import_module("colorsys")  # any later import
    assert_te_is_ours(language_module)
    assert sys.modules[TE].te_parallel_cross_entropy is language_module.te_parallel_cross_entropy


def test_a_module_loaded_past_the_hook_is_patched_at_the_next_import(fake_megatron):
    class Impatient:
        """A finder in front of ours that does not ask the others."""

        @staticmethod
        def find_spec(name, path=None, target=None):
            from importlib.machinery import PathFinder

            return PathFinder.find_spec(name, path, target) if name.startswith("megatron.core.ext") else None

    fake_megatron()
    install_import_hook()
    sys.meta_path.insert(0, Impatient)
    try:
        te = importlib.import_module(TE)
    finally:
        sys.meta_path.remove(Impatient)
    assert te.te_parallel_cross_entropy is None
    language_module = importlib.import_module(LANGUAGE_MODULE)
    assert te.te_parallel_cross_entropy is language_module.te_parallel_cross_entropy is not None
    assert_te_is_ours(language_module)


def test_a_module_loaded_past_the_hook_is_patched_whatever_is_imported_next(fake_megatron, monkeypatch):
    fake_megatron("0.18.2", refuses_te=True)
    install_import_hook()
    importlib.import_module(LANGUAGE_MODULE)
    with monkeypatch.context() as past:
        past.setattr(
            sys, "meta_path", [finder for finder in sys.meta_path if finder is not import_hook._finder]
        )
        arguments = importlib.import_module(ARGUMENTS)
    assert not hasattr(arguments.validate_args, "__wrapped__")
    monkeypatch.delitem(sys.modules, "colorsys", raising=False)
    importlib.import_module("colorsys")
    assert hasattr(arguments.validate_args, "__wrapped__")


def test_two_hooks_of_our_kind_do_not_ask_each_other_forever(fake_megatron, monkeypatch):
    fake_megatron()
    other = import_hook.PatchingFinder()
    install_import_hook()
    monkeypatch.setattr(sys, "meta_path", [other, *sys.meta_path])
    assert_te_is_ours(importlib.import_module(LANGUAGE_MODULE))


def test_reload_is_patched_again(fake_megatron):
    fake_megatron(te=True, refuses_te=True)
    install_import_hook()
    modules = import_all()
    for name in (TE, LANGUAGE_MODULE, ARGUMENTS):
        importlib.reload(modules[name])
    assert_te_is_ours(modules[LANGUAGE_MODULE])
    validate_args(modules[ARGUMENTS])
    assert patch_status().ok
    removed = remove_patches()
    assert not any(target.detail for target in removed.targets)  # nothing was taken for another package's
    assert modules[TE].te_parallel_cross_entropy(0, 0, 0) == "transformer engine"
    assert modules[LANGUAGE_MODULE].loss("te", 0, 0) == "transformer engine"
    with pytest.raises(AssertionError, match="te is disabled"):
        validate_args(modules[ARGUMENTS])


def test_a_module_imported_anew_is_patched_again(fake_megatron):
    fake_megatron()
    install_import_hook()
    old = importlib.import_module(LANGUAGE_MODULE)
    del sys.modules[LANGUAGE_MODULE]
    new = importlib.import_module(LANGUAGE_MODULE)
    assert new is not old
    assert_te_is_ours(new)
    remove_patches()
    assert new.te_parallel_cross_entropy is None
    assert old.te_parallel_cross_entropy is None


def test_specs_and_loaders_look_as_without_the_hook(fake_megatron):
    fake_megatron()
    plain = importlib.import_module(TE)
    for name in [name for name in sys.modules if name.startswith("megatron.")]:
        del sys.modules[name]
    install_import_hook()
    found = importlib.util.find_spec(TE)
    assert TE not in sys.modules  # looking is not importing
    assert found.origin == plain.__spec__.origin
    assert found.loader.get_filename(TE) == plain.__file__
    assert "te_parallel_cross_entropy" in found.loader.get_source(TE)
    hooked = importlib.import_module(TE)
    assert hooked.te_parallel_cross_entropy is not None
    assert type(hooked.__loader__) is type(plain.__loader__)
    assert type(hooked.__spec__.loader) is type(plain.__loader__)
    assert importlib.util.find_spec("megatron.core.no_such_module") is None


def test_concurrent_imports_and_applications(fake_megatron):
    fake_megatron(te=True)
    install_import_hook()
    importlib.import_module("megatron.core")  # circular: Python itself gives up when threads race for it
    barrier = threading.Barrier(8)
    errors = []

    def work(name):
        try:
            barrier.wait()
            for _ in range(20):
                importlib.import_module(name)
                apply_patches()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(name,)) for name in (*ALL_MODULES, TE, LANGUAGE_MODULE)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
        assert not thread.is_alive(), "deadlock"
    assert not errors
    ours = sys.modules[TE].te_parallel_cross_entropy
    assert ours is sys.modules[LANGUAGE_MODULE].te_parallel_cross_entropy
    assert ours.__wrapped__(0, 0, 0) == "transformer engine"


# ---------------------------------------------------------------------- applying twice, removing


def test_second_application_changes_nothing(fake_megatron):
    fake_megatron(te=True, refuses_te=True)
    modules = import_all()
    original = modules[TE].te_parallel_cross_entropy
    apply_patches(strict=True)
    once = {name: dict(vars(module)) for name, module in modules.items()}
    apply_patches(strict=True)
    install_import_hook()
    assert {name: dict(vars(module)) for name, module in modules.items()} == once
    assert modules[TE].te_parallel_cross_entropy.__wrapped__ is original
    assert not hasattr(modules[ARGUMENTS].validate_args.__wrapped__, "__wrapped__")
    assert sum(isinstance(finder, import_hook.PatchingFinder) for finder in sys.meta_path) == 1


@pytest.mark.parametrize("te", [False, True])
def test_removal_restores_the_very_objects(fake_megatron, te):
    fake_megatron(te=te, refuses_te=True, config="asserts")
    modules = import_all()
    initialize = importlib.import_module("megatron.training.initialize")
    tensor_parallel = sys.modules["megatron.core.tensor_parallel"]

    def snapshot():
        names = {**modules, "initialize": initialize, "tensor_parallel": tensor_parallel}
        content = {
            (m, k): id(v) for m, module in names.items() for k, v in vars(module).items() if k[:2] != "__"
        }
        return content | {"post_init": id(modules[CONFIG].ModelParallelConfig.__post_init__)}

    before = snapshot()
    meta_path = list(sys.meta_path)
    apply_patches()
    during = snapshot()
    assert len({key for key in before if before[key] != during[key]}) == 9
    status = remove_patches()
    assert snapshot() == before
    assert sys.meta_path == meta_path
    assert {target.state for target in status.targets} == {TargetState.NOT_APPLIED}
    apply_patches()
    assert_te_is_ours(modules[LANGUAGE_MODULE])
    remove_patches()
    assert snapshot() == before


def test_removed_before_anything_is_imported(fake_megatron):
    fake_megatron()
    install_import_hook()
    remove_patches()
    assert importlib.import_module(TE).te_parallel_cross_entropy is None


def test_a_kept_reference_to_ours_calls_the_original_after_removal(fake_megatron):
    fake_megatron(te=True)
    install_import_hook()
    kept = importlib.import_module(TE).te_parallel_cross_entropy
    remove_patches()
    assert kept(0, 0, 0) == "transformer engine"


def test_a_kept_reference_to_ours_says_why_there_is_no_original(fake_megatron):
    fake_megatron()
    install_import_hook()
    kept = importlib.import_module(TE).te_parallel_cross_entropy
    assert list(kept.__signature__.parameters) == ["logits", "labels", "tp_group", "is_cg_capturable"]
    remove_patches()
    with pytest.raises(RuntimeError, match=r"after remove_patches.*native"):
        kept(*logits_and_labels(), None)


# --------------------------------------------------------------------------- names bound by value


@pytest.mark.parametrize("te", [False, True])
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_third_module_that_bound_the_name_is_rebound(fake_megatron, monkeypatch, when, te):
    fake_megatron(te=te)
    third = types.ModuleType("third")
    monkeypatch.setitem(sys.modules, "third", third)
    binding = f"from {TE} import te_parallel_cross_entropy"
    if te:
        binding += f"\nfrom {TE} import te_parallel_cross_entropy as alias"
    binding += f"\nfrom {FUSED} import fused_vocab_parallel_cross_entropy as _fused\nnothing = None"
    if when == "after":
        install_import_hook()
    exec(binding, third.__dict__)
    original = third._fused.__wrapped__ if when == "after" else third._fused
    install_import_hook()
    ours = sys.modules[TE].te_parallel_cross_entropy
    assert third.te_parallel_cross_entropy is ours is not None
    assert third._fused.__wrapped__ is original
    assert third.nothing is None
    if te:
        assert third.alias is ours
    rebound = patch_status()[f"{TE}.{TE_NAME}"].rebound
    assert ("third.te_parallel_cross_entropy" in rebound) == (when == "before")
    remove_patches()
    assert third._fused is original
    assert (third.te_parallel_cross_entropy is None) == (not te)


def test_names_imported_by_value_reach_the_wrapped_validate_args(fake_megatron):
    fake_megatron("0.18.2", refuses_te=True)
    initialize = importlib.import_module("megatron.training.initialize")
    install_import_hook()
    assert initialize.validate_args is sys.modules[ARGUMENTS].validate_args
    assert hasattr(initialize.validate_args, "__wrapped__")


def test_scanning_imports_nothing(fake_megatron, monkeypatch, tmp_path):
    class Lazy(types.ModuleType):
        def __getattr__(self, name):
            raise AssertionError(f"looked up {name}")

    (tmp_path / "postponed.py").write_text("raise AssertionError('loaded')")
    spec = importlib.util.spec_from_file_location("postponed", tmp_path / "postponed.py")
    spec.loader = importlib.util.LazyLoader(spec.loader)
    postponed = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(postponed)
    monkeypatch.setitem(sys.modules, "postponed", postponed)
    monkeypatch.setitem(sys.modules, "lazy", Lazy("lazy"))
    monkeypatch.setitem(sys.modules, "no_module", object())
    monkeypatch.setitem(sys.modules, "blocked", None)
    fake_megatron(te=True)
    import_all()
    apply_patches(strict=True)
    remove_patches()


def test_our_own_modules_keep_their_functions(fake_megatron):
    from megatron_ce_adaptor.megatron import replacements

    function = replacements.te_parallel_cross_entropy
    fake_megatron(te=True)
    import_all()
    apply_patches()
    remove_patches()
    assert replacements.te_parallel_cross_entropy is function


# ------------------------------------------------------------------------ versions, missing names


def test_a_missing_target_is_loud(fake_megatron):
    fake_megatron(without=(TE_NAME,))
    install_import_hook()
    with pytest.warns(PatchWarning, match=f"{TE}.{TE_NAME} is missing .*megatron-core 0.18.0") as caught:
        import_all()
    assert [w for w in caught if issubclass(w.category, PatchWarning)].__len__() == 1
    assert not patch_status().ok
    assert patch_status()[f"{TE}.{TE_NAME}"].state is TargetState.MISSING
    with pytest.raises(PatchError, match="te_parallel_cross_entropy is missing"), warnings.catch_warnings():
        warnings.simplefilter("error")
        apply_patches(strict=True)


def test_a_missing_target_is_loud_with_megatron_imported_first(fake_megatron):
    fake_megatron(without=("fused_vocab_parallel_cross_entropy",), extra={
        FUSED: "fused_vocab_parallel_cross_entropy = 3\n"
    })  # fmt: skip
    import_all()
    with pytest.warns(
        PatchWarning, match="fused_vocab_parallel_cross_entropy is missing .*3, not a function"
    ):
        apply_patches()


@pytest.mark.parametrize("version", ["0.11.0", "0.20.0"])
def test_a_name_that_this_version_need_not_have_is_no_problem(fake_megatron, version):
    # required: "<0.20" for LanguageModule's name; below 0.12 nothing is declared
    fake_megatron(version, extra={LANGUAGE_MODULE: "del te_parallel_cross_entropy\n"})
    install_import_hook()
    with warnings.catch_warnings():
        warnings.simplefilter("error", PatchWarning)
        import_all()
    status = patch_status()[f"{LANGUAGE_MODULE}.{TE_NAME}"]
    assert status.state is TargetState.NOT_NEEDED
    assert patch_status().ok


def test_outside_the_version_range_nothing_is_touched(fake_megatron):
    fake_megatron("0.11.0", te=True)
    install_import_hook()
    modules = import_all()
    assert modules[TE].te_parallel_cross_entropy(0, 0, 0) == "transformer engine"
    assert "0.11.0 is not in" in patch_status()[f"{TE}.{TE_NAME}"].detail


@pytest.mark.parametrize("version", [None, "unreleased"])
def test_without_a_readable_version_the_names_decide(fake_megatron, version):
    fake_megatron(version, te=True)
    install_import_hook()
    modules = import_all()
    assert_te_is_ours(modules[LANGUAGE_MODULE])
    status = patch_status()
    assert status.megatron_version == version
    assert "version of megatron-core unknown" in status[f"{TE}.{TE_NAME}"].detail


def test_status_reads_well(fake_megatron):
    fake_megatron("0.18.2", refuses_te=True)
    install_import_hook()
    importlib.import_module(LANGUAGE_MODULE)
    lines = str(patch_status()).splitlines()
    assert lines[0] == "megatron-core 0.18.2"
    assert f"  {TE}.{TE_NAME}: applied" in lines
    assert f"  {ARGUMENTS}.validate_args: waiting for import" in lines
    with pytest.raises(KeyError):
        patch_status()["megatron.core.no.such.target"]


# --------------------------------------------------------------------------------- other packages


def test_another_packages_replacement_on_top_is_reported_and_kept(fake_megatron):
    fake_megatron(te=True)
    modules = import_all()
    apply_patches()

    def theirs(*args):
        return "theirs"

    modules[LANGUAGE_MODULE].te_parallel_cross_entropy = theirs
    status = patch_status()[f"{LANGUAGE_MODULE}.{TE_NAME}"]
    assert status.state is TargetState.TAKEN_OVER
    assert "theirs" in status.detail
    with pytest.warns(PatchWarning, match="taken over by another package .*theirs"):
        apply_patches()
    with pytest.raises(PatchError, match="taken over"):
        apply_patches(strict=True)
    assert modules[LANGUAGE_MODULE].te_parallel_cross_entropy is theirs
    removed = remove_patches()
    assert modules[LANGUAGE_MODULE].te_parallel_cross_entropy is theirs
    assert "left in place" in removed[f"{LANGUAGE_MODULE}.{TE_NAME}"].detail
    assert modules[TE].te_parallel_cross_entropy(0, 0, 0) == "transformer engine"


def test_another_packages_wrapper_around_ours_counts_as_applied(fake_megatron):
    fake_megatron(te=True)
    modules = import_all()
    apply_patches()
    inner = modules[LANGUAGE_MODULE].te_parallel_cross_entropy

    def wrapper(*args):
        return inner(*args)

    wrapper.__wrapped__ = inner
    modules[LANGUAGE_MODULE].te_parallel_cross_entropy = wrapper
    status = apply_patches(strict=True)[f"{LANGUAGE_MODULE}.{TE_NAME}"]
    assert status.state is TargetState.APPLIED
    assert "called through" in status.detail
    assert_te_is_ours(modules[LANGUAGE_MODULE])
    remove_patches()
    assert modules[LANGUAGE_MODULE].te_parallel_cross_entropy is wrapper
    assert wrapper(0, 0, 0) == "transformer engine"  # ours, inside, has stepped aside


class PatchManager:
    """How MindSpeed and MegatronAdaptor patch: remember the original, later replace it by identity."""

    def __init__(self, module, name, new=None, wrapper=None):
        self.module, self.name = sys.modules[module], name
        self.original = getattr(self.module, name)
        self.new = wrapper(self.original) if wrapper else new

    def apply(self):
        setattr(self.module, self.name, self.new)
        for module in list(sys.modules.values()):
            namespace = getattr(module, "__dict__", {})
            if self.name in namespace and namespace[self.name] is self.original:
                setattr(module, self.name, self.new)


def their_validate_args_wrapper(original):
    def validate_args(args, *defaults):
        args.seen_by_them = True
        return original(args, *defaults)

    return validate_args


def validate_args(arguments, **named):
    settings = {
        "cross_entropy_loss_fusion": True,
        "cross_entropy_fusion_impl": "te",
        "deterministic_mode": False,
    }
    args = types.SimpleNamespace(**settings | named)
    arguments.validate_args(args)
    return args


def test_a_patch_manager_that_applied_before_us(fake_megatron):
    fake_megatron("0.18.3", te=True, refuses_te=True)
    modules = import_all()
    PatchManager(TE, TE_NAME, new=lambda *args: "theirs").apply()
    PatchManager(ARGUMENTS, "validate_args", wrapper=their_validate_args_wrapper).apply()
    install_import_hook()
    assert_te_is_ours(modules[LANGUAGE_MODULE])
    assert validate_args(modules[ARGUMENTS]).seen_by_them
    remove_patches()
    assert modules[LANGUAGE_MODULE].loss("te", 0, 0) == "theirs"


def test_a_patch_manager_that_applies_after_us(fake_megatron):
    fake_megatron("0.18.3", refuses_te=True)
    install_import_hook()
    modules = import_all()
    PatchManager(ARGUMENTS, "validate_args", wrapper=their_validate_args_wrapper).apply()
    assert validate_args(modules[ARGUMENTS]).seen_by_them
    PatchManager(TE, TE_NAME, new=lambda *args: "theirs").apply()
    assert patch_status()[f"{TE}.{TE_NAME}"].state is TargetState.TAKEN_OVER
    assert patch_status()[f"{LANGUAGE_MODULE}.{TE_NAME}"].state is TargetState.TAKEN_OVER
    remove_patches()
    assert modules[LANGUAGE_MODULE].loss("te", 0, 0) == "theirs"
    with pytest.raises(AssertionError, match="te is disabled"):
        validate_args(modules[ARGUMENTS])


def test_a_patch_manager_that_remembered_before_us_and_applies_after_us(fake_megatron):
    fake_megatron("0.18.3", refuses_te=True)
    modules = import_all()
    late = PatchManager(ARGUMENTS, "validate_args", wrapper=their_validate_args_wrapper)
    install_import_hook()
    late.apply()
    assert patch_status()[f"{ARGUMENTS}.validate_args"].state is TargetState.TAKEN_OVER
    with pytest.raises(AssertionError, match="te is disabled"):
        validate_args(modules[ARGUMENTS])
    assert apply_patches(strict=True)[f"{ARGUMENTS}.validate_args"].state is TargetState.APPLIED
    args = validate_args(modules[ARGUMENTS])
    assert args.seen_by_them
    assert args.cross_entropy_fusion_impl == "te"
    remove_patches()
    assert modules[ARGUMENTS].validate_args is late.new


def test_a_faked_transformer_engine_version_makes_no_difference(fake_megatron, monkeypatch):
    engine = types.ModuleType("transformer_engine")
    engine.__version__ = "2.2.0"
    monkeypatch.setitem(sys.modules, "transformer_engine", engine)
    fake_megatron(te=True)
    install_import_hook()
    assert_te_is_ours(importlib.import_module(LANGUAGE_MODULE))
    assert vars(engine)["__version__"] == "2.2.0"
