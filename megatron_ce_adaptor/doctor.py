"""`megatron-ce doctor`: which implementation would run here and why, and what is patched in Megatron."""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import importlib.util
import os
import sys
import warnings
from collections.abc import Iterator

from megatron_ce_adaptor.implementations import SMALL_VOCABULARY

_PACKAGES = (
    "megatron-ce-adaptor",
    "torch",
    "triton",
    "megatron-core",
    "transformer-engine",
    "torch-npu",
    "triton-ascend",
    "mindspeed",
    "megatron-adaptor",
)
_MEGATRON_MODULES = (
    "megatron.core.models.gpt.gpt_model",
    "megatron.core.models.common.language_module.language_module",
    "megatron.core.model_parallel_config",
    "megatron.training.arguments",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's options."""
    parser.description = (
        "Say which implementation of the cross entropy would run on each device here and why, run it once on "
        "each, and show what is patched in Megatron. Exit status 0: all well; 1: something that is asked for "
        "cannot run, or a patch target is missing."
    )
    parser.add_argument(
        "--no-megatron", action="store_true", help="do not import Megatron (it takes seconds)"
    )
    parser.add_argument(
        "--import",
        dest="imports",
        action="append",
        default=[],
        metavar="MODULE",
        help="import this first, as your pretrain script does, to see who owns what; may be given again, "
        "such as --import megatron_adaptor --import mindspeed.megatron_adaptor",
    )


def run(args: argparse.Namespace) -> int:
    """Prints the findings; the exit status is the worst of them."""
    print(f"Python {sys.version.split()[0]}")
    for package in _PACKAGES:
        print(f"  {package:<20} {_version(package)}")
    settings = {k: v for k, v in sorted(os.environ.items()) if k.startswith(("MCE_", "TE_PARALLEL_CE_"))}
    settings |= {k: os.environ[k] for k in ("TRITON_INTERPRET", "MEGATRON_PATH") if k in os.environ}
    print("settings: " + (", ".join(f"{k}={v}" for k, v in settings.items()) or "none, all defaults"))

    healthy = True
    for module in args.imports:
        healthy &= _import(module)
    print("cross entropy:")
    for device, problem in _devices():
        for columns in (1000, SMALL_VOCABULARY) if device.startswith("npu") else (1000,):
            healthy &= _show_device(device, problem, columns)
    healthy &= _show_loss_chunks()
    if not args.no_megatron:
        print("Megatron patches:")
        healthy &= _show_patches()
    print("all well" if healthy else "NOT well: see the lines marked with !")
    return 0 if healthy else 1


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _devices() -> Iterator[tuple[str, str]]:
    import torch

    yield "cpu", ""
    # torch_npu's transfer_to_npu, which adaptors import, puts the NPU behind CUDA's names
    if torch.cuda.is_available() and torch.empty(0, device="cuda").device.type == "cuda":
        for index in range(torch.cuda.device_count()):
            yield f"cuda:{index}", torch.cuda.get_device_name(index)
    npu = getattr(torch, "npu", None)
    if npu is not None and npu.is_available():
        yield "npu:0", npu.get_device_name(0)


def _show_device(device: str, description: str, columns: int) -> bool:
    """Prints what runs on the device, after running 33 tokens over `columns` classes against fp64."""
    import torch

    from megatron_ce_adaptor.cross_entropy import parallel_cross_entropy
    from megatron_ce_adaptor.implementations import choose

    label = f"{device} ({description})" if description else device
    try:
        choice = choose(torch.device(device).type, columns, False)
        generator = torch.Generator().manual_seed(0)
        logits = torch.randn(33, columns, generator=generator, dtype=torch.float64)
        target = torch.randint(0, columns, (33,), generator=generator)
        expected = torch.nn.functional.cross_entropy(logits, target, reduction="none")
        loss = parallel_cross_entropy(logits.float().to(device), target.to(device))
        assert isinstance(loss, torch.Tensor)
        error = (loss.double().cpu() - expected).abs().max().item()
    except (RuntimeError, ValueError) as problem:
        print(f"! {label}: {problem}")
        return False
    right = error < 1e-5
    print(f"{' ' if right else '!'} {label}: {choice.name}, because of {choice.reason}; error {error:.1e}")
    return right


def _show_loss_chunks() -> bool:
    """Prints whether Megatron's output layer and loss are computed in chunks, and what that touches."""
    from megatron_ce_adaptor.megatron.loss_chunks import AUTO, TOKENS, chunk_setting, gradients_setting

    try:
        chunk, gradients = chunk_setting(), gradients_setting()
    except ValueError as error:
        print(f"! loss without logits: {error}")
        return False
    if chunk is None:
        print(f"loss without logits: off ({TOKENS} is not set)")
        return True
    size = "as many tokens as a rule chooses" if chunk == AUTO else f"{chunk} tokens"
    print(
        f"loss without logits: on, chunks of {size}, gradients in {gradients}; touches the output layer and "
        "the loss of GPTModel._postprocess with --cross-entropy-loss-fusion --cross-entropy-fusion-impl te"
    )
    return True


def _show_patches() -> bool:
    from megatron_ce_adaptor.megatron import apply_patches

    if _version("megatron-core") == "not installed" and importlib.util.find_spec("megatron") is None:
        print("  megatron-core is not installed; the patches are applied when it is imported")
        return True
    for name in _MEGATRON_MODULES:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # what Megatron says about packages it would like to have
                importlib.import_module(name)
        except Exception as error:
            print(f"! {name} cannot be imported: {type(error).__name__}: {error}")
            return False
    status = apply_patches()
    print("\n".join(f"  {line}" for line in str(status).splitlines()))
    for problem in status.problems:
        print(f"! {problem.target}: {problem.state.value}")
    _show_neighbours()
    return status.ok


def _import(module: str) -> bool:
    try:
        importlib.import_module(module)
    except Exception as error:
        print(f"! {module} cannot be imported: {type(error).__name__}: {error}")
        return False
    return True


def _show_neighbours() -> None:
    from megatron_ce_adaptor.megatron import neighbours

    active = ", ".join(f"{name} {version}" for name, version in neighbours.active().items())
    print(f"beside Megatron: {active or 'nobody'}")
    for what, owner in neighbours.owners().items():
        print(f"  {what}: {owner}")
