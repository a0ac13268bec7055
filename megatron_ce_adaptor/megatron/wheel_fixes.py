"""What Megatron-Core's wheel needs before it trains, on any device.

The wheel is built for use as a library inside Megatron-LM or NeMo.  Two things keep the training loop it
ships from running without those, TransformerEngine and apex:

* ``compile_helpers`` runs ``make`` in a folder whose Makefile is not in the wheel, and exits the process when
  that fails, although the compiled helpers are there.
* ``WrappedTorchNorm``, the norm of the local layers, refuses sequence parallelism, which Megatron requires
  for MoE with tensor parallelism.  Nothing in the norm itself depends on it: the parameters only have to be
  marked, so that their gradients are summed over the tensor-parallel group.

:func:`apply` mends exactly these cases and leaves a source checkout with a Makefile alone.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any


def require_compiled_helpers() -> None:
    """Stand in for ``compile_helpers`` where there is nothing to compile from.

    Raises:
        RuntimeError: the wheel carries no ``helpers_cpp`` for this interpreter.
    """
    if importlib.util.find_spec("megatron.core.datasets.helpers_cpp") is None:
        raise RuntimeError(
            "megatron.core.datasets.helpers_cpp is missing and there is no Makefile to build it: install the "
            "megatron-core wheel of this Python version, or set MEGATRON_PATH to a Megatron-LM checkout."
        )


def _fix_compile_helpers() -> None:
    dataset_utils = importlib.import_module("megatron.core.datasets.utils")
    assert dataset_utils.__file__ is not None
    if not Path(dataset_utils.__file__).with_name("Makefile").is_file():
        dataset_utils.compile_helpers = require_compiled_helpers  # type: ignore[attr-defined]


def _allow_sequence_parallel(original_new: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original_new)
    def new(cls: type, config: Any, *args: Any, **kwargs: Any) -> Any:
        if not config.sequence_parallel:
            return original_new(cls, config, *args, **kwargs)
        # The original only reads the configuration, so hide the flag from it; its other checks stay.
        config.sequence_parallel = False
        try:
            norm = original_new(cls, config, *args, **kwargs)
        finally:
            config.sequence_parallel = True
        for parameter in norm.parameters():
            parameter.sequence_parallel = True
        return norm

    return new


def _fix_torch_norm() -> None:
    torch_norm: ModuleType = importlib.import_module("megatron.core.transformer.torch_norm")
    norm_class = torch_norm.WrappedTorchNorm
    # The class is bound by name in the layer specs, so its constructor is replaced, not the class.
    if not hasattr(norm_class.__new__, "__wrapped__"):
        norm_class.__new__ = _allow_sequence_parallel(norm_class.__new__)


def apply() -> None:
    """Apply both fixes; calling it again changes nothing."""
    _fix_compile_helpers()
    _fix_torch_norm()
