"""The limits a comparison is held to, and the outcome of each."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PASS, FAIL, NOT_ENFORCED = "pass", "fail", "not enforced"


class GatesError(Exception):
    """A gates file that cannot be used; the message is one sentence for the user."""


@dataclass(frozen=True)
class Gates:
    """Limits; `None` means: report the number, no verdict. configs/gates.yaml tells where each is from."""

    loss_mape_percent: float | None = 2.0
    loss_worst_step_percent: float | None = None
    grad_norm_mape_percent: float | None = 10.0
    max_missing_steps: int = 0
    max_nan_steps: int = 0
    max_skipped_steps: int = 0
    require_te_calls: bool = True
    enforce_step_time: bool = False
    step_time_ratio: float = 1.0
    enforce_memory: bool = False
    memory_ratio: float = 1.05
    warm_up_steps: int = 5
    noise_floor_ratio: float | None = None


@dataclass(frozen=True)
class Outcome:
    """One gate: what was measured, the limit, `pass` / `fail` / `not enforced`, and a sentence."""

    name: str
    value: float | int | str | None
    limit: float | int | str | None
    unit: str
    status: str
    sentence: str


def default_gates_file() -> Path:
    """configs/gates.yaml: beside the package in a checkout, inside it in a wheel."""
    package = Path(__file__).resolve().parent.parent
    for folder in (package / "configs", package.parent / "configs"):
        if (folder / "gates.yaml").is_file():
            return folder / "gates.yaml"
    raise GatesError("configs/gates.yaml is missing from this installation; name a gates file with --gates.")


def load_gates(path: str | Path | None = None) -> Gates:
    """Gates from a YAML mapping; keys left out keep their defaults. Raises GatesError."""
    import yaml

    path = Path(path) if path is not None else default_gates_file()
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise GatesError(f"The gates file {path} cannot be read: {error.strerror or error}.") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise GatesError(f"The gates file {path} is not YAML: {' '.join(str(error).split())}.") from None
    if content is None:
        content = {}
    if not isinstance(content, dict):
        raise GatesError(f"The gates file {path} must be a mapping such as `loss_mape_percent: 2.0`.")
    return gates_from_mapping(content, str(path))


def gates_from_mapping(content: dict[str, Any], source: str) -> Gates:
    """Gates from a mapping, checked key by key; `source` names it in errors."""
    defaults = {f.name: (f.default, str(f.type)) for f in dataclasses.fields(Gates)}
    for key, value in content.items():
        if key not in defaults:
            raise GatesError(f"{source}: unknown gate {key!r}; known are {', '.join(sorted(defaults))}.")
        kind = defaults[key][1]
        if kind == "bool":
            good, expected = isinstance(value, bool), "true or false"
        elif value is None:
            good, expected = "None" in kind, "a number"
        else:
            number = int if kind == "int" else (int, float)
            good = isinstance(value, number) and not isinstance(value, bool) and 0 <= value < float("inf")
            expected = "a whole number of 0 or more" if kind == "int" else "a number of 0 or more"
            expected += " or null" if "None" in kind else ""
        if not good:
            raise GatesError(f"{source}: {key} is {value!r}; expected {expected}.")
    return Gates(**content)
