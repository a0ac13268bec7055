"""Pretrain a GPT with Megatron, with this package's cross entropy behind ``--cross-entropy-fusion-impl te``.

    torchrun --nproc-per-node 8 -m megatron_ce_adaptor.megatron.pretrain <Megatron's own arguments>

One argument is ours: ``--loss-chunk-tokens 4096`` (or auto) beside ``--cross-entropy-fusion-impl te``
computes output layer and loss in chunks of so many tokens, as MCE_LOSS_CHUNK_TOKENS does
(:mod:`.loss_chunks`).

Runs on the megatron-core wheel alone (:mod:`.gpt_providers` stands in for the ``pretrain_gpt.py`` that the
wheel lacks).  With MEGATRON_PATH set to a Megatron-LM checkout, that checkout's ``pretrain_gpt.py`` runs in
its place, after the same preparation.  MCE_DEVICE=cpu|cuda|npu chooses the device; by default CUDA if there
is any, then an NPU if torch_npu is installed, then the CPU with gloo.  MCE_RANKS_ON_ONE_DEVICE=1 puts all
ranks of a machine on its first GPU (st_scripts/ranks_on_one_gpu.sh has what NCCL needs for that).

Exit status 2 means that the command line or the environment cannot work; the reason is the one line on
standard error.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import re
import runpy
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import megatron_ce_adaptor  # noqa: F401  installs the hook that patches Megatron when it is imported
from megatron_ce_adaptor.megatron import loss_chunks, neighbours

_PROGRAM_START = time.time()

DEVICES = ("cpu", "cuda", "npu")

# What pretrain_gpt.py can do and gpt_providers cannot.
_NEEDS_PRETRAIN_GPT = (
    "--dataloader-inter-document-masking",
    "--experimental-attention-variant",
    "--fim-data",
    "--heterogeneous-layers-config-path",
    "--hybrid-context-parallel",
    "--hybrid-layer-pattern",
    "--inprocess-restart",
    "--perform-rl-step",
    "--per-dataset-sequences-path",
    "--sft",
    "--spec",
    "--yaml-cfg",
)


# The one line that MegatronAdaptor, MindSpeed and MindSpeed-LLM are activated with, in its usual forms.
_ADAPTOR_IMPORT = re.compile(
    r"^(?:import (?P<module>megatron_adaptor|mindspeed(?:_llm)?\.megatron_adaptor)"
    r"|from (?P<package>mindspeed(?:_llm)?) import megatron_adaptor)\b",
    re.MULTILINE,
)


class UsageError(Exception):
    """The command line or the environment cannot work; the message is one sentence for the user."""


# --- before anything is imported -------------------------------------------------------------------------


def _option(argv: Sequence[str], flag: str) -> str | None:
    """The word after the last `flag` in `argv` (or after its '='), None without it."""
    value = None
    for position, word in enumerate(argv):
        if word == flag and position + 1 < len(argv):
            value = argv[position + 1]
        elif word.startswith(flag + "="):
            value = word.partition("=")[2]
    return value


def _size(argv: Sequence[str], flag: str, default: int = 1) -> int:
    value = _option(argv, flag)
    if value is None:
        return default
    if not value.isdigit() or int(value) < 1:
        raise UsageError(f"{flag} is {value!r}: expected a whole number of at least 1.")
    return int(value)


def check_process_count(argv: Sequence[str], world_size: int) -> None:
    """Raise UsageError unless `world_size` processes can be split as the Megatron arguments `argv` ask."""
    tensor = _size(argv, "--tensor-model-parallel-size")
    pipeline = _size(argv, "--pipeline-model-parallel-size")
    context = _size(argv, "--context-parallel-size")
    expert = _size(argv, "--expert-model-parallel-size")
    expert_tensor = _size(argv, "--expert-tensor-parallel-size", default=tensor)
    for product, words in (
        (tensor * pipeline * context, f"tensor {tensor} x pipeline {pipeline} x context {context}"),
        (
            expert_tensor * expert * pipeline,
            f"expert tensor {expert_tensor} x expert {expert} x pipeline {pipeline}",
        ),
    ):
        if world_size % product:
            raise UsageError(
                f"{world_size} processes cannot be split into groups of {product} ({words}): start a "
                f"multiple of {product} processes or change the parallel sizes."
            )


def check_arguments(argv: Sequence[str], megatron_path: str | None) -> None:
    """Raise UsageError for what Megatron would ignore silently or this entry cannot do."""
    if _option(argv, "--cross-entropy-fusion-impl") == "te" and "--cross-entropy-loss-fusion" not in argv:
        raise UsageError(
            "--cross-entropy-fusion-impl te has no effect without --cross-entropy-loss-fusion (Megatron "
            "trains with its unfused cross entropy): add that flag or leave out the other."
        )
    if megatron_path is None:
        given = {word.partition("=")[0] for word in argv}
        for flag in _NEEDS_PRETRAIN_GPT:
            if flag in given:
                raise UsageError(
                    f"{flag} needs Megatron-LM's pretrain_gpt.py, which megatron-core's wheel lacks: set "
                    "MEGATRON_PATH to a checkout of Megatron-LM."
                )


def take_loss_chunks(argv: Sequence[str]) -> list[str]:
    """`argv` without ``--loss-chunk-tokens``, whose value is put in the environment: MCE_LOSS_CHUNK_TOKENS.

    Raises:
        UsageError: a value of it, or of the environment's settings of the chunks, cannot be used, or the
            argument would have no effect.
    """
    try:
        kept, tokens = loss_chunks.without_flag(argv)
        if tokens is not None:
            os.environ[loss_chunks.TOKENS] = tokens
        chunk = loss_chunks.chunk_setting()
        loss_chunks.gradients_setting()
    except ValueError as error:
        raise UsageError(str(error)) from None
    if tokens is not None and chunk is not None and _option(kept, "--cross-entropy-fusion-impl") != "te":
        raise UsageError(
            f"{loss_chunks.FLAG} has no effect without --cross-entropy-loss-fusion "
            f"--cross-entropy-fusion-impl te: add them, leave it out, or set {loss_chunks.TOKENS} in the "
            "environment, which the other implementations pass over."
        )
    return kept


def choose_device(requested: str | None) -> str:
    """The device to train on: `requested`, the value of MCE_DEVICE, or what is there if that is empty.

    Raises:
        UsageError: `requested` is not one of `DEVICES`, or is not there.
    """
    import torch

    has_cuda = torch.cuda.is_available()
    has_npu = importlib.util.find_spec("torch_npu") is not None
    if not requested:
        return "cuda" if has_cuda else "npu" if has_npu else "cpu"
    if requested not in DEVICES:
        raise UsageError(f"MCE_DEVICE is {requested!r}: expected one of {', '.join(DEVICES)}.")
    if requested == "cuda" and not has_cuda:
        raise UsageError(
            "MCE_DEVICE is 'cuda', but torch finds no CUDA device: set MCE_DEVICE=cpu or unset it."
        )
    if requested == "npu" and not has_npu:
        raise UsageError(
            "MCE_DEVICE is 'npu', but torch_npu is not installed: install it or unset MCE_DEVICE."
        )
    return requested


def find_pretrain_gpt(megatron_path: str) -> Path:
    """The ``pretrain_gpt.py`` of the checkout at `megatron_path`; UsageError if there is none."""
    script = Path(megatron_path).expanduser().resolve() / "pretrain_gpt.py"
    if not script.is_file():
        raise UsageError(
            f"MEGATRON_PATH is {megatron_path!r}, but there is no pretrain_gpt.py in it: set it to a "
            "checkout of Megatron-LM, or unset it to train on the installed megatron-core."
        )
    return script


# --- preparing the process -------------------------------------------------------------------------------


def npu_adaptors(script: Path | None) -> list[str]:
    """The modules to import before Megatron on an NPU: those that the user's `script` imports, in its order.

    They replace names that Megatron's modules bind when they are imported, and the preparation imports
    Megatron, so the script's own line would come too late. If it imports none: what is installed of
    MegatronAdaptor, MindSpeed and torch_npu's own mapping of torch.cuda, the first of them.
    """
    text = script.read_text(encoding="utf-8", errors="replace") if script is not None else ""
    named = [match["package"] or match["module"] for match in _ADAPTOR_IMPORT.finditer(text)]
    named = [name if "megatron_adaptor" in name else f"{name}.megatron_adaptor" for name in named]
    if named:
        return list(dict.fromkeys(named))
    installed = (
        adaptor
        for adaptor in ("megatron_adaptor", "mindspeed.megatron_adaptor", "torch_npu.contrib.transfer_to_npu")
        if importlib.util.find_spec(adaptor.partition(".")[0]) is not None
    )
    return [next(installed)]  # torch_npu is there


def _prepare_npu(script: Path | None) -> None:
    importlib.import_module("torch_npu")
    for adaptor in npu_adaptors(script):
        importlib.import_module(adaptor)


def prepare_device(device: str, script: Path | None = None) -> None:
    """Make this process ready to import and run Megatron on `device` ('cpu', 'cuda' or 'npu').

    Args:
        script: the pretrain script that will run, None for the installed megatron-core.
    """
    from megatron_ce_adaptor.megatron import noise_floor, resume_fixes, wheel_fixes

    if device == "cpu":
        from megatron_ce_adaptor.megatron import cpu_device

        cpu_device.install()
        cpu_device.install_in_megatron()
    elif device == "npu":
        _prepare_npu(script)
    wheel_fixes.apply()
    resume_fixes.apply()
    if os.environ.get("MCE_NOISE_FLOOR", "0") not in ("", "0"):
        noise_floor.apply()


def _require_training_loop() -> None:
    if importlib.util.find_spec("megatron") is None or importlib.util.find_spec("megatron.training") is None:
        raise UsageError(
            "Megatron's training loop is not installed: install megatron-core 0.17.1 or newer (Python 3.12), "
            "or set MEGATRON_PATH to a checkout of Megatron-LM."
        )


# --- running ---------------------------------------------------------------------------------------------


def run_pretrain_gpt(script: Path, argv: Sequence[str]) -> None:
    """Run the user's own pretrain script as ``__main__``, with `argv` as its arguments."""
    sys.argv = [str(script), *argv]
    neighbours.report_at_exit()
    runpy.run_path(str(script), run_name="__main__")


def _call_pretrain(args_defaults: dict[str, Any]) -> None:
    """Call ``megatron.training.pretrain`` in the convention of the installed version.

    Up to 0.17 it parses the command line itself.  From 0.18 on the caller does, and hands over a container
    of configurations first; later versions build the model from that container and take no model provider.
    """
    import torch
    from megatron.core.enums import ModelType
    from megatron.training import pretrain

    from megatron_ce_adaptor.megatron import gpt_providers

    accepted = inspect.signature(pretrain).parameters
    call: dict[str, Any] = {
        "train_valid_test_dataset_provider": gpt_providers.train_valid_test_datasets_provider,
        "model_type": ModelType.encoder_or_decoder,
        "forward_step_func": gpt_providers.forward_step,
    }
    if "model_provider" in accepted:
        call["model_provider"] = gpt_providers.model_provider
    if "args_defaults" in accepted:
        pretrain(**call, args_defaults=args_defaults)
    else:
        from megatron.training import argument_utils
        from megatron.training.arguments import parse_and_validate_args

        args = parse_and_validate_args(args_defaults=args_defaults)
        model = None if "model_provider" in call else argument_utils.gpt_config_from_args(args)
        pretrain(argument_utils.pretrain_cfg_container_from_args(args, model), **call)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def run_on_wheel(argv: Sequence[str]) -> None:
    """Train with the installed megatron-core and :mod:`.gpt_providers`; `argv` are Megatron's arguments."""
    from megatron.training import set_startup_timestamps

    sys.argv = ["megatron_ce_adaptor.megatron.pretrain", *argv]
    neighbours.report_at_exit()
    set_startup_timestamps(program_start=_PROGRAM_START, main_entry=time.time())
    _call_pretrain(args_defaults={"tokenizer_type": "GPT2BPETokenizer"})


def prepare(argv: Sequence[str], world_size: int) -> Callable[[], None]:
    """Do everything that comes before the first line of training code.

    Checks Megatron's arguments `argv` and the environment (MEGATRON_PATH, MCE_DEVICE), takes our own argument
    out of them, makes this process ready for the device, and imports Megatron.

    Returns:
        What to call to train.

    Raises:
        UsageError: `argv`, `world_size` or the environment cannot work.
    """
    argv = take_loss_chunks(argv)
    megatron_path = os.environ.get("MEGATRON_PATH") or None
    script = find_pretrain_gpt(megatron_path) if megatron_path else None
    check_arguments(argv, megatron_path)
    check_process_count(argv, world_size)
    device = choose_device(os.environ.get("MCE_DEVICE"))
    if script is not None:
        sys.path.insert(0, str(script.parent))
        prepare_device(device, script)
        return partial(run_pretrain_gpt, script, argv)
    _require_training_loop()
    prepare_device(device)
    importlib.import_module("megatron_ce_adaptor.megatron.gpt_providers")
    return partial(run_on_wheel, argv)


def main() -> None:
    """Entry point of ``python -m megatron_ce_adaptor.megatron.pretrain``."""
    if os.environ.get("MCE_RANKS_ON_ONE_DEVICE", "0") not in ("", "0"):
        os.environ["LOCAL_RANK"] = "0"  # what Megatron takes the device's number from
    try:
        train = prepare(sys.argv[1:], world_size=int(os.environ.get("WORLD_SIZE", "1")))
    except UsageError as error:
        exit_with_usage_error(error)
    train()


def exit_with_usage_error(error: UsageError) -> NoReturn:
    """End this process with status 2 and one sentence on standard error."""
    # Every rank sees the same mistake; one of them says so.
    if os.environ.get("RANK", "0") == "0":
        print(f"megatron_ce_adaptor: {error}", file=sys.stderr, flush=True)
    sys.exit(2)


if __name__ == "__main__":
    main()
