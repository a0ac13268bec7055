"""Let Megatron train on the CPU with gloo: stand-ins for the parts of ``torch.cuda`` that it calls.

Megatron-Core knows one device type.  It asks ``torch.cuda`` for the current device, allocates there, and
refuses to start when no GPU is found.  :func:`install` answers those questions for the CPU, so the same
training loop, schedules and collectives run unchanged in processes that talk over gloo.

The stand-ins are process-wide, so only the pretrain entry of this package installs them; importing
``megatron_ce_adaptor`` never does.  ``SHIMS`` lists each one with its reason.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import resource
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed

_CPU = torch.device("cpu")
# An Ampere: every code path that asks for "at least 8.0" (bf16 among them) has a CPU counterpart.
_CAPABILITY = (8, 0)
_DEVICE_NAME = "CPU standing in for CUDA"

_FACTORIES = (
    "arange", "as_tensor", "empty", "empty_like", "empty_strided", "eye", "full", "full_like", "linspace",
    "ones", "ones_like", "rand", "rand_like", "randint", "randn", "randn_like", "randperm", "tensor", "zeros",
    "zeros_like",
)  # fmt: skip


def accelerators_present() -> list[str]:
    """Names of the accelerators this process could use: 'cuda', 'npu', both or none."""
    found = []
    if torch.cuda.is_available():
        found.append("cuda")
    if importlib.util.find_spec("torch_npu") is not None:
        found.append("npu")
    return found


# --- tensors ---------------------------------------------------------------------------------------------


def _means_cuda(device: object) -> bool:
    """True for the ways in which code spells a CUDA device: 'cuda:0', torch.device('cuda'), an index."""
    if isinstance(device, str):
        return device.startswith("cuda")
    if isinstance(device, torch.device):
        return device.type == "cuda"
    return isinstance(device, int) and not isinstance(device, bool)


def _redirect_factory(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(factory)
    def on_cpu(*args: Any, **kwargs: Any) -> torch.Tensor:
        if _means_cuda(kwargs.get("device")):
            kwargs["device"] = _CPU
        return factory(*args, **kwargs)

    return on_cpu


def _redirect_factories() -> None:
    for name in _FACTORIES:
        setattr(torch, name, _redirect_factory(getattr(torch, name)))


def _redirect_tensor_to() -> None:
    original_to = torch.Tensor.to

    @functools.wraps(original_to)
    def to(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if _means_cuda(kwargs.get("device")):
            kwargs["device"] = _CPU
        if args and _means_cuda(args[0]):
            args = (_CPU, *args[1:])
        return original_to(self, *args, **kwargs)

    torch.Tensor.to = to  # type: ignore[method-assign, assignment]


def _return_self(self: Any, *_args: Any, **_kwargs: Any) -> Any:
    return self


def _keep_cuda_method() -> None:
    torch.Tensor.cuda = _return_self  # type: ignore[method-assign]
    torch.nn.Module.cuda = _return_self  # type: ignore[method-assign]


def _report_cuda_type_strings() -> None:
    original_type = torch.Tensor.type

    @functools.wraps(original_type)
    def type_(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if args or kwargs:
            return original_type(self, *args, **kwargs)
        return original_type(self).replace("torch.", "torch.cuda.", 1)

    torch.Tensor.type = type_  # type: ignore[method-assign, assignment]


def _drop_stream_and_pinning_methods() -> None:
    torch.Tensor.record_stream = _return_self  # type: ignore[method-assign]
    torch.Tensor.pin_memory = _return_self  # type: ignore[method-assign]


# --- torch.cuda: devices ---------------------------------------------------------------------------------


def _physical_memory() -> int:
    """Bytes of main memory of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _answer_device_questions() -> None:
    properties = SimpleNamespace(
        name=_DEVICE_NAME,
        major=_CAPABILITY[0],
        minor=_CAPABILITY[1],
        total_memory=_physical_memory(),
        multi_processor_count=1,
        gcnArchName="",
    )
    cuda: Any = torch.cuda
    cuda.is_available = lambda: True
    cuda.is_initialized = lambda: True
    cuda.current_device = lambda: _CPU  # Megatron passes it on as `device=torch.cuda.current_device()`
    cuda.device_count = lambda: int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    cuda.set_device = lambda device: None
    cuda.device = lambda device=None: contextlib.nullcontext()
    cuda.get_device_properties = lambda device=None: properties
    cuda.get_device_capability = lambda device=None: _CAPABILITY
    cuda.get_device_name = lambda device=None: _DEVICE_NAME
    cuda._lazy_init = lambda: None
    cuda._lazy_call = lambda callback, **kwargs: callback()
    cuda.cudart = _CudaRuntime
    cuda.check_error = lambda result: None


class _CudaRuntime:
    """What ``torch.cuda.cudart()`` returns: every runtime call (the profiler's, mostly) reports success."""

    def __getattr__(self, name: str) -> Callable[..., int]:
        return lambda *args, **kwargs: 0


def _hide_accelerator_api() -> None:
    torch.accelerator.is_available = lambda: False


# --- torch.cuda: streams, events, ranges -----------------------------------------------------------------


class _Event:
    """Work on the CPU is done when its call returns, so an event is the wall clock at ``record()``."""

    def __init__(self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False):
        self._seconds: float | None = None

    def record(self, stream: object = None) -> None:
        self._seconds = time.perf_counter()

    def elapsed_time(self, end_event: _Event) -> float:
        """Milliseconds from this event's ``record()`` to that of `end_event`."""
        if self._seconds is None or end_event._seconds is None:
            raise RuntimeError("Both events must be recorded before calculating elapsed time.")
        return (end_event._seconds - self._seconds) * 1e3

    def wait(self, stream: object = None) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True


class _Stream:
    """The one order in which a CPU process does its work; all streams are this one and compare equal."""

    cuda_stream = 0
    device = _CPU

    def __init__(self, device: object = None, priority: int = 0, **kwargs: Any):
        pass

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *exception: object) -> None:
        pass

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Stream)

    def __hash__(self) -> int:
        return 0

    def wait_stream(self, stream: object) -> None:
        pass

    def wait_event(self, event: object) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True

    def record_event(self, event: _Event | None = None) -> _Event:
        event = event or _Event()
        event.record()
        return event


@contextlib.contextmanager
def _on_stream(stream: object) -> Iterator[object]:
    yield stream


def _replace_streams_and_events() -> None:
    the_stream = _Stream()
    cuda: Any = torch.cuda
    cuda.Event = _Event
    cuda.Stream = _Stream
    cuda.current_stream = lambda device=None: the_stream
    cuda.default_stream = lambda device=None: the_stream
    cuda.set_stream = lambda stream: None
    cuda.stream = _on_stream
    cuda.synchronize = lambda device=None: None
    cuda.is_current_stream_capturing = lambda: False


def _silence_nvtx() -> None:
    nvtx: Any = torch.cuda.nvtx
    nvtx.range_push = lambda message: None
    nvtx.range_pop = lambda: None
    nvtx.range = lambda message, *args, **kwargs: contextlib.nullcontext()


# --- torch.cuda: memory ----------------------------------------------------------------------------------


def _peak_resident_bytes(device: object = None) -> int:
    """The largest resident set this process has had, in bytes (Linux counts ru_maxrss in KiB)."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _resident_bytes(device: object = None) -> int:
    """The resident set of this process now, in bytes; the peak where /proc is missing."""
    try:
        with open("/proc/self/statm") as statm:
            return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return _peak_resident_bytes()


class _MemoryStats(dict[str, int]):
    """``torch.cuda.memory_stats()``: the process's own memory where it means something, 0 elsewhere."""

    def __missing__(self, key: str) -> int:
        return 0


def _memory_stats(device: object = None) -> _MemoryStats:
    stats = _MemoryStats()
    for kind in ("allocated_bytes", "reserved_bytes"):
        stats[f"{kind}.all.current"] = _resident_bytes()
        stats[f"{kind}.all.peak"] = _peak_resident_bytes()
    return stats


def _report_process_memory() -> None:
    cuda: Any = torch.cuda
    cuda.memory_allocated = _resident_bytes
    cuda.memory_reserved = _resident_bytes
    cuda.max_memory_allocated = _peak_resident_bytes
    cuda.max_memory_reserved = _peak_resident_bytes
    cuda.memory_stats = _memory_stats
    cuda.reset_peak_memory_stats = lambda device=None: None
    cuda.empty_cache = lambda: None
    cuda.ipc_collect = lambda: None
    cuda.mem_get_info = lambda device=None: (
        os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES"),
        _physical_memory(),
    )


# --- random numbers --------------------------------------------------------------------------------------


def _get_cpu_rng_state(device: object = "cpu", clone: bool = False, graph_safe: bool = False) -> torch.Tensor:
    return torch.get_rng_state()


def _set_cpu_rng_state(new_state: torch.Tensor, device: object = -1, graph_safe: bool = False) -> None:
    torch.set_rng_state(new_state)


def _use_the_cpu_generator() -> None:
    def manual_seed(seed: int) -> None:
        torch.default_generator.manual_seed(seed)

    cuda: Any = torch.cuda
    for module in (cuda, cuda.random):
        module.get_rng_state = _get_cpu_rng_state
        module.set_rng_state = _set_cpu_rng_state
        module.manual_seed = manual_seed
        module.manual_seed_all = manual_seed


def _use_the_cpu_generator_in_megatron() -> None:
    from megatron.core.tensor_parallel import random

    random._get_cuda_rng_state = _get_cpu_rng_state
    random._set_cuda_rng_state = _set_cpu_rng_state


# --- compilation and collectives -------------------------------------------------------------------------


def _uncompiled(model: Any = None, **options: Any) -> Any:
    return model if model is not None else _return_self


def _disable_torch_compile() -> None:
    torch.compile = _uncompiled


def _as_list(sizes: Any) -> list[int] | None:
    return sizes.tolist() if isinstance(sizes, torch.Tensor) else sizes


def _accept_tensor_split_sizes() -> None:
    original = torch.distributed.all_to_all_single

    @functools.wraps(original)
    def all_to_all_single(
        output: torch.Tensor,
        input: torch.Tensor,
        output_split_sizes: Any = None,
        input_split_sizes: Any = None,
        group: Any = None,
        async_op: bool = False,
    ) -> Any:
        return original(
            output, input, _as_list(output_split_sizes), _as_list(input_split_sizes), group, async_op
        )

    torch.distributed.all_to_all_single = all_to_all_single


def _pad_uneven_all_gather() -> None:
    original = torch.distributed.all_gather

    @functools.wraps(original)
    def all_gather(
        tensor_list: list[torch.Tensor], tensor: torch.Tensor, group: Any = None, async_op: bool = False
    ) -> Any:
        if len({t.shape for t in tensor_list}) <= 1:
            return original(tensor_list, tensor, group, async_op)
        if async_op:
            raise NotImplementedError("gloo gathers parts of unequal length only with async_op=False.")
        longest = max(t.shape[0] for t in tensor_list)
        padded = tensor.new_zeros((longest, *tensor.shape[1:]))
        padded[: tensor.shape[0]] = tensor
        gathered = [torch.empty_like(padded) for _ in tensor_list]
        original(gathered, padded, group)
        for part, whole in zip(tensor_list, gathered, strict=True):
            part.copy_(whole[: part.shape[0]])
        return None

    torch.distributed.all_gather = all_gather


def _satisfy_connection_check() -> None:
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")


# --- the table -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shim:
    """One stand-in: `apply` puts it in place, `why` says what in Megatron needs it."""

    name: str
    why: str
    apply: Callable[[], None]


# Applied before Megatron is imported: it binds some of these names, or calls them, at import time.
SHIMS = (
    Shim(
        "torch.compile",
        "jit_fuser compiles at import, where --disable-jit-fuser is too late: one C++ compiler run per rank",
        _disable_torch_compile,
    ),
    Shim(
        "tensor factories",
        "buffers are allocated with device='cuda' or a device index",
        _redirect_factories,
    ),
    Shim(
        "Tensor.to",
        "batches and states are moved with .to('cuda') or .to(device index)",
        _redirect_tensor_to,
    ),
    Shim(
        "Tensor.cuda, Module.cuda",
        "the model and every batch are moved with .cuda()",
        _keep_cuda_method,
    ),
    Shim(
        "Tensor.type",
        "gradient clipping and the distributed optimizer accept 'torch.cuda.*Tensor' only",
        _report_cuda_type_strings,
    ),
    Shim(
        "record_stream, pin_memory",
        "there are no streams to protect memory from and no memory to pin",
        _drop_stream_and_pinning_methods,
    ),
    Shim(
        "device queries",
        "initialize_megatron asserts that CUDA is there and asks for its properties",
        _answer_device_questions,
    ),
    Shim(
        "torch.accelerator",
        "DataLoader(pin_memory=True) would start a pinning thread for a device",
        _hide_accelerator_api,
    ),
    Shim(
        "streams and events",
        "gradient reduction, pipeline schedules and timers use them",
        _replace_streams_and_events,
    ),
    Shim(
        "nvtx",
        "ranges are pushed around every step",
        _silence_nvtx,
    ),
    Shim(
        "memory statistics",
        "the log prints memory per rank: here the resident set of the process",
        _report_process_memory,
    ),
    Shim(
        "random state",
        "the model-parallel RNG tracker forks the CUDA generator; here the CPU's is the only one",
        _use_the_cpu_generator,
    ),
    Shim(
        "all_to_all_single",
        "the MoE dispatcher turns split sizes into lists only on CUDA, and gloo takes nothing else",
        _accept_tensor_split_sizes,
    ),
    Shim(
        "all_gather",
        "gloo gathers equal parts only; MoE with expert tensor parallelism has unequal ones",
        _pad_uneven_all_gather,
    ),
    Shim(
        "CUDA_DEVICE_MAX_CONNECTIONS",
        "asserted to be 1 under tensor parallelism, where it orders kernels; a CPU has no such queues",
        _satisfy_connection_check,
    ),
)

# Applied once Megatron can be imported.
MEGATRON_SHIMS = (
    Shim(
        "tensor_parallel.random",
        "reads and writes torch.cuda.default_generators directly",
        _use_the_cpu_generator_in_megatron,
    ),
)

_applied: set[str] = set()


def _apply_once(shims: tuple[Shim, ...]) -> None:
    for shim in shims:
        if shim.name not in _applied:
            shim.apply()
            _applied.add(shim.name)


def install() -> None:
    """Put every stand-in of `SHIMS` in place, once; call it before Megatron is imported.

    Raises:
        RuntimeError: an accelerator is present and ``MCE_DEVICE=cpu`` was not set, because the stand-ins
            would hide it from everything in this process.
    """
    if not _applied:
        present = accelerators_present()
        if present and os.environ.get("MCE_DEVICE") != "cpu":
            raise RuntimeError(
                f"CPU stand-ins for torch.cuda refused: this process can use {' and '.join(present)}. "
                "Set MCE_DEVICE=cpu to train on the CPU nevertheless."
            )
    _apply_once(SHIMS)


def install_in_megatron() -> None:
    """Put the stand-ins of `MEGATRON_SHIMS` in place.  Imports megatron.core: call :func:`install` first."""
    _apply_once(MEGATRON_SHIMS)
