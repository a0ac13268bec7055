"""Writes stand-ins for MegatronAdaptor, TransformerEngineNPU and MindSpeed, which behave as the real ones do.

What is imitated was read in MindSpeed's branch core_r0.18.0 and tried with it: patches are registered by
dotted name and take effect at apply_patches(); names that end in wrapper or decorator stack up, others
replace, and a second replacement raises; the original is looked up at the first application only; applying
sets the name in every imported module whose attribute of that name is the same object; mindspeed imports
megatron_adaptor first; TransformerEngineNPU is the package transformer_engine, its version faked as 2.2.0.
"""

from __future__ import annotations

from pathlib import Path

PATCH_MANAGER = """
import importlib
import sys


class Patch:
    def __init__(self, target, new):
        self.module_name, self.name = target.rsplit(".", 1)
        self.holder = self.original = self.replacement = self.final = None
        self.wrappers = []
        self.applied = False
        self.add(new)

    def add(self, new):
        if new.__name__.endswith(("wrapper", "decorator")):
            self.wrappers.append(new)
        elif self.replacement is not None:
            raise RuntimeError("the patch of {} exist !".format(self.name))
        else:
            self.replacement = new
        self.applied = False

    def apply(self):
        if self.applied:
            return
        holder = self._holder()
        current = getattr(holder, self.name)
        if self.holder is None:
            self.holder, self.original = holder, current
        final = self.replacement or self.original
        for wrapper in self.wrappers:
            final = wrapper(final)
        setattr(self.holder, self.name, final)
        for module in sys.modules.copy().values():
            if hasattr(module, self.name) and getattr(module, self.name) is current:
                setattr(module, self.name, final)
        self.final, self.applied = final, True

    def remove(self):
        for module in sys.modules.copy().values():
            if hasattr(module, self.name) and getattr(module, self.name) is self.final:
                setattr(module, self.name, self.original)
        self.applied = False

    def _holder(self):
        try:
            return importlib.import_module(self.module_name)
        except ModuleNotFoundError:
            module, _, name = self.module_name.rpartition(".")
            return getattr(importlib.import_module(module), name)


patches_info = {}


def register_patch(target, new):
    if target in patches_info:
        patches_info[target].add(new)
    else:
        patches_info[target] = Patch(target, new)


def apply_patches():
    for patch in patches_info.values():
        patch.apply()


def repatch():
    for patch in patches_info.values():
        patch.remove()
    apply_patches()
"""

MINDSPEED_ADAPTOR = """
import functools
from mindspeed import patch_utils


def validate_args_wrapper(validate_args):
    @functools.wraps(validate_args)
    def wrapper(args, defaults={}):
        args.seen_by_mindspeed = True
        return validate_args(args, defaults)
    return wrapper


def calculate_predicted_logits(*logits):
    return "mindspeed"


patch_utils.register_patch("megatron.training.arguments.validate_args", validate_args_wrapper)
patch_utils.register_patch(
    "megatron.core.tensor_parallel.cross_entropy.VocabParallelCrossEntropy.calculate_predicted_logits",
    calculate_predicted_logits,
)
patch_utils.apply_patches()
"""

# MegatronAdaptor patches the same name as MindSpeed, from a registry of its own.
MEGATRON_ADAPTOR = """
import functools
from megatron_adaptor import patch_manager


def initialize_validate_args_decorator(validate_args):
    @functools.wraps(validate_args)
    def decorated(args, defaults={}):
        args.seen_by_megatron_adaptor = True
        return validate_args(args, defaults)
    return decorated


patch_manager.register_patch("megatron.training.arguments.validate_args", initialize_validate_args_decorator)
patch_manager.apply_patches()
"""

TRANSFORMER_ENGINE = '__version__ = "2.2.0"\n'

PREDICTED_LOGITS = """

class VocabParallelCrossEntropy:
    @staticmethod
    def calculate_predicted_logits(*logits):
        return "megatron"
"""

NAMES = ("megatron_adaptor", "transformer_engine", "mindspeed")


def build_ascend_stack(root: Path) -> Path:
    """Creates the three packages below ``root`` and returns it, to go in front of ``sys.path``."""
    sources = {
        "mindspeed/__init__": "import megatron_adaptor\n",
        "mindspeed/patch_utils": PATCH_MANAGER,
        "mindspeed/megatron_adaptor": MINDSPEED_ADAPTOR,
        "megatron_adaptor/__init__": MEGATRON_ADAPTOR,
        "megatron_adaptor/patch_manager": PATCH_MANAGER,
        "transformer_engine/__init__": TRANSFORMER_ENGINE,
        "transformer_engine/pytorch/__init__": "def parallel_cross_entropy(*logits):\n    return 'npu'\n",
    }
    for name, text in sources.items():
        path = (root / name).with_suffix(".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return root
