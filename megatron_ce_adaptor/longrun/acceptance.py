"""acceptance.md and acceptance.zh-CN.md: the community task's lines, answered one by one from metrics.json.

The task (Ascend 910B3): Megatron core_r0.18.0, 8 cards TP2 PP2 EP2, enwiki, 2000 steps with native and with
te; loss MAPE <= 2 %, te no slower, memory at most 5 % more; to deliver: logs, scripts, environment. A run
that was another one is not hidden: each line says what was asked, what was run, and whether it is the same.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .formatting import implementation_text, number, percent_text
from .gates import FAIL, PASS
from .run_arguments import SHOWN_ARGUMENTS

TASK_STEPS = 2000
TASK_LAYOUT = {
    "world_size": "8",
    "tensor_model_parallel_size": "2",
    "pipeline_model_parallel_size": "2",
    "expert_model_parallel_size": "2",
}
TASK_DEVICE = "Ascend 910B3"

_Say = Callable[[str, str], str]  # English, Chinese -> the page's language
# In the order of weight: the result of several gates is that of the worst.
_STATUS = {
    FAIL: ("**not met**", "**不满足**"),
    PASS: ("met", "满足"),
    "differs": ("differs from the task", "与任务不同"),
    "same": ("as asked", "与任务一致"),
    "told": ("reported only", "仅报告"),
    "unknown": ("not shown", "未说明"),
}


@dataclass(frozen=True)
class _Line:
    name: str
    asked: str
    measured: str
    status: str


def render_acceptance(metrics: dict[str, Any], environment: dict[str, Any] | None, language: str) -> str:
    """One page in Markdown; `language` is `en` or `zh-CN`. Whatever comes from a log is escaped."""
    chinese = language == "zh-CN"

    def say(english: str, translation: str) -> str:
        return translation if chinese else english

    lines = [
        _layout(metrics, say),
        _device(environment, say),
        _data(metrics, say),
        _steps(metrics, say),
        _complete(metrics, say),
        *_parity(metrics, say),
        _speed(metrics, say),
        _memory(metrics, say),
        _calls(metrics, say),
        _delivered(metrics, environment, say),
    ]
    other = say("[中文](acceptance.zh-CN.md)", "[English](acceptance.md)")
    parts = [
        f"# {say('Acceptance: cross entropy te against native', '验收：交叉熵 te 对比 native')}\n\n{other}",
        _verdict(metrics, lines, say),
        "## " + say("The task, line by line", "任务逐项回答"),
        _table(
            [say("line", "项目"), say("asked", "要求"), say("measured", "实测"), say("result", "结论")],
            [[e.name, e.asked, e.measured, _STATUS[e.status][int(chinese)]] for e in lines],
        ),
        _runs(metrics, say),
        _configuration(metrics, say),
        _environment(environment, say),
        _notes(metrics, say),
        say(
            "Made by `megatron-ce compare` from the logs of this folder; the curves are in `report.html`.",
            "本页由 `megatron-ce compare` 根据本目录日志生成；曲线见 `report.html`。",
        ),
    ]
    return "\n\n".join(filter(None, parts)) + "\n"


def _verdict(metrics: dict[str, Any], lines: list[_Line], say: _Say) -> str:
    loss = metrics["comparison"]["lm loss"]
    passed = metrics["verdict"]["passed"]
    failed = "、".join(_text(g["name"]) for g in metrics["gates"] if g["status"] == FAIL)
    chinese = (
        f"{len(loss['steps'])} 步内 te 与 native 的 lm loss 平均相对误差（MAPE）为 "
        f"{percent_text(loss['mape percent'])}，最大 {percent_text(loss['worst percent'])}"
        f"（第 {loss['worst step']} 步）；" + ("启用的门禁全部满足。" if passed else f"未满足：{failed}。")
    )
    if not metrics["te"]["cross entropy calls"]:
        chinese += "日志中没有 te 的调用记录。"
    sentence = str(metrics["verdict"]["sentence"]).split(": ", 1)[-1]
    word = say("PASS", "通过") if passed else say("FAIL", "不通过")
    text = f"**{word}** — {say(_text(sentence[:1].upper() + sentence[1:]), chinese)}"
    differing = [line.name for line in lines if line.status == "differs"]
    if differing:
        text += "\n\n" + say(
            f"This run is not the task's own: {', '.join(differing)} (below). The verdict is about this run.",
            f"本次运行与任务规定不完全相同：{'、'.join(differing)}（见下表）。结论只针对本次运行。",
        )
    unknown = [line.name for line in lines if line.status == "unknown"]
    if unknown:
        text += "\n\n" + say(
            f"The files do not show: {', '.join(unknown)}.", f"文件中没有说明：{'、'.join(unknown)}。"
        )
    return text


def _layout(metrics: dict[str, Any], say: _Say) -> _Line:
    arguments = metrics["te"]["arguments"]
    name = say("parallel layout", "并行配置")
    asked = say("8 ranks, TP2 PP2 EP2", "8 卡，TP2 PP2 EP2")
    if "world_size" not in arguments:
        return _Line(name, asked, say("the log has no argument dump", "日志中没有参数列表"), "unknown")
    world, *sizes = (_text(arguments.get(argument, "1")) for argument in TASK_LAYOUT)
    measured = say(f"{world} ranks, ", f"{world} 卡，") + "TP{} PP{} EP{}".format(*sizes)
    same = all(arguments.get(argument) == size for argument, size in TASK_LAYOUT.items())
    return _Line(name, asked, measured, "same" if same else "differs")


def _device(environment: dict[str, Any] | None, say: _Say) -> _Line:
    name = say("device", "设备")
    found = device_of(environment)
    return _Line(
        name,
        TASK_DEVICE,
        _text(found) if found else say("no env.json", "没有 env.json"),
        "unknown" if not found else "same" if "910B3" in found else "differs",
    )


def device_of(environment: dict[str, Any] | None) -> str | None:
    """The device in words, from what env.json keeps of npu-smi, nvidia-smi and the CPU; None if unknown."""
    if not environment:
        return None
    variables = environment.get("variables")
    forced = variables.get("MCE_DEVICE") if isinstance(variables, dict) else None
    npu = re.findall(r"\b(?:Ascend ?)?(\d{3}[A-Z]\d?\w*)\b", str(environment.get("npu-smi") or ""))
    if npu and forced in (None, "npu"):
        return f"Ascend {npu[0]}"
    rows = str(environment.get("nvidia-smi") or "").splitlines()[1:]
    if rows and forced in (None, "cuda"):
        names = [row.split(",")[1].strip() for row in rows if row.count(",") > 1]
        return f"{len(names)} x {names[0]}" if names else None
    cpu = environment.get("cpu")
    return f"CPU ({cpu}, {environment.get('cpus usable')} cores)" if cpu else None


def _data(metrics: dict[str, Any], say: _Say) -> _Line:
    arguments = metrics["te"]["arguments"]
    shown = [arguments.get(n) for n in ("data_path", "tokenizer_type", "tokenizer_model")]
    measured = ", ".join(_text(v.strip("[]'")) for v in shown if v and v != "None")
    vocabulary = arguments.get("padded_vocab_size")
    if vocabulary and vocabulary != "None":
        measured += say(f", vocabulary {_text(vocabulary)}", f"，词表 {_text(vocabulary)}")
    measured = measured or say("the log has no argument dump", "日志中没有参数列表")
    named = "enwiki" in str(shown[0]).lower()
    if named:
        measured += say(" (by its name; the log does not say how much of it)", "（按名称；规模日志未说明）")
    return _Line(
        say("data", "数据"),
        "enwiki",
        measured,
        "told" if named else "differs" if any(shown) else "unknown",
    )


def _steps(metrics: dict[str, Any], say: _Say) -> _Line:
    announced = [metrics[run]["announced steps"] for run in ("native", "te")]
    last = [max(metrics[run]["iteration"]) for run in ("native", "te")]
    asked = say(f"{TASK_STEPS} steps with native and with te", f"native 与 te 各 {TASK_STEPS} 步")
    measured = say(
        f"native to step {last[0]} of {announced[0]}, te to step {last[1]} of {announced[1]}",
        f"native 到第 {last[0]}/{announced[0]} 步，te 到第 {last[1]}/{announced[1]} 步",
    )
    same = min(last) >= TASK_STEPS
    return _Line(say("length", "步数"), asked, measured, "same" if same else "differs")


def _complete(metrics: dict[str, Any], say: _Say) -> _Line:
    kinds = {"missing": ("missing", "缺失"), "NaN": ("NaN", "NaN"), "skipped": ("skipped", "跳过")}
    found, status = [], "told"
    gates = {g["name"]: g for g in metrics["gates"]}
    for run in ("native", "te"):
        counts = [f"{say(*words)} {gates[f'{kind} steps, {run}']['value']}" for kind, words in kinds.items()]
        found.append(f"{run}: {', '.join(counts)}")
    names = [f"{kind} steps, {run}" for kind in kinds for run in ("native", "te")]
    status = _worst([gates[name]["status"] for name in (*names, "equal step counts")])
    return _Line(
        say("completeness", "完整性"),
        say("both runs whole, no NaN", "两次运行完整，无 NaN"),
        "; ".join(found),
        status,
    )


def _worst(statuses: list[str]) -> str:
    return FAIL if FAIL in statuses else PASS if PASS in statuses else "told"


def _gate(metrics: dict[str, Any], name: str) -> str:
    return _worst([g["status"] for g in metrics["gates"] if g["name"] == name])


def _parity(metrics: dict[str, Any], say: _Say) -> list[_Line]:
    numbers, limits = metrics["comparison"], metrics["limits"]
    loss, norm, floor = numbers["lm loss"], numbers["grad norm"], numbers["noise floor lm loss"]

    def at_step(error: dict[str, Any]) -> str:
        step = error["worst step"]
        return percent_text(error["worst percent"]) + say(f" at step {step}", f"（第 {step} 步）")

    lines = [
        _Line(
            say("loss MAPE", "loss 平均相对误差（MAPE）"),
            "≤ 2 %" + _own_limit(limits["loss_mape_percent"], 2, "%", say),
            percent_text(loss["mape percent"]),
            _gate(metrics, "loss MAPE"),
        ),
        _Line(
            say("loss, worst step", "loss 最大相对误差"),
            _limit(limits["loss_worst_step_percent"], "%"),
            at_step(loss),
            _gate(metrics, "loss at the worst step"),
        ),
        _Line(
            say("gradient norm deviation", "梯度范数偏差"),
            _limit(limits["grad_norm_mape_percent"], "%"),
            say("mean ", "平均 ") + percent_text(norm["mape percent"])
            + say(", worst ", "，最大 ") + at_step(norm),
            _gate(metrics, "grad norm MAPE"),
        ),
    ]  # fmt: skip
    if floor:
        floor_norm = numbers["noise floor grad norm"]
        lines.append(
            _Line(
                say(
                    "noise floor (native against native, one ulp)", "噪声基线（native 对 native，扰动 1 ulp）"
                ),
                _limit(limits["noise_floor_ratio"], "x"),
                f"loss {percent_text(floor['mape percent'])}"
                + say(", gradient norm ", "，梯度范数 ")
                + percent_text(floor_norm["mape percent"] if floor_norm else None),
                _gate(metrics, "loss MAPE over noise floor"),
            )
        )
    return lines


def _limit(limit: float | None, unit: str) -> str:
    return "–" if limit is None else f"≤ {number(limit)} {unit}"


def _own_limit(limit: float | None, task: float, unit: str, say: _Say) -> str:
    """Said where the gates hold the run to something else than the task does."""
    if limit == task:
        return ""
    return say(" (this run's gate: ", "（本次门禁：") + _limit(limit, unit) + say(")", "）")


def _speed(metrics: dict[str, Any], say: _Say) -> _Line:
    times = metrics["comparison"]["time info"]
    measured = [f"te / native {number(times['ratio'])}"]
    for run in ("native", "te"):
        text = f"{run} {number(times[run]['median ms'])} ms"
        if times[run]["tokens/s"] is not None:
            text += f", {number(round(times[run]['tokens/s']))} tokens/s"
        measured.append(text)
    limits = metrics["limits"]
    return _Line(
        say("step time (median) and throughput", "单步耗时（中位数）与吞吐"),
        say("te no slower than native", "te 不慢于 native")
        + (_own_limit(limits["step_time_ratio"], 1, "x", say) if limits["enforce_step_time"] else ""),
        "; ".join(measured),
        _gate(metrics, "step time, te / native"),
    )


def _memory(metrics: dict[str, Any], say: _Say) -> _Line:
    memory = metrics["comparison"]["memo info"]
    if memory["te peak MB"] is None or memory["native peak MB"] is None:
        measured = say("not measured", "未测量")
    else:
        measured = (
            f"native {number(memory['native peak MB'])} MB, te {number(memory['te peak MB'])} MB; "
            f"te / native {number(memory['worst ratio'])}"
        )
    limits = metrics["limits"]
    return _Line(
        say("peak memory (last stage)", "峰值显存（末级流水）"),
        say("te at most 1.05 x native", "te 不超过 native 的 1.05 倍")
        + (_own_limit(limits["memory_ratio"], 1.05, "x", say) if limits["enforce_memory"] else ""),
        measured,
        _gate(metrics, "peak memory, te / native"),
    )


def _calls(metrics: dict[str, Any], say: _Say) -> _Line:
    calls = metrics["te"]["cross entropy calls"]
    name = say("te really ran", "te 实际被调用")
    asked = say("te at every micro-batch, native never", "每个 micro-batch 调用 te，从不调用 native")
    if not calls:
        return _Line(name, asked, say("the log does not tell", "日志未说明"), _gate(metrics, "te called"))
    callers = [c for c in calls if c["te"]]
    kernels = ", ".join(sorted({_text(implementation_text(c["implementation"])) for c in callers}))
    counts = sorted({c["te"] for c in callers})
    shown = "–".join(number(c) for c in (counts if len(counts) < 3 else (counts[0], counts[-1]))) or "0"
    native = sum(c["native"] for c in calls)
    ranks = ", ".join(str(c["rank"]) for c in callers[:8]) + (", ..." if len(callers) > 8 else "")
    measured = say(
        f"te {shown} calls on each of ranks {ranks or '-'}; native {number(native)}; {kernels or 'none'}",
        f"rank {ranks or '-'} 各调用 te {shown} 次；native {number(native)} 次；{kernels or '无'}",
    )
    gates = ("te called", "native calls in the te run")
    return _Line(name, asked, measured, _worst([_gate(metrics, gate) for gate in gates]))


def _delivered(metrics: dict[str, Any], environment: dict[str, Any] | None, say: _Say) -> _Line:
    return _Line(
        say("to deliver", "交付件"),
        say("logs, scripts, environment", "日志、脚本、环境信息"),
        ", ".join(f"`{_text(metrics[run]['log'])}`" for run in ("native", "te"))
        + ", `cmd.sh`"
        + (", `env.json`" if environment else say("; no env.json", "；没有 env.json")),
        "told",
    )


def _runs(metrics: dict[str, Any], say: _Say) -> str:
    rows = []
    for run in ("native", "te", "noise floor"):
        part = metrics.get(run)
        if part:
            replaced, losses = part["replaced steps"], [v for v in part["lm loss"] if v is not None]
            rows.append(
                [
                    run,
                    f"`{_text(part['log'])}`",
                    number(len(part["iteration"])),
                    f"{number(losses[0], 6)} → {number(losses[-1], 6)}" if losses else "n/a",
                    f"{len(replaced)} ({replaced[0]}–{replaced[-1]})" if replaced else "0",
                ]
            )
    head = [
        say("run", "运行"),
        say("log", "日志"),
        say("lines", "行数"),
        say("loss, first → last", "loss 首 → 末"),
        say("steps repeated after a restart (the later one counts)", "重启后重复的步（以后者为准）"),
    ]
    return f"## {say('The runs', '两次运行')}\n\n{_table(head, rows)}"


def _configuration(metrics: dict[str, Any], say: _Say) -> str:
    arguments = metrics["te"]["arguments"]
    rows = [
        [f"`{name}`", _text(arguments[name])]
        for name in SHOWN_ARGUMENTS
        if arguments.get(name) not in (None, "None", "")
    ]
    forced = [
        [f"`{_text(d['name'])}`", f"native {_text(d['native'])}, te {_text(d['te'])}"]
        for d in metrics["comparison"]["different arguments"]
    ]
    if not rows and not forced:
        return ""
    text = "## " + say("Configuration", "配置")
    if rows:
        text += "\n\n" + _table([say("argument", "参数"), say("value", "值")], rows)
    if forced:
        head = [say("differs (compared with --force)", "不同的参数（--force）"), say("values", "值")]
        text += "\n\n" + _table(head, forced)
    return text


def _environment(environment: dict[str, Any] | None, say: _Say) -> str:
    title = "## " + say("Environment", "环境")
    if not environment:
        return f"{title}\n\n{say('No env.json beside these logs.', '日志旁没有 env.json。')}"
    rows: list[list[str]] = []
    blocks = []
    for key, value in environment.items():
        if isinstance(value, dict):
            rows += [[_text(f"{key}: {k}"), _text(v)] for k, v in value.items() if v is not None]
        elif isinstance(value, str) and "\n" in value:
            fence = "````"  # longer than any that a tool's table holds
            blocks.append(f"{_text(key)}:\n\n{fence}\n{value.replace(fence, '')}\n{fence}")
        elif value is not None:
            rows.append([_text(key), _text(value)])
    return "\n\n".join([title, _table([say("what", "项目"), say("value", "值")], rows), *blocks])


def _notes(metrics: dict[str, Any], say: _Say) -> str:
    notes = metrics["comparison"]["notes"]
    if not notes:
        return ""
    items = "\n".join(f"- {_text(note)}" for note in notes)
    return f"## {say('Notes', '备注（原文为英文）')}\n\n{items}"


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _text(value: Any) -> str:
    """Text of a log in a cell: on one line, and neither a column, HTML nor emphasis of its own."""
    text = " ".join(str(value).split()).replace("&", "&amp;").replace("<", "&lt;")
    return re.sub(r"([\\|*`\[\]])", r"\\\1", text)
