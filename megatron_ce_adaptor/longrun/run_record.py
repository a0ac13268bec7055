"""What a launch leaves beside its log: ``<name>.status.json`` and ``cmd.sh``."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from megatron_ce_adaptor.longrun.config import Layout, RunConfig, referenced_variables
from megatron_ce_adaptor.longrun.files import strict_json, write_atomically


@dataclass
class LaunchStatus:
    """How one run ended; `complete` only if it exited with 0 and its log reaches the last announced step."""

    implementation: str
    exit_code: int | None  # None while the run goes on, and for ever if the launcher itself was killed
    steps: int
    complete: bool
    world_size: int
    last_stage_ranks: list[int]
    micro_batches_per_step: int
    sequence_length: int
    global_batch_size: int
    message: str

    @classmethod
    def of_started(cls, implementation: str, steps: int, layout: Layout) -> LaunchStatus:
        return cls(
            implementation=implementation,
            exit_code=None,
            steps=steps,
            complete=False,
            world_size=layout.world_size,
            last_stage_ranks=layout.last_stage_ranks,
            micro_batches_per_step=layout.micro_batches_per_step,
            sequence_length=layout.sequence_length,
            global_batch_size=layout.global_batch_size,
            message="The run has not ended.",
        )

    def write(self, folder: Path, name: str) -> None:
        write_atomically(folder / f"{name}.status.json", strict_json(asdict(self)))


def write_commands(
    folder: Path,
    name: str,
    config: RunConfig,
    variables: Mapping[str, str],
    exports: Mapping[str, str],
    modules: Sequence[str],
    processes: int,
) -> None:
    """Write or extend ``folder/cmd.sh``, which starts the runs of this folder again: ``bash cmd.sh native``.

    It holds no path of this machine: variables of the configuration stay variables, paths below the working
    directory are written relative to it, and a variable that held another path must be set by the reader.

    Args:
        name: of the run, and of the function in the script.
        variables: the environment that the run was started with.
        exports: variables that the launcher adds, beside ENV_VARS.
        modules: torchrun's module, and torchrun's words for what it runs, such as ``-m package.module``.
    """
    path = folder / "cmd.sh"
    blocks = _blocks_of(path)
    lines = [f"{name}() {{"]
    for variable in sorted(_caller_variables(config)):
        if variables.get(variable) and variable != "OUT_DIR":
            lines.append("  " + _caller_assignment(variable, variables[variable]))
    for variable, value in {**exports, **config.environment}.items():
        if variable != "OUT_DIR":
            lines.append(f"  export {variable}={_shell_word(_portable(value))}")
    words = [
        f'"$PYTHON" -m {modules[0]}',
        f'--nproc-per-node {processes} --nnodes "${{NNODES:-1}}" --node-rank "${{NODE_RANK:-0}}"',
        '--master-addr "${MASTER_ADDR:-127.0.0.1}" --master-port "${MASTER_PORT:-29500}"',
        " ".join(_shell_word(_portable(word)) for word in modules[1:]),
    ]
    for flag, values in config.flags():
        optional = re.fullmatch(r"\$\{(\w+):-\}", values[0]) if len(values) == 1 else None
        if optional:  # left out while the variable is not set
            words.append(f'${{{optional[1]}:+{flag} "${{{optional[1]}}}"}}')
        else:
            words.append(" ".join([flag, *(_shell_word(_portable(value)) for value in values)]))
    lines += ["  " + " \\\n    ".join(words), "}"]
    blocks[name] = "\n".join(lines)
    text = _HEADER.format(home=_way_back(folder))
    for run, block in sorted(blocks.items()):
        text += f"\n# >>> {run}\n{block}\n# <<< {run}\n"
    text += f'\nfor run in "${{@:-{name}}}"; do "$run"; done\n'
    write_atomically(path, text)
    path.chmod(path.stat().st_mode | 0o111)


_HEADER = """\
#!/usr/bin/env bash
# The commands of this folder's runs: bash cmd.sh [native] [te]
# PYTHON is an interpreter with the packages of env.json; OUT_DIR is where a run may write.
set -euo pipefail
{home}
PYTHON="${{PYTHON:-.venv/bin/python}}"
export OUT_DIR="${{OUT_DIR:-runs/again}}"
mkdir -p "$OUT_DIR"
"""
_BLOCK = re.compile(r"^# >>> (?P<name>\w+)\n(?P<block>.*?)\n# <<< (?P=name)$", re.MULTILINE | re.DOTALL)


def _blocks_of(path: Path) -> dict[str, str]:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return {}
    return {match["name"]: match["block"] for match in _BLOCK.finditer(text)}


def _way_back(folder: Path) -> str:
    """The line that changes from the script's folder to the working directory of the run."""
    here = Path.cwd().resolve()
    folder = folder.resolve()
    if folder.is_relative_to(here):
        return f'cd "$(dirname "${{BASH_SOURCE[0]}}")/{os.path.relpath(here, folder)}"'
    return 'cd "${REPO:?set REPO to the checkout of megatron_ce_adaptor}"'


def _caller_variables(config: RunConfig) -> set[str]:
    texts = [word for _, words in config.flags() for word in words] + list(config.environment.values())
    return {name for text in texts for name in referenced_variables(text)} - set(config.environment)


def _caller_assignment(name: str, value: str) -> str:
    portable = _portable(value)
    if os.path.isabs(portable):
        return f': "${{{name}:?set {name} to what the run had as {os.path.basename(value)}}}"'
    return f'export {name}="${{{name}:-{_escape(portable)}}}"'


def _portable(text: str) -> str:
    """A path at or below the working directory made relative to it; any other text as it is."""
    here = str(Path.cwd().resolve())
    if text == here:
        return "."
    return text[len(here) + 1 :] if text.startswith(here + "/") else text


def _escape(text: str) -> str:
    return re.sub(r'([\\"`])|\$(?!\{)', lambda m: "\\" + m[0], text)


def _shell_word(text: str) -> str:
    """`text` for a shell, its ``${...}`` references alive."""
    if re.fullmatch(r"[\w@%+=:,./-]+", text):
        return text
    return f'"{_escape(text)}"'
