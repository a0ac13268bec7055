"""What is patched in Megatron: the declarations in ``patches/*.yaml``, read and checked.

One file declares one target::

    target: megatron.training.arguments.validate_args      # dotted name in Megatron
    kind: wrap                                             # replace | wrap
    replacement: megatron_ce_adaptor.megatron.replacements.allow_te_in_validate_args
    version: ">=0.17"                                      # of megatron-core, PEP 440
    required: true                                         # true | false | a narrower PEP 440 range
    why: >-
      ...

``replace`` puts the named function in the target's place. ``wrap`` calls the named function with the
target's original and puts what it returns in its place; returning ``None`` means "nothing to do here".
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

TARGET_ROOT = "megatron"
REPLACEMENT_ROOT = "megatron_ce_adaptor"
KINDS = ("replace", "wrap")
_KEYS = {"target", "replacement", "kind", "version", "required", "why"}


class PatchFileError(ValueError):
    """A patch declaration is missing or cannot be used. The message names the file and the key."""


@dataclass(frozen=True)
class PatchSpec:
    """One declared target. ``required`` is a version range, or ``None`` where the name may be absent."""

    target: str
    replacement: str
    kind: str
    version: str
    required: str | None
    why: str
    file: str

    @property
    def module(self) -> str:
        """The module that holds the target; a CapWords component starts the path inside the module."""
        return ".".join(self._split()[0])

    @property
    def attribute(self) -> tuple[str, ...]:
        """The path inside the module: ``("validate_args",)`` or ``("SomeClass", "some_method")``."""
        return tuple(self._split()[1])

    def _split(self) -> tuple[list[str], list[str]]:
        parts = self.target.split(".")
        for i, part in enumerate(parts):
            if part[:1].isupper():
                return parts[:i], parts[i:]
        return parts[:-1], parts[-1:]


def patch_directory() -> Path:
    """Where the declarations are: in the package (wheel), at the repository's root (checkout)."""
    package = Path(__file__).resolve().parents[1]
    candidates = (package / "patches", package.parent / "patches")
    for folder in candidates:
        if folder.is_dir() and any(folder.glob("*.yaml")):
            return folder
    raise PatchFileError(
        f"no patch declarations (*.yaml) found in {candidates[0]} or {candidates[1]}: the installation is "
        "incomplete, reinstall megatron-ce-adaptor"
    )


def load_patch_specs(folder: Path | None = None) -> tuple[PatchSpec, ...]:
    """Reads and checks every ``*.yaml`` in ``folder`` (default: the shipped ones), sorted by file name.

    Raises :class:`PatchFileError` for a folder without declarations, a file that is not valid YAML, an
    unknown or missing key, a value of the wrong form, or two files for one target.
    """
    folder = patch_directory() if folder is None else folder
    paths = sorted(folder.glob("*.yaml"))
    if not paths:
        raise PatchFileError(f"no patch declarations (*.yaml) found in {folder}")
    specs = tuple(_read(path) for path in paths)
    seen: dict[str, str] = {}
    for spec in specs:
        if spec.target in seen:
            raise PatchFileError(
                f"{spec.file}: target {spec.target} is already declared in {seen[spec.target]}"
            )
        seen[spec.target] = spec.file
    return specs


def version_in(version: str, specifier: str) -> bool:
    """Whether a version lies in a PEP 440 range; pre-releases and local versions count.

    Raises ValueError for a version that is not PEP 440, ImportError without the package ``packaging``.
    """
    from packaging.specifiers import SpecifierSet
    from packaging.version import Version

    return SpecifierSet(specifier).contains(Version(version), prereleases=True)


def _read(path: Path) -> PatchSpec:
    import yaml

    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise PatchFileError(f"{path.name}: cannot be read as YAML: {error}") from error
    if not isinstance(content, dict):
        raise PatchFileError(f"{path.name}: expected a mapping with the keys {', '.join(sorted(_KEYS))}")
    if unknown := set(content) - _KEYS:
        raise PatchFileError(f"{path.name}: unknown key {sorted(map(str, unknown))[0]!r}")
    if absent := _KEYS - set(content):
        raise PatchFileError(f"{path.name}: key {sorted(absent)[0]!r} is missing")
    for key in sorted(_KEYS - {"required"}):
        if not isinstance(content[key], str) or not content[key].strip():
            raise PatchFileError(f"{path.name}: {key} must be a non-empty string, not {content[key]!r}")
    _check_dotted_name(path, "target", content["target"], TARGET_ROOT)
    _check_dotted_name(path, "replacement", content["replacement"], REPLACEMENT_ROOT)
    if content["kind"] not in KINDS:
        raise PatchFileError(f"{path.name}: kind must be one of {', '.join(KINDS)}, not {content['kind']!r}")
    _check_specifier(path, "version", content["version"])
    return PatchSpec(
        target=content["target"],
        replacement=content["replacement"],
        kind=content["kind"],
        version=content["version"],
        required=_required_range(path, content),
        why=" ".join(content["why"].split()),
        file=path.name,
    )


def _required_range(path: Path, content: dict[str, Any]) -> str | None:
    required = content["required"]
    if required is True:
        return str(content["version"])
    if required is False:
        return None
    if not isinstance(required, str):
        raise PatchFileError(
            f"{path.name}: required must be true, false or a version range, not {required!r}"
        )
    _check_specifier(path, "required", required)
    return required


def _check_dotted_name(path: Path, key: str, name: str, root: str) -> None:
    parts = name.split(".")
    if len(parts) < 3 or parts[0] != root or not all(part.isidentifier() for part in parts):
        raise PatchFileError(
            f"{path.name}: {key} must be a dotted name that starts with {root!r}, not {name!r}"
        )


def _check_specifier(path: Path, key: str, specifier: str) -> None:
    try:
        from packaging.specifiers import InvalidSpecifier, SpecifierSet
    except ImportError:  # Megatron itself needs packaging; without it there is no version to compare either
        return
    try:
        SpecifierSet(specifier)
    except InvalidSpecifier as error:
        raise PatchFileError(
            f"{path.name}: {key} must be a PEP 440 range such as '>=0.17', not {specifier!r}"
        ) from error
