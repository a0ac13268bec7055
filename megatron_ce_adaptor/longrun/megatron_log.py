"""Read what Megatron prints while it trains: a log file in, a `TrainingLog` out.

Understood: the iteration lines of Megatron-LM / Megatron-Core 0.12 to 0.19, MindSpeed-LLM (the same lines,
with a few more fields), Megatron-Bridge (memory in GB), Megatron-DeepSpeed (seconds a step) and forks that
print `value/mean` pairs; the memory lines; the argument dump; and the line in which every rank of ours says
at exit which cross entropy it called. Text of other ranks in between, `[default0]:` prefixes, colour codes,
broken records, lines that several ranks print, restarts in the same file, gzip and UTF-16 are all expected.
"""

from __future__ import annotations

import codecs
import contextlib
import gzip
import math
import re
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Protocol

# The one place that knows how a rank reports its calls at exit, e.g.
# `[rank 7] cross entropy: te 200 calls, native 0 calls, implementation reference`.
CROSS_ENTROPY_CALLS = re.compile(
    r"(?:\[rank (?P<rank>\d+)\] )?cross entropy: te (?P<te>\d+) calls"
    r"(?:, native (?P<native>\d+) calls)?, implementation (?P<implementation>[\w.\-]+(?: \(\w+\))?)"
)

_HEAD = re.compile(r"iteration\s+(\d+)\s*/\s*(\d+)\s*\|")
_END = re.compile(r"number of nan\s*iterations:\s*\d+\s*(?:\||$)")
_MEMORY = re.compile(
    r"\[Rank (\d+)\] \(after \d+ iterations\) memory \((MB|GB)\)((?: \| [a-z\- ]+: [\d.]+)+)"
)
# Megatron's names, and those of Megatron-Bridge.
_ALLOCATED = ("allocated", "mem-allocated-gigabytes")
_MAX_ALLOCATED = ("max allocated", "mem-max-allocated-gigabytes")
_ARGUMENT = re.compile(r"^\s*([A-Za-z_]\w*) \.*\s?(.*)$")
# Behind a collector's time stamp, or what another rank has printed without ending its line yet.
_ARGUMENT_LATER_IN_LINE = re.compile(r"\S {2,}([A-Za-z_]\w*) \.{3,} (.*)$")
_LOADED = re.compile(r"successfully loaded checkpoint .* at iteration (\d+)")
_EXITING = re.compile(r"exiting program at iteration (\d+)")
_ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_LAUNCHER_PREFIX = re.compile(r"^\s*(?:\[[A-Za-z_.\-]+\d+\]:|\d+: )")

_LONGEST_LINE = 1 << 20  # a binary file has no line ends; never read it whole into memory
_CONTINUATION_LINES = 40  # other ranks' lines that may stand inside one broken record
_SLOWEST_PRINTER = 2  # steps by which a second rank that prints the same lines may lag behind the first
_FIELDS = {
    "lm loss": "lm_loss",
    "loss": "lm_loss",
    "grad norm": "grad_norm",
    "elapsed time per iteration (ms)": "time_ms",
    "elapsed time per iteration (s)": "time_s",
    "learning rate": "learning_rate",
    "global batch size": "global_batch_size",
    "loss scale": "loss_scale",
    "throughput per GPU (TFLOP/s/GPU)": "tflops_per_device",
    "number of skipped iterations": "skipped",
    "number of nan iterations": "nan",
}
_PAIR = re.compile(r"([^|:]+):\s*([^\s|]+)\s*\|")
_CLEAN_FIELD = re.compile(r"\s*[\w \-/().%]+:\s*[\w.+\-/]+\s*")


class LogError(Exception):
    """A log that cannot be used; the message is one sentence for the user."""


@dataclass(slots=True)
class Step:
    """One iteration line. `None`: not printed or unreadable; NaN: the run produced NaN."""

    iteration: int
    lm_loss: float | None = None
    grad_norm: float | None = None
    time_ms: float | None = None
    learning_rate: float | None = None
    global_batch_size: float | None = None
    loss_scale: float | None = None
    tflops_per_device: float | None = None
    skipped: int = 0
    nan: int = 0


@dataclass(slots=True)
class RankMemory:
    """Device memory of one rank in MB (2**20 bytes), the largest values its lines reported."""

    allocated: float = 0.0
    max_allocated: float = 0.0


@dataclass(slots=True)
class CrossEntropyCalls:
    """How often one rank called each cross entropy, summed over restarts."""

    te: int = 0
    native: int = 0
    implementation: str = ""


@dataclass
class TrainingLog:
    """One training run as its log tells it.

    `steps` is keyed by iteration, in ascending order. `replaced` are iterations that were printed again after
    a restart (the later line counts); `damaged` are iterations whose line could not be read whole; `repeated`
    counts lines that another rank of the same attempt printed too. `loaded_iteration` is the checkpoint
    before the first of `steps`, `exit_iteration` where the latest attempt was told to stop. `truncated` says
    how a log that ends early ends, where such a log was allowed.
    """

    name: str  # of the file alone: it goes into results that are shared
    source: str = ""  # the path as the user gave it: for messages, nothing else
    steps: dict[int, Step] = field(default_factory=dict)
    announced_steps: int = 0
    arguments: dict[str, str] = field(default_factory=dict)
    memory: dict[int, RankMemory] = field(default_factory=dict)
    calls: dict[int, CrossEntropyCalls] = field(default_factory=dict)
    replaced: list[int] = field(default_factory=list)
    damaged: list[int] = field(default_factory=list)
    starts: int = 0
    loaded_iteration: int = 0
    exit_iteration: int | None = None
    lines: int = 0
    last_record_cut: bool = False
    repeated: int = 0
    truncated: str = ""

    @property
    def label(self) -> str:
        """What a message calls this log; two logs of one base name are told apart."""
        return self.source or self.name

    @property
    def iterations(self) -> list[int]:
        return list(self.steps)

    @property
    def expected_last(self) -> int:
        """The step the run meant to reach: `--train-iters`, or where `--exit-interval` told it to stop."""
        if self.exit_iteration is not None:
            return min(self.announced_steps, self.exit_iteration)
        return self.announced_steps

    @property
    def log_interval(self) -> int:
        """Steps between two lines: `--log-interval`, else the commonest distance seen."""
        told = self.argument_int("log_interval")
        if told:
            return told
        numbers = self.iterations
        distances = Counter(b - a for a, b in pairwise(numbers))
        return distances.most_common(1)[0][0] if distances else 1

    @property
    def missing_steps(self) -> list[int]:
        """Iterations that should have a line and have none, ascending."""
        interval = self.log_interval
        # The first line of a log that continues a checkpoint follows that checkpoint; the steps before it are
        # elsewhere.
        start = self.loaded_iteration if self.loaded_iteration < min(self.steps, default=1) else 0
        first = (start // interval + 1) * interval
        return [i for i in range(first, self.expected_last + 1, interval) if i not in self.steps]

    @property
    def nan_steps(self) -> list[int]:
        return [
            s.iteration
            for s in self.steps.values()
            if s.nan or _not_finite(s.lm_loss) or (_not_finite(s.grad_norm) and not s.skipped)
        ]

    @property
    def skipped_steps(self) -> list[int]:
        return [s.iteration for s in self.steps.values() if s.skipped]

    @property
    def sequence_length(self) -> int | None:
        return self.argument_int("seq_length")

    @property
    def global_batch_size(self) -> int | None:
        sizes = [s.global_batch_size for s in self.steps.values() if s.global_batch_size]
        return int(sizes[-1]) if sizes else self.argument_int("global_batch_size")

    @property
    def micro_batches_per_step(self) -> int | None:
        """Micro-batches each pipeline runs in one step, if the argument dump tells."""
        batch, micro = self.global_batch_size, self.argument_int("micro_batch_size")
        data_parallel = self.argument_int("data_parallel_size")
        return batch // (micro * data_parallel) if batch and micro and data_parallel else None

    @property
    def last_stage_ranks(self) -> list[int] | None:
        """Ranks of the last pipeline stage, which compute the loss, if the argument dump tells."""
        world, stages = self.argument_int("world_size"), self.argument_int("pipeline_model_parallel_size")
        if not world or not stages or self.arguments.get("use_tp_pp_dp_mapping") == "True":
            return None
        return list(range(world - world // stages, world))

    @property
    def mindspeed_active(self) -> bool | None:
        """Whether MindSpeed's own arguments are in the dump; None without a dump."""
        return "optimization_level" in self.arguments if self.arguments else None

    def argument_int(self, name: str) -> int | None:
        value = self.arguments.get(name, "")
        return int(value) if value.isdigit() else None


def parse_log(path: str | Path, *, allow_truncated: bool = False) -> TrainingLog:
    """Parse the log at `path` (text, UTF-16 text or gzip).

    Raises LogError if it is missing, empty, foreign, broken, or, unless `allow_truncated`, truncated.
    """
    path = Path(path)
    if path.is_dir():
        raise LogError(f"{path} is a folder; give a log file, or a run folder with native.log and te.log.")
    try:
        with _opened(path) as lines:
            return _Parser(path, allow_truncated).parse(lines)
    except FileNotFoundError:
        raise LogError(f"{path} does not exist.") from None
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise LogError(f"{path} is a damaged or cut gzip file ({error}); copy it again.") from None
    except OSError as error:
        raise LogError(f"{path} cannot be read: {error.strerror or error}.") from None


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[_Lines]:
    """The log's bytes, unpacked, as UTF-8 where its first bytes say that it is something else."""
    with path.open("rb") as handle:
        magic = handle.read(2)
        handle.seek(0)
        if magic == b"\x1f\x8b":
            with gzip.open(handle) as unpacked:
                yield unpacked
        elif magic in (
            codecs.BOM_UTF16_LE,
            codecs.BOM_UTF16_BE,
        ):  # what PowerShell's `>` and Tee-Object write
            yield codecs.EncodedFile(handle, "utf-8", "utf-16", "replace")
        else:
            yield handle


def _not_finite(value: float | None) -> bool:
    return value is not None and not math.isfinite(value)


def _number(text: str) -> float | None:
    """`183.2`, `nan`, or a fork's `183.2/185.0` (this step / running mean)."""
    try:
        return float(text.split("/", 1)[0]) if "/" in text else float(text)
    except ValueError:
        return None


class _Lines(Protocol):
    def readline(self, size: int, /) -> bytes: ...


class _Parser:
    """The state of one pass over a log."""

    def __init__(self, path: Path, allow_truncated: bool) -> None:
        self.log = TrainingLog(path.name, source=str(path))
        self.allow_truncated = allow_truncated
        self.starts_at: dict[int, int] = {}  # iteration -> the attempt that printed it
        self.open_record: tuple[int, int] | None = None  # iteration, announced
        self.open_text = ""
        self.open_lines = 0
        self.in_arguments = False
        self.attempt_loaded = 0  # the checkpoint that the current attempt continues
        self.saw_end_field = False
        self.last_line = b""
        self.last_error = ""

    def parse(self, handle: _Lines) -> TrainingLog:
        for raw in iter(lambda: handle.readline(_LONGEST_LINE), b""):
            self.log.lines += 1
            interesting = (
                self.open_record is not None
                or self.in_arguments
                or b"iteration" in raw
                or b"cross entropy:" in raw
                or b"arguments ---" in raw
                or b"Error" in raw
            )
            if interesting:
                self._line(_clean(raw))
            if len(raw) > 2:
                self.last_line = raw
        self._close_record(at_end=True)
        self._check()
        self.log.steps = dict(sorted(self.log.steps.items()))
        return self.log

    def _line(self, text: str) -> None:
        if "arguments ---" in text:
            self._argument_banner(text)
            return
        if self.in_arguments:
            match = _ARGUMENT_LATER_IN_LINE.search(text) or _ARGUMENT.match(text)
            if match and ("..." in text or len(match[1]) >= 45):
                self.log.arguments[match[1]] = match[2].strip()
                return
        # torchrun's ChildFailedError only says that a rank failed; the rank's own words say why.
        if "Error" in text and re.match(r"(?!.*ChildFailedError)[\w.]*Error\b", text.strip()):
            self.last_error = text.strip()
        self._other_lines(text)
        self._record_text(text)

    def _argument_banner(self, text: str) -> None:
        if "end of arguments" in text:
            self.in_arguments = False
        elif "- arguments -" in text:
            self.in_arguments = True
            self.log.arguments = {}  # a restart prints them again
            self.log.starts += 1
            # What an earlier attempt loaded and where it was told to stop do not hold for this one.
            self.attempt_loaded, self.log.exit_iteration = 0, None

    def _other_lines(self, text: str) -> None:
        if "memory (" in text:
            for match in _MEMORY.finditer(text):
                values = dict(part.rsplit(": ", 1) for part in match[3].split(" | ") if part)
                memory = self.log.memory.setdefault(int(match[1]), RankMemory())
                scale = 1000 if match[2] == "GB" else 1
                memory.allocated = max(memory.allocated, _first(values, _ALLOCATED) * scale)
                memory.max_allocated = max(memory.max_allocated, _first(values, _MAX_ALLOCATED) * scale)
        if "cross entropy:" in text:
            for match in CROSS_ENTROPY_CALLS.finditer(text):
                calls = self.log.calls.setdefault(int(match["rank"] or 0), CrossEntropyCalls())
                calls.te += int(match["te"])
                calls.native += int(match["native"] or 0)
                calls.implementation = match["implementation"]
        if "at iteration" in text:
            if loaded := _LOADED.search(text):
                self.attempt_loaded = int(loaded[1])
            if exiting := _EXITING.search(text):
                self.log.exit_iteration = int(exiting[1])

    def _record_text(self, text: str) -> None:
        heads = list(_HEAD.finditer(text)) if "iteration" in text else []
        if self.open_record is not None:
            self._extend(text[: heads[0].start()] if heads else text)
        for number, head in enumerate(heads):
            self.in_arguments = False
            self._close_record()
            end = heads[number + 1].start() if number + 1 < len(heads) else len(text)
            self.open_record = (int(head[1]), int(head[2]))
            self.open_text, self.open_lines = "", 0
            self._extend(text[head.end() : end])

    def _extend(self, text: str) -> None:
        self.open_text += text
        self.open_lines += 1
        if _END.search(self.open_text):
            self.saw_end_field = True
            self._close_record(ended=True)
        elif self.open_lines > _CONTINUATION_LINES:
            self._close_record()

    def _close_record(self, *, ended: bool = False, at_end: bool = False) -> None:
        if self.open_record is None:
            return
        (iteration, announced), text = self.open_record, self.open_text
        self.open_record, self.open_text = None, ""
        if at_end and not ended and self.saw_end_field:
            self.log.last_record_cut = True
            return
        step = _read_fields(iteration, text)
        if step.skipped and not step.lm_loss:
            step.lm_loss = (
                None  # Megatron prints the mean of no losses, 0, for an interval that was skipped whole
            )
        elif step.lm_loss is None and ended and all(map(_CLEAN_FIELD.fullmatch, text.split("|")[:-1])):
            step.lm_loss = math.nan  # left out of an intact line because it is not >= 0
        self._store(step, announced, damaged=step.lm_loss is None and not step.skipped)

    def _store(self, step: Step, announced: int, damaged: bool) -> None:
        steps = self.log.steps
        self.log.announced_steps = announced
        if self._printed_already(step):
            self.log.repeated += 1
            return
        if steps and step.iteration <= next(reversed(steps)):
            # A restart: what the earlier attempt did from here on is void, also the steps the new one has yet
            # to reach.
            void = [i for i in steps if i >= step.iteration]
            for iteration in void:
                del steps[iteration]
            self.log.replaced.extend(void)
            self.log.damaged = [i for i in self.log.damaged if i < step.iteration]
        if not steps:
            self.log.loaded_iteration = self.attempt_loaded
        if self.log.exit_iteration is not None and step.iteration > self.log.exit_iteration:
            self.log.exit_iteration = None  # a later attempt, without a dump of its arguments
        steps[step.iteration] = step
        self.starts_at[step.iteration] = self.log.starts
        if damaged:
            self.log.damaged.append(step.iteration)

    def _printed_already(self, step: Step) -> bool:
        """Whether another rank of this attempt printed the line; a restart prints the arguments first."""
        earlier = self.log.steps.get(step.iteration)
        if earlier is None or self.starts_at[step.iteration] != self.log.starts:
            return False
        if next(reversed(self.log.steps)) - step.iteration > _SLOWEST_PRINTER * self.log.log_interval:
            return False
        return repr((earlier.lm_loss, earlier.grad_norm)) == repr((step.lm_loss, step.grad_norm))

    def _check(self) -> None:
        log = self.log
        log.replaced = sorted(set(log.replaced))
        if not log.lines:
            raise LogError(f"{log.label} is empty; the run wrote nothing, or its output went elsewhere.")
        if not log.steps:
            raise LogError(self._no_steps())
        last, expected = max(log.steps), log.expected_last
        if last < expected // log.log_interval * log.log_interval:
            where = " in the middle of a line" if log.last_record_cut else ""
            why = f" (last error in it: {self.last_error[:200]})" if self.last_error else ""
            log.truncated = f"it announces {expected} steps and ends{where} after step {last}{why}"
            if not self.allow_truncated:
                raise LogError(
                    f"{log.label} is truncated: {log.truncated}; let the run finish or resume it, then "
                    "compare again, or look at the steps that are there with --force."
                )
        if not any(s.lm_loss is not None and math.isfinite(s.lm_loss) for s in log.steps.values()):
            raise LogError(
                f"{log.label} has {len(log.steps)} iteration lines and no finite `lm loss` in any of them: "
                "the loss was NaN from the first step on, or this is not the training of a language model."
            )

    def _no_steps(self) -> str:
        log = self.log
        if log.last_record_cut or log.starts:
            quoted = self.last_error or _clean(self.last_line).strip()
            return (
                f"{log.label} is truncated: the run ended before its first step; "
                f"its last words are: {quoted[:200]!r}."
            )
        return (
            f"{log.label} is not a Megatron training log: none of its {log.lines} lines has the form "
            "`iteration 1/ 100 | ... | lm loss: 8.3E+00 | ...`; give the output of the last rank, which "
            "prints it."
        )


def _clean(raw: bytes) -> str:
    text = raw.decode("utf-8", errors="replace").rstrip("\r\n")
    if "\x1b" in text:
        text = _ANSI.sub("", text)
    prefix = _LAUNCHER_PREFIX.match(text)  # not sub(): it would look at every position
    return text[prefix.end() :] if prefix else text


def _read_fields(iteration: int, text: str) -> Step:
    """The known `name: value |` pairs of a record; a value without its closing bar may be cut: no value."""
    values: dict[str, float] = {}
    for name, value in _PAIR.findall(text):
        attribute = _FIELDS.get(name.strip())
        if attribute is not None and (number := _number(value)) is not None:
            values[attribute] = number
    if "lm_loss" not in values and "lm loss:" in text:
        # Another rank's words stand inside the record: look for each field by itself.
        for name, attribute in _FIELDS.items():
            match = re.search(rf"\b{re.escape(name)}:\s*([^\s|]+)\s*\|", text) if name != "loss" else None
            if match and attribute not in values and (number := _number(match[1])) is not None:
                values[attribute] = number
    seconds = values.pop("time_s", None)
    if seconds is not None:
        values.setdefault("time_ms", seconds * 1000)
    skipped, nan = int(values.pop("skipped", 0)), int(values.pop("nan", 0))
    return Step(iteration, skipped=skipped, nan=nan, **values)


def _first(values: dict[str, str], names: tuple[str, ...]) -> float:
    return next((float(values[name]) for name in names if name in values), 0.0)
