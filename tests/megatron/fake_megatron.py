"""Writes a small package tree named ``megatron`` with the names that are patched, as a version has them.

It imports as Megatron does: the package's own version becomes known only after the first patched modules have
been executed, and LanguageModule binds ``te_parallel_cross_entropy`` by value.
"""

from __future__ import annotations

from pathlib import Path

TE_ABSENT = "te_parallel_cross_entropy = None\n"
TE_PRESENT = '''
def te_parallel_cross_entropy(logits, labels, tp_group, is_cg_capturable=False):
    """Stands for TransformerEngine's kernel."""
    return "transformer engine"
'''
NATIVE = """
def {name}(logits, labels, *more, **named):
    return ("{name}", logits, labels, more, named)
"""
LANGUAGE_MODULE = """
from megatron.core import tensor_parallel
try:
    from megatron.core.extensions.transformer_engine import te_parallel_cross_entropy
except:
    te_parallel_cross_entropy = None
from megatron.core.fusions.fused_cross_entropy import fused_vocab_parallel_cross_entropy


def loss(impl, logits, labels, tp_group=None):
    if impl == "te":
        if te_parallel_cross_entropy is None:
            raise RuntimeError("no te")
        return te_parallel_cross_entropy(logits, labels, tp_group, False)
    if impl == "native":
        return fused_vocab_parallel_cross_entropy(logits, labels, tp_group)
    return tensor_parallel.vocab_parallel_cross_entropy(logits, labels)
"""
GPT_MODEL = """
class GPTModel:
    def _postprocess(self, hidden_states, labels=None, loss_mask=None):
        return hidden_states
"""
REFUSAL = """
    assert not (args.cross_entropy_loss_fusion and args.cross_entropy_fusion_impl == "te"), "te is disabled"
"""
VALIDATE_ARGS = """
seen = []


def validate_args(args, defaults={{}}):
    seen.append(dict(vars(args)))
{refusal}
    if args.deterministic_mode:
        assert not args.cross_entropy_loss_fusion, "not deterministic"
    if getattr(args, "broken", False):
        raise ValueError("broken arguments")
    return args
"""
CONFIG = """
import warnings


class ModelParallelConfig:
    def __init__(self, loss_fusion, impl):
        self.cross_entropy_loss_fusion = loss_fusion
        self.cross_entropy_fusion_impl = impl
        self.__post_init__()

    def __post_init__(self):
        te = self.cross_entropy_loss_fusion and self.cross_entropy_fusion_impl == "te"
        {check}
"""
CONFIG_CHECKS = {
    "silent": "pass",
    "warns": 'te and warnings.warn("te has known stability issues", UserWarning)',
    "asserts": 'assert not te, "te loss fusion is disabled due to stability issues. "',
}


def build_fake_megatron(
    root: Path,
    version: str | None = "0.18.0",
    *,
    te: bool = False,
    refuses_te: bool = False,
    config: str = "silent",
    without: tuple[str, ...] = (),
    extra: dict[str, str] | None = None,
) -> Path:
    """Creates ``root/megatron`` and returns ``root``, which goes in front of ``sys.path``.

    Args:
        version: what ``megatron.core.package_info`` says; ``None`` leaves the version out.
        te: TransformerEngine is installed, so ``te_parallel_cross_entropy`` is a function and not ``None``.
        refuses_te: ``validate_args`` has the assertion of 0.18.2.
        config: what ``ModelParallelConfig`` does about te: ``silent``, ``warns`` or ``asserts``.
        without: names that this version does not have.
        extra: source text appended to modules or making new ones, by dotted module name.
    """
    native = {name: "" if name in without else NATIVE.format(name=name) for name in NATIVE_NAMES}
    exported = "" if "vocab_parallel_cross_entropy" in without else "vocab_parallel_cross_entropy"
    sources = {
        "megatron.__init__": "",
        "megatron.core.__init__": "import megatron.core.tensor_parallel\nimport megatron.core.package_info\n",
        "megatron.core.package_info": f"__version__ = {version!r}\n" if version else "",
        "megatron.core.tensor_parallel.__init__": f"from .cross_entropy import {exported}\n"
        if exported
        else "",
        "megatron.core.tensor_parallel.cross_entropy": native["vocab_parallel_cross_entropy"],
        "megatron.core.fusions.__init__": "",
        "megatron.core.fusions.fused_cross_entropy": native["fused_vocab_parallel_cross_entropy"],
        "megatron.core.extensions.__init__": "",
        "megatron.core.extensions.transformer_engine": (
            "" if "te_parallel_cross_entropy" in without else TE_PRESENT if te else TE_ABSENT
        ),
        "megatron.core.models.__init__": "",
        "megatron.core.models.common.__init__": "",
        "megatron.core.models.common.language_module.__init__": "",
        "megatron.core.models.common.language_module.language_module": LANGUAGE_MODULE,
        "megatron.core.models.gpt.__init__": "",
        "megatron.core.models.gpt.gpt_model": GPT_MODEL,
        "megatron.core.model_parallel_config": CONFIG.format(check=CONFIG_CHECKS[config]),
        "megatron.training.__init__": "",
        "megatron.training.arguments": VALIDATE_ARGS.format(refusal=REFUSAL if refuses_te else ""),
        "megatron.training.initialize": "from megatron.training.arguments import validate_args\n",
    }
    for module, text in (extra or {}).items():
        sources[module] = sources.get(module, "") + text
    for module, text in sources.items():
        path = root.joinpath(*module.split(".")).with_suffix(".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return root


NATIVE_NAMES = ("fused_vocab_parallel_cross_entropy", "vocab_parallel_cross_entropy")
