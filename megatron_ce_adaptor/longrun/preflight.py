"""What is checked before a run starts, so that nobody waits for eight ranks to find out."""

from __future__ import annotations

import contextlib
import errno
import importlib
import importlib.util
import os
import shutil
import socket
import sysconfig
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from megatron_ce_adaptor.longrun import npu_stack
from megatron_ce_adaptor.longrun.config import RunConfig
from megatron_ce_adaptor.longrun.data_errors import DatasetError
from megatron_ce_adaptor.longrun.indexed_dataset import check_indexed_dataset
from megatron_ce_adaptor.longrun.vocabulary import file_vocabulary, folder_vocabulary

# Logs and records take a few MiB; checkpoints, where a configuration saves them, are the user's to reckon.
LEAST_FREE_BYTES = 64 * 2**20

_DATA_FLAGS = ("--data-path", "--train-data-path", "--valid-data-path", "--test-data-path")
_TOKENIZER_FOLDER_TYPES = ("HuggingFaceTokenizer",)
_VOCAB_FILE_TYPE = "GPT2BPETokenizer"


class Refused(Exception):
    """The run cannot start. The message is one sentence for the user."""


@dataclass(frozen=True)
class Machines:
    """Where the ranks run: torchrun's rendezvous."""

    nodes: int
    node_rank: int
    address: str
    port: int


def _whole_number(variables: Mapping[str, str], name: str, default: int, least: int) -> int:
    text = variables.get(name) or str(default)
    if not text.isdecimal() or int(text) < least:
        raise Refused(f"{name} is {text!r}: expected a whole number of at least {least}.")
    return int(text)


def machines_from(variables: Mapping[str, str]) -> Machines:
    """NNODES, NODE_RANK, MASTER_ADDR and MASTER_PORT as torchrun users set them.

    On one machine a free port is taken if MASTER_PORT is unset. Several machines must agree on address and
    port, so both must be given.
    """
    nodes = _whole_number(variables, "NNODES", 1, 1)
    node_rank = _whole_number(variables, "NODE_RANK", 0, 0)
    if node_rank >= nodes:
        raise Refused(f"NODE_RANK is {node_rank}, but NNODES is {nodes}: expected 0 to {nodes - 1}.")
    address = variables.get("MASTER_ADDR") or ""
    port = _whole_number(variables, "MASTER_PORT", 0, 0)
    if port > 65535:
        raise Refused(f"MASTER_PORT is {port}: expected a port of at most 65535.")
    if nodes > 1:
        missing = [name for name, value in (("MASTER_ADDR", address), ("MASTER_PORT", port)) if not value]
        if missing:
            raise Refused(
                f"NNODES is {nodes}, but {' and '.join(missing)} is not set: every machine needs the address "
                "and the port of the one with NODE_RANK=0."
            )
    return Machines(nodes, node_rank, address or "127.0.0.1", port or free_port())


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def check_port(machines: Machines) -> None:
    """Refuse a rendezvous port that is taken; only the machine that will open it can tell."""
    if machines.node_rank != 0:
        return
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", machines.port))
        except OSError as error:
            why = "in use" if error.errno == errno.EADDRINUSE else f"not available ({error.strerror})"
            raise Refused(
                f"Port {machines.port} is {why}: set MASTER_PORT to a free one, or unset it on one machine."
            ) from None


def check_device(device: str, config: RunConfig, processes: int, variables: Mapping[str, str]) -> None:
    """Refuse a run on an accelerator that this machine does not have, before a process a card is started."""
    if device not in ("cuda", "npu"):
        return
    if device == "npu" and (problem := npu_stack.problem(processes, variables)):
        raise Refused(problem)
    try:
        import torch  # which itself imports torch_npu, unless TORCH_DEVICE_BACKEND_AUTOLOAD=0

        if device == "npu":
            importlib.import_module("torch_npu")
    except (ImportError, OSError, RuntimeError) as error:
        first = str(error).strip().partition("\n")[0]
        what = "torch_npu" if device == "npu" else "torch"
        raise Refused(
            f"{what} cannot be imported ({first}): does it fit what is installed below it?"
        ) from error
    accelerator = getattr(torch, device, None)
    if accelerator is None or not accelerator.is_available():
        raise Refused(
            f"{config.path} runs on {device}, and torch finds no {device} device here: run it where there is "
            "one, or choose a configuration for the CPU, such as configs/cpu_small.yaml."
        )
    if device == "npu" and (count := accelerator.device_count()) < processes:
        raise Refused(
            f"{processes} processes need {processes} NPUs, but torch_npu finds {count}: set "
            f"NPUS_PER_NODE={count} and TP, PP and EP to sizes that fit, or free the other cards."
        )


def check_megatron_path(variables: Mapping[str, str]) -> None:
    """Refuse a MEGATRON_PATH that is no checkout of Megatron-LM, or whose data helpers could not be built."""
    path = variables.get("MEGATRON_PATH")
    if not path:
        return
    checkout = Path(path).expanduser()
    if not (checkout / "pretrain_gpt.py").is_file():
        raise Refused(
            f"MEGATRON_PATH is {path}, but there is no pretrain_gpt.py in it: set it to a checkout of "
            "Megatron-LM, or unset it to train on the installed megatron-core."
        )
    # Megatron runs `make` there at its first start, and exits where that fails.
    helpers = checkout / "megatron" / "core" / "datasets"
    if not (helpers / "Makefile").is_file() or any(
        helpers.glob(f"helpers_cpp{sysconfig.get_config_var('EXT_SUFFIX')}")
    ):
        return
    absent = [tool for tool in ("make", "g++", "python3-config") if shutil.which(tool) is None]
    absent += ["pybind11"] * (importlib.util.find_spec("pybind11") is None)
    if absent:
        raise Refused(
            f"Megatron-LM at {path} has yet to compile its data helpers, and {', '.join(absent)} is missing: "
            "install it (pip install pybind11), or run `make` in megatron/core/datasets."
        )


def check_data(config: RunConfig, variables: Mapping[str, str]) -> None:
    """Refuse token files and tokenizers that are missing, damaged, or do not belong together."""
    vocabulary = check_tokenizer(config, variables)
    if not config.is_set("--mock-data"):
        for flag in _DATA_FLAGS:
            words = config.values(flag, variables)
            # A blend is written as `weight prefix weight prefix ...`.
            blend = len(words) > 1 and len(words) % 2 == 0 and all(map(_is_number, words[::2]))
            for prefix in words[1::2] if blend else words:
                try:
                    check_indexed_dataset(prefix, vocabulary, sample=True)
                except DatasetError as error:
                    raise Refused(
                        f"{flag} {prefix}: {error}; make the data with `megatron-ce prepare-data`."
                    ) from error


def check_tokenizer(config: RunConfig, variables: Mapping[str, str]) -> int | None:
    """Refuse a tokenizer that is not there; the number of its ids, None where its files do not tell."""
    kind = " ".join(config.values("--tokenizer-type", variables))
    words = config.values("--tokenizer-model", variables)
    read: Callable[[Path], int | None]
    if kind == _VOCAB_FILE_TYPE:
        read, path = file_vocabulary, _vocabulary_file(config, variables)
    elif kind in _TOKENIZER_FOLDER_TYPES:
        if not words:
            raise Refused(
                f"--tokenizer-type {kind} needs --tokenizer-model: set TOKENIZER_MODEL to its folder."
            )
        read, path = folder_vocabulary, Path(words[0])
        if not (path.is_dir() and any(path.glob("tokenizer*"))):
            raise Refused(
                f"--tokenizer-model {path} is no tokenizer folder: expected one with tokenizer.json; "
                "`megatron-ce prepare-data` makes it."
            )
    else:
        for word in words:
            if not Path(word).exists():
                raise Refused(f"--tokenizer-model {word} does not exist.")
        return None
    try:
        return read(path)
    except ValueError as error:
        raise Refused(f"The tokenizer cannot be used: {error}") from error


def _vocabulary_file(config: RunConfig, variables: Mapping[str, str]) -> Path:
    """GPT-2's two files. Without them Megatron would download others."""
    for flag, name in (("--vocab-file", "VOCAB_FILE"), ("--merge-file", "MERGE_FILE")):
        words = config.values(flag, variables)
        if not words:
            raise Refused(f"--tokenizer-type {_VOCAB_FILE_TYPE} needs {flag}: set {name}.")
        if not Path(words[0]).is_file():
            raise Refused(f"{flag} {words[0]} does not exist.")
    return Path(config.values("--vocab-file", variables)[0])


def check_output_folder(folder: Path, least_free: int = LEAST_FREE_BYTES) -> None:
    """Create `folder` and refuse one that cannot be written or has too little room."""
    probe = folder / f".probe-{os.getpid()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe.write_bytes(bytes(4096))
    except OSError as error:
        raise Refused(
            f"The output folder {folder} cannot be written: {error.strerror or error}; use --out."
        ) from error
    finally:
        with contextlib.suppress(OSError):
            probe.unlink(missing_ok=True)
    free = shutil.disk_usage(folder).free
    if free < least_free:
        raise Refused(
            f"The output folder {folder} has {free / 2**20:.0f} MiB left; a run needs at least "
            f"{least_free / 2**20:.0f} MiB: free some or give another with --out."
        )


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True
