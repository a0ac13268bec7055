"""Finds the peers' unpacked packages and loads single files of them without importing the package around.

TransformerEngine, flash-attention and Unsloth hold their cross entropy in files of plain Python and
Triton, but importing their packages needs CUDA libraries or a dozen other packages. `private_module`
executes such a file under a name of our own: relative imports, and imports that bind a name given in
`provide`, are left out, and the given objects are put there. Everything else runs unchanged, from the
file itself, so Triton finds its source.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from peers.base import PeerMissing

DEFAULT_FOLDER = Path(__file__).resolve().parents[2] / ".peers"


def peers_folder() -> Path:
    """Where `fetch_peers.py` unpacked the packages: MCE_PEERS, or .peers in the repository."""
    return Path(os.environ.get("MCE_PEERS", DEFAULT_FOLDER))


def package_folder(distribution: str, version: str) -> Path:
    """The folder with the unpacked files of a package.

    Raises:
        PeerMissing: it is not there.
    """
    folder = peers_folder() / f"{distribution}-{version}"
    if not folder.is_dir():
        raise PeerMissing(f"{distribution} {version} is not in .peers: run benchmarks/fetch_peers.py")
    return folder


def import_from(distribution: str, version: str, *modules: str) -> list[ModuleType]:
    """Imports modules from the package's folder, put in front of sys.path for good.

    Raises:
        PeerMissing: the folder is not there, or another copy of the module was imported before.
    """
    folder = package_folder(distribution, version)
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    loaded = [importlib.import_module(name) for name in modules]
    for module in loaded:
        if module.__file__ and folder.resolve() not in Path(module.__file__).resolve().parents:
            raise PeerMissing(f"{module.__name__} was imported from elsewhere than .peers/{folder.name}")
    return loaded


def private_module(
    name: str,
    path: Path,
    provide: Mapping[str, Any] | None = None,
    only: frozenset[str] | None = None,
) -> ModuleType:
    """Executes a Python file as module `name`.

    Args:
        provide: objects by the names under which the file would import them.
        only: execute only the definitions of these names (functions, classes, assignments), and the imports.
    """
    if name in sys.modules:
        return sys.modules[name]
    if not path.is_file():
        raise PeerMissing(f"{path.name} is not in .peers/{path.parent.name}: run benchmarks/fetch_peers.py")
    provide = provide or {}
    tree = ast.parse(path.read_text(encoding="utf-8"), filename=str(path))
    tree.body = [s for s in tree.body if _is_kept(s, provide, only)]
    module = ModuleType(name)
    module.__file__ = str(path)
    module.__spec__ = importlib.util.spec_from_loader(name, loader=None, origin=str(path))
    module.__dict__.update(provide)
    sys.modules[name] = module
    try:
        exec(compile(tree, str(path), "exec"), module.__dict__)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _is_kept(statement: ast.stmt, provide: Mapping[str, Any], only: frozenset[str] | None) -> bool:
    if isinstance(statement, ast.ImportFrom) and statement.level > 0:
        return False
    if isinstance(statement, ast.Import | ast.ImportFrom):
        bound = {alias.asname or alias.name.split(".")[0] for alias in statement.names}
        return not bound & provide.keys()
    if only is None:
        return True
    if isinstance(statement, ast.FunctionDef | ast.ClassDef):
        return statement.name in only
    if isinstance(statement, ast.Assign):
        return any(isinstance(t, ast.Name) and t.id in only for t in statement.targets)
    if isinstance(statement, ast.AnnAssign):
        return isinstance(statement.target, ast.Name) and statement.target.id in only
    return False
