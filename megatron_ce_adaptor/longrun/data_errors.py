"""The one error of the data part, raised for whatever a user can put right."""

from __future__ import annotations


class DatasetError(Exception):
    """Text, tokenizer or token files that cannot be used; the message is one sentence for the user."""


def explain_os_error(action: str, path: object, error: OSError) -> DatasetError:
    """Turn an OSError into a sentence such as "cannot write data/x.bin: No space left on device"."""
    return DatasetError(f"cannot {action} {path}: {error.strerror or error}")


def missing_package(purpose: str, package: str, install: str) -> DatasetError:
    """The sentence for an optional package that is not installed."""
    return DatasetError(
        f"{purpose} needs the package {package}, which is not installed: pip install {install}"
    )
