"""How numbers are written for people, the same in the printed table, the sentences and the report."""

from __future__ import annotations

import math
from typing import Any

_IMPLEMENTATIONS = {
    "reference": "PyTorch reference",
    "cuda": "Triton kernels for CUDA",
    "cuda (interpreter)": "Triton kernels for CUDA in the interpreter",
    "ascend": "Triton kernels for Ascend",
    "ascend (interpreter)": "Triton kernels for Ascend in the interpreter",
    "vendor": "the vendor's F.cross_entropy",
}


def number(value: Any, digits: int = 4) -> str:
    """`digits` significant digits, thousands separated, no exponent down to 1e-7; `n/a` for None and NaN."""
    if value is None:
        return "n/a"
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return str(value)
    if isinstance(value, int):
        return f"{value:,}"
    if not math.isfinite(value):
        return "n/a"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    if 1e-7 <= abs(value) < 1e-3:
        return (
            f"{value:.{1 - math.floor(math.log10(abs(value)))}f}"  # two digits are enough of a small number
        )
    return f"{value:.{digits}g}"


def percent_text(value: float | None, digits: int = 4) -> str:
    """`0.1828 %`; `n/a` for None."""
    text = number(value, digits)
    return text if text == "n/a" else f"{text} %"


def implementation_text(name: str) -> str:
    """What the name in a rank's exit line means: `cuda` alone reads as a device. Unknown names stay."""
    return _IMPLEMENTATIONS.get(name, name)
