"""Write a file so that it is there whole or not at all."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from pathlib import Path
from typing import Any


def write_atomically(path: str | Path, content: bytes | str) -> None:
    """Write to a temporary name beside `path`, then rename. Raises OSError and leaves nothing behind."""
    path = Path(path)
    data = content.encode("utf-8") if isinstance(content, str) else content
    handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        mask = os.umask(0)
        os.umask(mask)
        os.chmod(temporary, 0o666 & ~mask)  # mkstemp makes it 0600, but results are for sharing
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise


def strict_json(value: Any) -> str:
    """JSON without the NaN and Infinity literals that other parsers refuse; ValueError on such values."""
    return json.dumps(value, indent=1, allow_nan=False, ensure_ascii=False) + "\n"
