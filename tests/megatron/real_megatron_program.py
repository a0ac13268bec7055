"""Runs in a fresh interpreter with a real Megatron-Core and prints, as JSON, what te does there.

Usage: real_megatron_program.py adaptor_first|megatron_first
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import os
import sys
import warnings
from types import SimpleNamespace

ADAPTOR_FIRST = sys.argv.pop(1) == "adaptor_first"
if ADAPTOR_FIRST:
    import megatron_ce_adaptor  # noqa: F401

import torch  # noqa: E402

warnings.simplefilter("ignore")
FLAGS = """
--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32
--micro-batch-size 1 --global-batch-size 1 --train-iters 1 --lr 1e-3 --transformer-impl local --bf16
--distributed-backend gloo --no-gradient-accumulation-fusion --no-masked-softmax-fusion --no-rope-fusion
--no-persist-layer-norm --tokenizer-type NullTokenizer --vocab-size 100 --attention-backend unfused
--cross-entropy-loss-fusion --cross-entropy-fusion-impl
""".split()  # noqa: SIM905


def verdict_on_arguments(impl: str, *more: str) -> str:
    """``accepted`` and the implementation afterwards, or the first line of what Megatron says against it."""
    try:
        arguments = importlib.import_module("megatron.training.arguments")
    except ImportError as error:
        return f"no megatron.training: {error}"
    sys.argv = ["pretrain", *FLAGS, impl, *more]
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
            args = arguments.validate_args(arguments.parse_args(), {})
    except AssertionError as error:
        return f"refused: {error}".splitlines()[0]
    return f"accepted {args.cross_entropy_fusion_impl}"


def language_module():
    return importlib.import_module("megatron.core.models.common.language_module.language_module")


def losses(impl: str, fusion: bool = True, bad_label: int | None = None):
    """Masked total, loss per token [b, s] and the logits' gradient, from a bare LanguageModule on CPU."""
    group = torch.distributed.group.WORLD
    module = language_module().LanguageModule.__new__(language_module().LanguageModule)
    module.config = SimpleNamespace(cross_entropy_loss_fusion=fusion, cross_entropy_fusion_impl=impl)
    module.pg_collection = SimpleNamespace(tp=group)
    module.tp_group = group
    generator = torch.Generator().manual_seed(1)
    leaf = (3 * torch.randn(16, 2, 101, generator=generator)).requires_grad_()
    labels = torch.randint(0, 101, (2, 16), generator=generator)
    mask = torch.ones(2, 16)
    if bad_label is not None:
        labels[1, 3] = bad_label
        mask[1, 3] = 0
    loss = module.compute_language_model_loss(labels, leaf * 1.0)
    total = (loss * mask).sum()
    total.backward()
    return total.detach(), loss.detach(), leaf.grad


def attempt(impl: str) -> str:
    try:
        losses(impl)
    except RuntimeError as error:
        return str(error)
    return "computed"


def main() -> None:
    report: dict[str, object] = {}
    init = f"file://{os.path.abspath('store')}"
    torch.distributed.init_process_group("gloo", init_method=init, rank=0, world_size=1)
    from megatron.core import parallel_state

    parallel_state._TENSOR_MODEL_PARALLEL_GROUP = torch.distributed.group.WORLD
    if not ADAPTOR_FIRST:
        report["te without the adaptor"] = attempt("te")
        report["arguments without the adaptor"] = verdict_on_arguments("te")
        importlib.import_module("megatron_ce_adaptor")
    from megatron_ce_adaptor import patch_status, remove_patches
    from megatron_ce_adaptor.megatron.call_counter import call_counts

    report["arguments"] = verdict_on_arguments("te")
    report["native arguments"] = verdict_on_arguments("native")
    report["deterministic arguments"] = verdict_on_arguments("te", "--deterministic-mode")
    total, loss, grad = losses("te")
    report["calls after te"] = call_counts()
    report["finite with label -1 masked"] = bool(torch.isfinite(losses("te", bad_label=-1)[0]))
    differences = {}
    for name, fusion in (("fused", True), ("unfused", False)):
        native_total, native_loss, native_grad = losses("native", fusion)
        differences[name] = {
            "total": float((total - native_total).abs() / native_total.abs()),
            "loss": float((loss - native_loss).abs().max()),
            "gradient": float((grad - native_grad).abs().max()),
        }
    report["difference to native"] = differences
    report["calls"] = call_counts()
    report["dtype"] = str(loss.dtype)
    status = patch_status()
    report["version"] = status.megatron_version
    report["status"] = {target.target: target.state.value for target in status.targets}
    remove_patches()
    report["te after removal"] = attempt("te")
    report["arguments after removal"] = verdict_on_arguments("te")
    print("REPORT " + json.dumps(report), flush=True)


main()
