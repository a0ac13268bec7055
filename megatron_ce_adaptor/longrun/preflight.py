"""What is checked before a run starts, so that nobody waits for eight ranks to find out."""

from __future__ import annotations

import contextlib
import errno
import importlib
import importlib.util
import os
import shutil
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from megatron_ce_adaptor.longrun.config import RunConfig
from megatron_ce_adaptor.longrun.data_errors import DatasetError
from megatron_ce_adaptor.longrun.indexed_dataset import check_indexed_dataset

# Logs and records take a few MiB; checkpoints, where a configuration saves them, are the user's to reckon.
LEAST_FREE_BYTES = 64 * 2**20

_DATA_FLAGS = ("--data-path", "--train-data-path", "--valid-data-path", "--test-data-path")
_TOKENIZER_FOLDER_TYPES = ("HuggingFaceTokenizer",)


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


def check_device(device: str, config: RunConfig) -> None:
    """Refuse a run on an accelerator that this machine does not have, before a process a card is started."""
    if device not in ("cuda", "npu"):
        return
    import torch

    if device == "npu" and importlib.util.find_spec("torch_npu") is not None:
        importlib.import_module("torch_npu")
    accelerator = getattr(torch, device, None)
    if accelerator is None or not accelerator.is_available():
        raise Refused(
            f"{config.path} runs on {device}, and torch finds no {device} device here: run it where there is "
            "one, or choose a configuration for the CPU, such as configs/cpu_small.yaml."
        )


def check_data(config: RunConfig, variables: Mapping[str, str]) -> None:
    """Refuse token files and tokenizers that are missing or damaged."""
    if not config.is_set("--mock-data"):
        for flag in _DATA_FLAGS:
            words = config.values(flag, variables)
            # A blend is written as `weight prefix weight prefix ...`.
            blend = len(words) > 1 and len(words) % 2 == 0 and all(map(_is_number, words[::2]))
            for prefix in words[1::2] if blend else words:
                try:
                    check_indexed_dataset(prefix)
                except DatasetError as error:
                    raise Refused(
                        f"{flag} {prefix}: {error}; make the data with `megatron-ce prepare-data`."
                    ) from error
    check_tokenizer(config, variables)


def check_tokenizer(config: RunConfig, variables: Mapping[str, str]) -> None:
    kind = " ".join(config.values("--tokenizer-type", variables))
    for word in config.values("--tokenizer-model", variables):
        path = Path(word)
        if kind in _TOKENIZER_FOLDER_TYPES:
            if not (path.is_dir() and any(path.glob("tokenizer*"))):
                raise Refused(
                    f"--tokenizer-model {word} is no tokenizer folder: expected one with tokenizer.json; "
                    "`megatron-ce prepare-data` makes it."
                )
        elif not path.exists():
            raise Refused(f"--tokenizer-model {word} does not exist.")


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
