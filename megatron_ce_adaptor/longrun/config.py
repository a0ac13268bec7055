"""Run configurations: ``configs/*.yaml`` -> Megatron's command line, environment and process layout.

The form is that of Megatron's functional tests: ``ENV_VARS`` (exported for every rank) and ``MODEL_ARGS``
(keyed by literal Megatron flags). ``true`` gives a bare flag, ``false`` and ``null`` leave the flag out, a
list gives one word for each of its items.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

IMPLEMENTATIONS = ("native", "te", "unfused")
DEVICES = ("cpu", "cuda", "npu")

_SECTIONS = ("ENV_VARS", "MODEL_ARGS", "DESCRIPTION", "DEVICE")
_FLAG = re.compile(r"--?[A-Za-z0-9][A-Za-z0-9_-]*\Z")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")
_REFERENCE_FORM = "write ${NAME} or ${NAME:-default}"
_REFERENCE = re.compile(r"\$\{(?P<name>[^}:]*)(?P<default>:-[^}]*)?\}")


class ConfigError(ValueError):
    """A configuration, or the request made of it, cannot be run. The message is one sentence for the user."""


class _StrictLoader(yaml.SafeLoader):
    """YAML as it is, except that a key given twice is an error instead of the last one winning silently."""


def _mapping_without_repeats(loader: yaml.SafeLoader, node: yaml.MappingNode) -> dict[Any, Any]:
    mapping: dict[Any, Any] = {}
    for key_node, value_node in node.value:
        key = loader.construct_object(key_node, deep=True)
        if key in mapping:
            raise ConfigError(
                f"{key!r} is given twice (line {key_node.start_mark.line + 1}); keep one of them."
            )
        mapping[key] = loader.construct_object(value_node, deep=True)
    return mapping


_StrictLoader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping_without_repeats)


def substitute(text: str, variables: Mapping[str, str], where: str) -> str:
    """Replace ``${NAME}`` and ``${NAME:-default}`` in ``text``.

    As in a shell, the default also stands in for a variable that is set but empty. ``where`` names the place
    for the error message. Raises :class:`ConfigError` for a variable without value and default, and for a
    malformed reference.
    """

    def value_of(match: re.Match[str]) -> str:
        name, default = match["name"], match["default"]
        if not _NAME.match(name):
            raise ConfigError(f"{where}: {match[0]!r} is not a reference; {_REFERENCE_FORM}.")
        value = variables.get(name, "")
        if value:
            return value
        if default is None:
            raise ConfigError(f"{where} uses ${{{name}}}, but {name} is not set; export {name}=... first.")
        return default[2:]

    result = _REFERENCE.sub(value_of, text)
    if "${" in result:
        raise ConfigError(
            f"{where}: {text!r} has an unfinished ${{...}}; write ${{NAME}} or ${{NAME:-default}}."
        )
    return result


def referenced_variables(text: str) -> list[str]:
    """The names of the variables that ``text`` refers to, in order of appearance."""
    return [match["name"] for match in _REFERENCE.finditer(text)]


@dataclass(frozen=True)
class Layout:
    """How the processes of a run are arranged. Counts are processes unless said otherwise."""

    world_size: int
    tensor: int
    pipeline: int
    context: int
    expert: int
    expert_tensor: int
    micro_batch_size: int  # samples
    global_batch_size: int  # samples
    sequence_length: int  # tokens
    pipeline_before_data: bool  # Megatron's --use-tp-pp-dp-mapping

    @property
    def data(self) -> int:
        return self.world_size // (self.tensor * self.pipeline * self.context)

    @property
    def micro_batches_per_step(self) -> int:
        """Micro-batches of one step on one data-parallel rank: calls of the loss on a last-stage rank."""
        return self.global_batch_size // (self.micro_batch_size * self.data)

    @property
    def last_stage_ranks(self) -> list[int]:
        """The global ranks that hold the last pipeline stage, the only ones that compute the loss."""
        if self.pipeline_before_data:  # order tp-cp-ep-pp-dp: data parallel varies slowest
            inner = self.tensor * self.context
            return [r for r in range(self.world_size) if (r // inner) % self.pipeline == self.pipeline - 1]
        return list(range(self.world_size - self.world_size // self.pipeline, self.world_size))


@dataclass(frozen=True)
class RunConfig:
    """One configuration; ``arguments`` and ``environment`` hold the values as written in the file."""

    path: Path
    environment: dict[str, str]
    arguments: dict[str, Any]
    description: str = ""
    device: str | None = None

    @property
    def name(self) -> str:
        return self.path.stem

    def with_overrides(self, implementation: str | None = None, steps: int | None = None) -> RunConfig:
        """A copy that runs ``steps`` steps with the cross entropy ``implementation``.

        The learning-rate schedule keeps the length it has in the file (``--lr-decay-iters`` is set to the
        file's ``--train-iters`` where it is missing), so that a short run is the beginning of the long one.
        """
        arguments = dict(self.arguments)
        if implementation is not None:
            if implementation not in IMPLEMENTATIONS:
                raise ConfigError(
                    f"Implementation {implementation!r} is unknown; choose {', '.join(IMPLEMENTATIONS)}."
                )
            # `te` without --cross-entropy-loss-fusion would silently run Megatron's unfused path.
            arguments["--cross-entropy-loss-fusion"] = implementation != "unfused"
            arguments["--cross-entropy-fusion-impl"] = None if implementation == "unfused" else implementation
        if steps is not None:
            if steps < 1:
                raise ConfigError(f"{steps} steps cannot be run; give a number of at least 1.")
            if arguments.get("--lr-decay-iters") is None and "--train-iters" in arguments:
                written = arguments["--train-iters"]
                try:
                    planned = int(substitute(str(written), {}, "--train-iters"))
                    arguments["--lr-decay-iters"] = max(steps, planned)
                except ValueError:  # such as ${TRAIN_ITERS} without a default: nothing to keep
                    pass
            arguments["--train-iters"] = steps
        return replace(self, arguments=arguments)

    def with_arguments(self, arguments: Mapping[str, Any]) -> RunConfig:
        """A copy with these flags set, in place of the file's values or after its last one."""
        return replace(self, arguments={**self.arguments, **arguments})

    def flags(self) -> list[tuple[str, list[str]]]:
        """The flags that are given, each with its words, variable references left in place."""
        result: list[tuple[str, list[str]]] = []
        for flag, value in self.arguments.items():
            if value is True:
                result.append((flag, []))
            elif value is not None and value is not False:
                result.append((flag, [str(v) for v in (value if isinstance(value, list) else [value])]))
        return result

    def environment_values(self, variables: Mapping[str, str]) -> dict[str, str]:
        """``ENV_VARS`` with the references replaced from ``variables``.

        The file's values win over the caller's environment; a value that the caller may change is written
        ``${NAME:-default}``.
        """
        where = f"{self.path.name}, ENV_VARS"
        return {k: substitute(v, variables, f"{where} {k}") for k, v in self.environment.items()}

    def argument_vector(self, variables: Mapping[str, str]) -> list[str]:
        """Megatron's argument list with the references replaced from ``variables`` and ``ENV_VARS``.

        A flag whose value is empty, which only ``${NAME:-}`` can give, is left out.
        """
        result: list[str] = []
        for flag, words in self.flags():
            values = self.values(flag, variables)
            if values or not words:
                result += [flag, *values]
        return result

    def values(self, flag: str, variables: Mapping[str, str]) -> list[str]:
        """The words after ``flag`` with references replaced; empty where the flag is left out or bare."""
        known = {**variables, **self.environment_values(variables)}
        where = f"{self.path.name}, MODEL_ARGS {flag}"
        words = dict(self.flags()).get(flag, [])
        return [value for value in (substitute(word, known, where) for word in words) if value]

    def is_set(self, flag: str) -> bool:
        return self.arguments.get(flag) not in (None, False)

    def integer(self, flag: str, default: int, variables: Mapping[str, str]) -> int:
        """The whole number after ``flag``, at least 1."""
        words = self.values(flag, variables)
        if not words:
            return default
        try:
            number = int(words[0])
        except ValueError:
            number = 0
        if len(words) != 1 or number < 1:
            raise ConfigError(
                f"{self.path.name}, MODEL_ARGS {flag}: {' '.join(words)!r} is no whole number of at least 1."
            )
        return number

    def layout(self, processes: int, variables: Mapping[str, str]) -> Layout:
        """Arrange ``processes`` ranks, or raise :class:`ConfigError` with the arithmetic that fails."""

        def number(flag: str, default: int = 1) -> int:
            return self.integer(flag, default, variables)

        tensor = number("--tensor-model-parallel-size")
        pipeline = number("--pipeline-model-parallel-size")
        context = number("--context-parallel-size")
        expert = number("--expert-model-parallel-size")
        # Megatron's default: experts are split over the tensor-parallel ranks too, unless told otherwise.
        expert_tensor = number("--expert-tensor-parallel-size", tensor)
        micro = number("--micro-batch-size")
        if processes < 1:
            raise ConfigError(f"{processes} processes cannot train; give a number of at least 1.")
        dense = tensor * pipeline * context
        if processes % dense:
            raise ConfigError(
                f"{processes} processes cannot be split into TP {tensor} x PP {pipeline} x CP {context} = "
                f"{dense}: the number of processes must be a multiple of {dense}, "
                f"for example {_near(processes, dense)}."
            )
        sparse = expert_tensor * expert * pipeline
        if processes % sparse:
            raise ConfigError(
                f"{processes} processes cannot be split into expert-TP {expert_tensor} x EP {expert} x "
                f"PP {pipeline} = {sparse}: the number of processes must be a multiple of {sparse}, "
                f"for example {_near(processes, sparse)}."
            )
        data = processes // dense
        global_batch = number("--global-batch-size", micro * data)
        if global_batch % (micro * data):
            raise ConfigError(
                f"A global batch of {global_batch} samples cannot be split into micro-batches of {micro} on "
                f"{data} data-parallel ranks ({processes} processes / {dense}): it must be a multiple of "
                f"{micro} x {data} = {micro * data}."
            )
        return Layout(
            world_size=processes,
            tensor=tensor,
            pipeline=pipeline,
            context=context,
            expert=expert,
            expert_tensor=expert_tensor,
            micro_batch_size=micro,
            global_batch_size=global_batch,
            sequence_length=number("--seq-length"),
            pipeline_before_data=self.is_set("--use-tp-pp-dp-mapping"),
        )


def _near(processes: int, unit: int) -> str:
    below = processes // unit * unit
    return f"{below} or {below + unit}" if below else f"{unit}"


def load_config(path: str | Path) -> RunConfig:
    """Read a configuration file. Raises :class:`ConfigError`, one sentence, for whatever is wrong with it."""
    path = Path(path)
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), Loader=_StrictLoader)
    except FileNotFoundError:
        raise ConfigError(
            f"There is no configuration {path}; configurations are YAML files such as configs/cpu_small.yaml."
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"The configuration {path} cannot be read: {error}.") from error
    except yaml.YAMLError as error:
        place = getattr(error, "problem_mark", None)
        line = f" (line {place.line + 1})" if place is not None else ""
        raise ConfigError(
            f"{path} is not valid YAML{line}: {getattr(error, 'problem', None) or error}."
        ) from error
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(
            f"{path} must hold the sections ENV_VARS and MODEL_ARGS, not {type(content).__name__}."
        )
    unknown = [str(key) for key in content if key not in _SECTIONS]
    if unknown:
        raise ConfigError(f"{path}: unknown section {unknown[0]!r}; known are {', '.join(_SECTIONS)}.")
    arguments = _section(path, content, "MODEL_ARGS")
    if not arguments:
        raise ConfigError(f"{path} has no MODEL_ARGS: nothing to train.")
    for flag, value in arguments.items():
        if not isinstance(flag, str) or not _FLAG.match(flag):
            raise ConfigError(
                f"{path}, MODEL_ARGS: {flag!r} is not a Megatron flag; write it as --flag-name."
            )
        items = value if isinstance(value, list) else [value]
        nested = isinstance(value, list) and any(isinstance(item, bool | None) for item in items)
        if not items or nested or any(isinstance(item, dict | list) for item in items):
            raise ConfigError(
                f"{path}, MODEL_ARGS {flag}: {value!r} must be a word, a number, true, false, null "
                "or a list of words."
            )
    environment = _section(path, content, "ENV_VARS")
    for name, value in environment.items():
        if not isinstance(name, str) or not _NAME.match(name):
            raise ConfigError(f"{path}, ENV_VARS: {name!r} is not a name of an environment variable.")
        if isinstance(value, dict | list | bool) or value is None:
            raise ConfigError(f"{path}, ENV_VARS {name}: {value!r} must be a word or a number; quote it.")
    device = content.get("DEVICE")
    if device is not None and device not in DEVICES:
        raise ConfigError(f"{path}, DEVICE: {device!r} is unknown; choose one of {', '.join(DEVICES)}.")
    return RunConfig(
        path=path,
        environment={name: str(value) for name, value in environment.items()},
        arguments=arguments,
        description=str(content.get("DESCRIPTION") or ""),
        device=device,
    )


def _section(path: Path, content: dict[Any, Any], name: str) -> dict[Any, Any]:
    section = content.get(name)
    if section is None:
        return {}
    if not isinstance(section, dict):
        raise ConfigError(
            f"{path}, {name} must be a mapping of names to values, not {type(section).__name__}."
        )
    return section
