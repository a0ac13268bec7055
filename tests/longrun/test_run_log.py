"""What happens to the logs that earlier starts left in a run's folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_ce_adaptor.longrun import launch, run_log


def launch_log(out: Path, name: str) -> None:
    with run_log.locked(out, name) as log:
        run_log.begin(out, name, log)


@pytest.mark.parametrize("name", ["native", "te"])
def test_new_run_puts_the_limits_of_the_earlier_one_aside(tmp_path: Path, name: str) -> None:
    (tmp_path / "gates.yaml").write_text("loss_mape_percent: 50")
    launch_log(tmp_path, name)
    assert not (tmp_path / "gates.yaml").exists(), "the new comparison would be judged by stale limits"
    assert (tmp_path / "gates.previous.yaml").read_text() == "loss_mape_percent: 50"


NOISE_FLOOR = {"noise_floor.log", "noise_floor.log.gz", "noise_floor.status.json"}


@pytest.mark.parametrize(
    ("name", "earlier", "stays"),
    [
        ("native", "native.log", False),  # the floor was measured from that earlier run
        ("native", "native.log.gz", False),
        ("native", "te.log", True),  # a floor that was run before native's first run
        ("te", "native.log", True),  # run between native and te
    ],
)
def test_noise_floor_goes_with_the_native_run_it_belongs_to(
    tmp_path: Path, name: str, earlier: str, stays: bool
) -> None:
    for file in (earlier, *NOISE_FLOOR):
        (tmp_path / file).write_text("{}")
    launch_log(tmp_path, name)
    left = {p.name for p in tmp_path.iterdir()}
    assert left & NOISE_FLOOR == (NOISE_FLOOR if stays else set())
    assert ("noise_floor.previous.log" in left) is not stays


@pytest.mark.parametrize("partial", ["", "step 1\nst", "step 1\nstep 2\n"])
def test_a_log_that_was_being_copied_is_copied_again(tmp_path: Path, partial: str) -> None:
    (tmp_path / "te.failed.log").write_text("step 1\nstep 2\n")
    (tmp_path / "te.log.partial").write_text(partial)
    with run_log.locked(tmp_path, "te") as log:
        run_log.begin(tmp_path, "te", log, resumes=True)
    assert (tmp_path / "te.log.partial").read_text() == "step 1\nstep 2\n\n"
    assert not (tmp_path / "te.failed.log").exists()


def test_what_earlier_starts_printed_explains_no_failure(tmp_path: Path) -> None:
    log = tmp_path / "te.log.partial"
    log.write_bytes(b"Root Cause rank: 1 exitcode: -9 No space left on device\n")
    begin = log.stat().st_size
    with log.open("ab") as file:
        file.write(b"Root Cause rank: 0 exitcode: 3\n")
    assert "rank 0 ended with 3" in launch._why_torchrun_failed(1, run_log.tail(log, begin))
