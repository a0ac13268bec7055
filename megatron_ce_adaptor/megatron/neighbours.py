"""Who else patches Megatron in this process, and whose functions compute the losses.

Ascend's stack puts MegatronAdaptor, TransformerEngineNPU (a package named ``transformer_engine``) and
MindSpeed beside us. A comparison of native with te means something only if both runs had the same neighbours,
so one rank a machine prints them::

    megatron_ce_adaptor: beside Megatron: {"active": {"megatron_adaptor": "0.18.0"}, "computed by": {...}}

Looks only at what is imported; imports nothing.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib.metadata
import json
import os
import sys
from typing import Any

# Module whose presence means that the package is active -> its distribution.
NEIGHBOURS = {
    "megatron_adaptor": "megatron-adaptor",
    "transformer_engine": "transformer-engine",
    "mindspeed.megatron_adaptor": "mindspeed",
    "mindspeed_llm.megatron_adaptor": "mindspeed-llm",
    "torch_npu": "torch-npu",
}

# What decides the losses: the names of both implementations, and the part of native that MindSpeed replaces
# from --optimization-level 1 on.
_DECISIVE = {
    "te": ("megatron.core.models.common.language_module.language_module", "te_parallel_cross_entropy"),
    "native fused": (
        "megatron.core.models.common.language_module.language_module",
        "fused_vocab_parallel_cross_entropy",
    ),
    "native predicted logits": (
        "megatron.core.tensor_parallel.cross_entropy",
        "VocabParallelCrossEntropy.calculate_predicted_logits",
    ),
    "validate_args": ("megatron.training.arguments", "validate_args"),
}

_OURS = __name__.partition(".")[0]
LINE = "megatron_ce_adaptor: beside Megatron: "


def active() -> dict[str, str]:
    """Module -> version of the neighbours that are imported in this process."""
    return {
        name: _version(name, dist) for name, dist in NEIGHBOURS.items() if sys.modules.get(name) is not None
    }


def owners() -> dict[str, str]:
    """What decides the losses -> whose function stands there now; only what Megatron has imported."""
    found = {}
    for what, (module, path) in _DECISIVE.items():
        value: Any = sys.modules.get(module)
        for name in path.split("."):
            value = vars(value).get(name) if value is not None else None
        if value is not None:
            found[what] = _layers(value)
    return found


def report() -> str:
    """One line with both, as JSON after `LINE`."""
    return LINE + json.dumps({"active": active(), "computed by": owners()})


def report_at_exit() -> None:
    """Let one rank a machine print the line at its end: the user's pretrain script may import neighbours.

    To be called in the rank itself: one that is forked does not run its parent's exit handlers.
    """
    atexit.register(_print_report)


def _print_report() -> None:
    if os.environ.get("LOCAL_RANK") == "0":
        with contextlib.suppress(OSError, ValueError):  # stdout is closed, or its reader is gone
            print(report(), flush=True)


def _layers(function: Any) -> str:
    """`megatron_ce_adaptor over mindspeed.x over megatron.y`: who stands in front of whom, as far as visible.

    A function that replaces another stands over it like one that wraps it; what a closure hides is not seen.
    """
    if isinstance(function, staticmethod | classmethod):
        function = function.__func__
    names: list[str] = []
    seen: set[int] = set()
    while function is not None and id(function) not in seen:
        seen.add(id(function))
        # functools.wraps copies the original's module name; the globals are the wrapper's own.
        namespace = getattr(function, "__globals__", {})
        name = str(namespace.get("__name__") or getattr(function, "__module__", None) or "?")
        name = _OURS if name.partition(".")[0] == _OURS else name
        if names[-1:] != [name]:
            names.append(name)
        function = getattr(function, "__wrapped__", None)
    return " over ".join(names)


def _version(module: str, distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        package = sys.modules.get(module.partition(".")[0])
        return str(getattr(package, "__version__", None) or "version unknown")
