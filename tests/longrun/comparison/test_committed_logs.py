"""The verdicts under logs/ follow from the files beside them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from megatron_ce_adaptor.cli import main
from megatron_ce_adaptor.longrun.run_log import VERDICT_FILES

LOGS = Path(__file__).parents[3] / "logs"
FOLDERS = sorted(path.parent for path in LOGS.glob("*/metrics.json"))


def test_there_are_runs() -> None:
    assert FOLDERS, f"no run folder under {LOGS.name}/"


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_the_verdict_follows_from_the_logs(folder: Path, tmp_path: Path) -> None:
    committed = json.loads((folder / "metrics.json").read_text())
    again = tmp_path / folder.name
    again.mkdir()
    for file in folder.iterdir():
        if file.name not in VERDICT_FILES:
            shutil.copy(file, again)
    assert main(["compare", str(again)]) == 0
    assert json.loads((again / "metrics.json").read_text()) == committed
