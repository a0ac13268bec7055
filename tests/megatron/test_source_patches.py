"""patches/source/ on files with the same anchor lines, wherever they stand; with git and with patch."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

PATCHES = sorted((Path(__file__).resolve().parents[2] / "patches" / "source").glob("*.patch"))
TOOLS = {
    "git": ["git", "apply", "--unidiff-zero"],
    "patch": ["patch", "-s", "-p1", "-i"],
}
# Like the anchor, but no whole line of it.
NEAR_MISSES = [
    "import torch.distributed as dist",
    "    import torch",
    "from mindspeed_llm import megatron_adaptor_v2",
]


def parts(patch: Path) -> tuple[str, str, list[str]]:
    """The patched file, the anchor line, and what stands in its place afterwards."""
    lines = patch.read_text().splitlines()
    path = next(line for line in lines if line.startswith("+++ b/")).removeprefix("+++ b/")
    hunk = lines[next(i for i, line in enumerate(lines) if line.startswith("@@ ")) + 1 :]
    removed = [line[1:] for line in hunk if line.startswith("-")]
    assert len(removed) == 1 and len(hunk) <= 4, "one line each"
    return path, removed[0], [line[1:] for line in hunk if line.startswith("+")]


def run(tool: str, folder: Path, patch: Path, *more: str) -> None:
    command = [*TOOLS[tool], str(patch)] if tool == "patch" else [*TOOLS[tool], *more, str(patch)]
    command += more if tool == "patch" else ()
    subprocess.run(command, cwd=folder, check=True, capture_output=True)


@pytest.mark.parametrize("lines_before", [0, 5, 23, 60])
@pytest.mark.parametrize("tool", TOOLS)
@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.stem)
def test_applies_and_reverses(tmp_path: Path, patch: Path, tool: str, lines_before: int) -> None:
    if shutil.which(tool) is None:
        pytest.skip(f"{tool} is not installed")
    path, anchor, replaced = parts(patch)
    before = [*NEAR_MISSES, *(f"line = {i}" for i in range(lines_before))]
    after = ["", "from gpt_builders import gpt_builder", *(f"end = {i}" for i in range(40))]
    file = tmp_path / path
    file.parent.mkdir(parents=True, exist_ok=True)
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    original = "\n".join([*before, anchor, *after, ""])
    file.write_text(original)
    run(tool, tmp_path, patch)
    assert file.read_text() == "\n".join([*before, *replaced, *after, ""])
    run(tool, tmp_path, patch, "--reverse")
    assert file.read_text() == original


def test_a_file_without_the_anchor_is_refused(tmp_path: Path) -> None:
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    for patch in PATCHES:
        file = tmp_path / parts(patch)[0]
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("\n".join(NEAR_MISSES) + "\n")
        with pytest.raises(subprocess.CalledProcessError):
            run("git", tmp_path, patch)
        assert file.read_text() == "\n".join(NEAR_MISSES) + "\n"


def test_ours_comes_last_and_each_patch_is_explained() -> None:
    readme = (PATCHES[0].parent / "README.md").read_text()
    assert len(PATCHES) == 6
    for patch in PATCHES:
        assert f"`{patch.name}`" in readme
        _, anchor, replaced = parts(patch)
        assert replaced[0] == anchor
        last = replaced[-1].strip()
        assert last.startswith(("import megatron_ce_adaptor", "--cross-entropy-loss-fusion"))
