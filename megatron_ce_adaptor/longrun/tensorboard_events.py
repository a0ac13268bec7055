"""The curves of a comparison as TensorBoard event files, one folder a run; needs the package tensorboard."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from .files import write_atomically
from .report import ReportError

# Names under which Megatron's own --tensorboard-dir shows them.
_TAGS = {"lm loss": "lm loss", "grad norm": "grad-norm", "time info": "iteration-time"}
_MS_PER_SECOND = 1000


def write_events(folder: Path, metrics: dict[str, Any]) -> list[Path]:
    """Write one event file for each run of `metrics` and one for the relative errors; returns their paths.

    The clock of a run is the sum of its step times, so that the same metrics give the same bytes.

    Raises:
        ReportError: tensorboard is not installed.
    """
    try:
        from tensorboard.compat.proto import event_pb2
        from tensorboard.summary.writer.record_writer import RecordWriter
    except ImportError as error:
        raise ReportError(
            f"--tensorboard needs the package tensorboard ({error}); pip install tensorboard, or leave the "
            "option out."
        ) from None

    def write(name: str, scalars: list[tuple[float, int, str, float]]) -> Path:
        buffer = io.BytesIO()
        records = RecordWriter(buffer)
        records.write(event_pb2.Event(wall_time=0.0, file_version="brain.Event:2").SerializeToString())
        for seconds, step, tag, value in scalars:
            event = event_pb2.Event(wall_time=seconds, step=step)
            event.summary.value.add(tag=tag, simple_value=value)
            records.write(event.SerializeToString())
        path = folder / name / f"events.out.tfevents.0000000000.{name}"  # no host name, unlike the usual form
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, buffer.getvalue())
        return path

    written = [
        write(name.replace(" ", "_"), _run_scalars(run))
        for name in ("native", "te", "noise floor")
        if (run := metrics.get(name))
    ]
    errors = [
        (0.0, step, f"relative error of {key}, percent", percent)
        for key in ("lm loss", "grad norm")
        for step, percent in zip(
            metrics["comparison"][key]["steps"], metrics["comparison"][key]["percent"], strict=True
        )
        if percent is not None
    ]
    return [*written, write("te_against_native", errors)]


def _run_scalars(run: dict[str, Any]) -> list[tuple[float, int, str, float]]:
    scalars = []
    seconds = 0.0
    for index, step in enumerate(run["iteration"]):
        seconds += (run["time info"][index] or 0.0) / _MS_PER_SECOND
        for key, tag in _TAGS.items():
            value = run[key][index]
            if value is not None:
                scalars.append((seconds, step, tag, value / (_MS_PER_SECOND if key == "time info" else 1)))
    return scalars
