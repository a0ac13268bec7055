"""Launching Triton kernels whose every argument but the tensors is known beforehand.

Triton's JIT looks at each argument of each call to find the compiled variant to run, which takes longer than
a small kernel does. The kernels here have no variants but those that the launch code names: their integers
have fixed types and no special cases for their values (see cuda_kernels). So a call is prepared once for
tensors of a kind, and repeated with the tensors' addresses alone.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import triton
from torch import Tensor

# How a compiled kernel is called differs between versions of Triton; with others each call goes through the
# JIT.
_DIRECT = triton.__version__.startswith("3.6.")

# Looked up once: each dot takes its time.
_current_device: Any = getattr(torch._C, "_cuda_getDevice", None)  # None in builds for the CPU
_current_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)
_runtime: Any = triton.knobs.runtime if _DIRECT else None

# (kernel, device, dtypes and alignments, constants, warps) -> the compiled kernel's launch function and first
# arguments
_compiled: dict[tuple[Any, ...], tuple[Any, tuple[Any, ...], tuple[Any, ...]] | None] = {}


class PreparedCall:
    """A kernel with grid, scalars and constants; call it with the tensors, in the order of its parameters."""

    __slots__ = (
        "_device",
        "_index",
        "_jit",
        "_launch",
        "_leads",
        "_options",
        "_programs",
        "_tail",
        "_variant",
    )

    def __init__(
        self,
        jit: Any,
        programs: int,
        device: torch.device,
        variant: tuple[Any, ...],
        scalars: tuple[int | float, ...],
        constants: tuple[int | bool, ...],
        warps: int,
        leads: tuple[tuple[int, int], ...] = (),
        overlap: bool = False,
    ) -> None:
        """
        Args:
            programs: grid size.
            variant: dtypes and alignments of the tensors, as far as the compiled kernel depends on them.
            scalars, constants: the kernel's parameters after the tensors.
            leads: (position, elements): the kernel is to see this tensor from that many elements before its
                first.
            overlap: launch it before the kernel in front of it on the stream has ended; it waits for that
                one itself.
        """
        self._jit = jit
        self._programs = programs
        self._device = device
        self._index = device.index
        self._tail = (*scalars, *constants)
        self._options = {"num_warps": warps, "launch_pdl": True} if overlap else {"num_warps": warps}
        self._leads = tuple((place, lead) for place, lead in leads if lead)
        self._variant = (id(jit), device.index, variant, constants, warps, overlap)
        self._launch = _compiled.get(self._variant)

    def is_on_current_device(self) -> bool:
        """False if the tensors lie on another CUDA device than the current one."""
        return self._index is None or self._index == _current_device()

    def __call__(self, *tensors: Tensor) -> None:
        """Launches on the current stream of the tensors' device."""
        if self.is_on_current_device():
            self.launch(*tensors)
        else:  # Triton launches on the current device, where the tensors need not be
            with torch.cuda.device(self._index):
                self.launch(*tensors)

    def launch(self, *tensors: Tensor) -> None:
        """The same on the current device, which has to be the tensors'."""
        launched = self._launch
        # A profiler or debugger that hooks into launches is called by the JIT.
        if (
            launched is None
            or _runtime.launch_enter_hook.calls
            or _runtime.launch_exit_hook.calls
            or self._jit.pre_run_hooks
        ):
            self._through_jit(tensors)
            return
        launch, before, after = launched
        pointers = [tensor.data_ptr() for tensor in tensors]
        if self._leads:
            for place, lead in self._leads:
                pointers[place] -= lead * tensors[place].element_size()
        launch(self._programs, 1, 1, _current_stream(self._index), *before, *after, *pointers, *self._tail)

    def _through_jit(self, tensors: tuple[Tensor, ...]) -> None:
        shifted = list(tensors)
        for place, lead in self._leads:
            tensor = tensors[place]
            shifted[place] = tensor.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset() - lead)
        on_device = (
            torch.cuda.device(self._device) if self._device.type == "cuda" else contextlib.nullcontext()
        )
        with on_device:
            compiled = self._jit[(self._programs,)](*shifted, *self._tail, **self._options)
        if _DIRECT and self._device.type == "cuda":
            self._launch = _compiled[self._variant] = _launch_of(compiled)


def _launch_of(compiled: Any) -> tuple[Any, tuple[Any, ...], tuple[Any, ...]] | None:
    """The launch function of a compiled kernel and its arguments after grid and stream; None if it needs
    scratch.
    """
    launcher = compiled.run
    if launcher.global_scratch_size or launcher.profile_scratch_size:
        return None
    before = (compiled.function, launcher.launch_cooperative_grid, launcher.launch_pdl, None, None)
    after = (compiled.packed_metadata, None, None, None)
    return launcher.launch, before, after
