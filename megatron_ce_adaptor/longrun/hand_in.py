"""Complete a compared run folder for handing in: scripts, readable environment, checksums, a page about all.

    python -m megatron_ce_adaptor.longrun.hand_in DIR [--scripts FILE|FOLDER ...]

Exit status: 0 the folder is complete, 1 something is missing (it is named) or the two runs had different
packages beside Megatron.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_ce_adaptor.longrun import environment
from megatron_ce_adaptor.longrun.files import write_atomically
from megatron_ce_adaptor.longrun.resume import FOLDER as CHECKPOINTS

README, ENVIRONMENT, CHECKSUMS, SCRIPTS = "README.md", "environment.txt", "sha256sums.txt", "scripts"

# What the community task asks for (result logs, test scripts, environment), and what shows the verdict.
_NEEDED = {
    "native.log": "log of the native run / 基线（native）日志",
    "te.log": "log of the te run / 实验（te）日志",
    "native.status.json": "how the native run ended / 基线运行状态",
    "te.status.json": "how the te run ended / 实验运行状态",
    "metrics.json": "numbers of every step and the verdict / 逐步数据与结论",
    "report.html": "curves and gates, open it in a browser / 报告（曲线与门禁）",
    "env.json": "environment, for programs / 环境信息（JSON）",
    "cmd.sh": "starts both runs again / 复现命令",
}


class Incomplete(Exception):
    """The folder cannot be handed in; the message is one sentence."""


def complete(folder: Path, scripts: Sequence[Path] = ()) -> None:
    """Write README.md, environment.txt, scripts/ and sha256sums.txt into `folder`.

    Raises:
        Incomplete: a file of the long run is missing, or the two runs had different packages beside Megatron.
        OSError: the folder cannot be written.
    """
    missing = [name for name in _NEEDED if not (folder / name).is_file()]
    if missing:
        raise Incomplete(
            f"{folder} cannot be handed in yet: {', '.join(missing)} is missing; run both and compare."
        )
    _check_neighbours(folder)
    facts = json.loads((folder / "env.json").read_text(encoding="utf-8"))
    write_atomically(folder / ENVIRONMENT, readable(facts))
    _copy_scripts(folder / SCRIPTS, scripts)
    metrics = json.loads((folder / "metrics.json").read_text(encoding="utf-8"))
    write_atomically(folder / README, _page(folder, metrics, facts))
    write_atomically(folder / CHECKSUMS, _checksums(folder))


def readable(facts: dict[str, Any]) -> str:
    """env.json as text: one fact a line, nested ones indented, several lines kept as they are."""
    lines: list[str] = []

    def write(name: str, value: Any, indent: str) -> None:
        if value is None:
            lines.append(f"{indent}{name}: not found")
        elif isinstance(value, dict):
            lines.append(f"{indent}{name}:")
            for key, inner in value.items():
                write(str(key), inner, indent + "  ")
        elif isinstance(value, str) and "\n" in value:
            lines.append(f"{indent}{name}:")
            lines.extend(f"{indent}  {line}" for line in value.splitlines())
        else:
            lines.append(f"{indent}{name}: {value}")

    for key, value in facts.items():
        write(key, value, "")
    return "\n".join(lines) + "\n"


def _check_neighbours(folder: Path) -> None:
    """MindSpeed changes native: a comparison across it would not be one of the cross entropies."""
    told = [
        environment.with_neighbours({}, folder / f"{run}.log").get("beside Megatron", {}).get("active")
        for run in ("native", "te")
    ]
    if None not in told and told[0] != told[1]:
        raise Incomplete(
            f"{folder} compares runs of two stacks: beside Megatron native had {_names(told[0])}, te had "
            f"{_names(told[1])}; repeat one of them."
        )


def _names(active: dict[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in active.items()) or "nothing"


def _copy_scripts(target: Path, sources: Sequence[Path]) -> None:
    shutil.rmtree(target, ignore_errors=True)
    for source in sources:
        files = sorted(source.glob("*.sh")) if source.is_dir() else [source]
        for file in files:
            target.mkdir(exist_ok=True)
            shutil.copy2(file, target / file.name)


def _page(folder: Path, metrics: dict[str, Any], facts: dict[str, Any]) -> str:
    verdict = metrics.get("verdict") or {}
    sentence = verdict.get("sentence") if isinstance(verdict, dict) else str(verdict)
    lines = [
        "# Long run: native against te / 长跑：native 对比 te",
        "",
        str(sentence or "see metrics.json"),
        "",
        "| gate / 门禁 | value / 结果 | limit / 要求 | |",
        "|---|---|---|---|",
        *(_gate_row(gate) for gate in metrics.get("gates") or []),
        "",
        f"MindSpeed active / MindSpeed 是否生效: {facts.get('mindspeed active')}",
        "",
        "| file / 文件 | what / 内容 |",
        "|---|---|",
        *(f"| {name} | {what} |" for name, what in _NEEDED.items()),
        f"| {ENVIRONMENT} | the same, to read / 环境信息（可读） |",
    ]
    optional = {
        "acceptance.md": "the task's lines, answered one by one / 任务逐项回答（英文）",
        "acceptance.zh-CN.md": "the same in Chinese / 任务逐项回答（中文）",
        "report.png": "the curves as a picture / 曲线图",
        "gates.yaml": "limits that differ from the defaults / 本次门禁",
        f"{SCRIPTS}/": "the scripts and the configuration / 测试脚本与配置",
    }
    lines += [f"| {name} | {what} |" for name, what in optional.items() if (folder / name).exists()]
    lines += [f"| {CHECKSUMS} | checksums of all of these / 校验和 |", ""]
    return "\n".join(lines)


def _gate_row(gate: dict[str, Any]) -> str:
    value, limit = gate.get("value"), gate.get("limit")
    shown = f"{value:.4g}" if isinstance(value, float) else str(value)
    unit = f" {gate['unit']}" if gate.get("unit") and value is not None else ""
    return (
        f"| {gate.get('name')} | {shown}{unit} | {'-' if limit is None else limit} | {gate.get('status')} |"
    )


def _checksums(folder: Path) -> str:
    files = sorted(
        file
        for file in folder.rglob("*")
        if file.is_file()
        and file.name != CHECKSUMS
        and not file.name.startswith(".")
        and file.relative_to(folder).parts[0] != CHECKPOINTS
    )
    return "".join(
        f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.relative_to(folder)}\n" for file in files
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of ``python -m megatron_ce_adaptor.longrun.hand_in``."""
    parser = argparse.ArgumentParser(
        prog="hand_in", description=__doc__.partition("\n")[0] if __doc__ else None
    )
    parser.add_argument("folder", type=Path, metavar="DIR")
    parser.add_argument("--scripts", type=Path, nargs="*", default=[], metavar="FILE|FOLDER")
    args = parser.parse_args(argv)
    try:
        complete(args.folder, args.scripts)
    except (Incomplete, OSError, ValueError) as error:
        print(f"hand_in: {error}", file=sys.stderr)
        return 1
    print(f"{args.folder} is ready to hand in; {args.folder / README} lists what it holds.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
