"""Which checkpoints count as whole, which one a run continues from, and what is cleared away."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_ce_adaptor.longrun import checkpoints, resume
from megatron_ce_adaptor.longrun.checkpoint_keeper import CheckpointKeeper
from megatron_ce_adaptor.longrun.checkpoints import Checkpoint
from megatron_ce_adaptor.longrun.config import RunConfig
from megatron_ce_adaptor.longrun.preflight import Refused


def write_checkpoint(root: Path, iteration: int, run: str | None = "te") -> Checkpoint:
    """A checkpoint in Megatron's layout, sealed for `run`."""
    folder = root / f"iter_{iteration:07d}"
    (folder / "mp_rank_00").mkdir(parents=True)
    (folder / ".metadata").write_bytes(b"metadata")
    (folder / "__0_0.distcp").write_bytes(bytes(range(256)) * 40)
    (folder / "mp_rank_00" / "part.pt").write_bytes(b"in a folder below")
    (root / checkpoints.TRACKER).write_text(str(iteration))
    checkpoint = Checkpoint(iteration, folder)
    if run is not None:
        checkpoints.seal(checkpoint, run)
    return checkpoint


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "checkpoints" / "te"
    write_checkpoint(folder, 10)
    write_checkpoint(folder, 20)
    return folder


def iterations(root: Path) -> list[int]:
    return [checkpoint.iteration for checkpoint in checkpoints.checkpoints_in(root)]


# --- what is whole ---------------------------------------------------------------------------------------


def test_a_sealed_checkpoint_is_whole(root: Path) -> None:
    newest, refused = checkpoints.newest_whole(root)
    assert newest is not None and (newest.iteration, refused) == (20, [])


def cut(folder: Path) -> None:
    path = folder / "__0_0.distcp"
    path.write_bytes(path.read_bytes()[:5000])


def flip(folder: Path) -> None:
    path = folder / "__0_0.distcp"
    content = bytearray(path.read_bytes())
    content[7000] ^= 1
    path.write_bytes(content)


def lose(folder: Path) -> None:
    (folder / "mp_rank_00" / "part.pt").unlink()


def unseal(folder: Path) -> None:
    (folder / checkpoints.SEAL).unlink()


def cut_the_seal(folder: Path) -> None:
    path = folder / checkpoints.SEAL
    path.write_text(path.read_text()[:50])


def seal_of_another(folder: Path) -> None:
    path = folder / checkpoints.SEAL
    path.write_text(json.dumps({**json.loads(path.read_text()), "iteration": 10}))


def flip_in_the_seal(folder: Path) -> None:
    path = folder / checkpoints.SEAL
    path.write_text(path.read_text().replace('"bytes"', '"cytes"', 1))


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (cut, "has 5000 of the 10240 bytes of __0_0.distcp"),
        (flip, "checksum differs"),
        (lose, "lacks its file mp_rank_00/part.pt"),
        (unseal, "was not finished"),
        (cut_the_seal, "unreadable"),
        (seal_of_another, "unreadable"),
        (flip_in_the_seal, "unreadable"),
    ],
)
def test_a_damaged_checkpoint_is_refused_and_the_one_before_it_used(root: Path, damage, words: str) -> None:
    damage(root / "iter_0000020")
    iteration, sentences = resume.find(root, "te", was_started=True)
    assert iteration == 10
    assert words in sentences[0] and "step 20" in sentences[0]
    assert iterations(root) == [10, 20], "looking for one changes nothing"
    resume.settle(root, iteration)
    assert iterations(root) == [10]
    assert (root / checkpoints.TRACKER).read_text() == "10"
    assert (root / "iter_0000020.damaged").exists() is (damage is not unseal)


def test_a_stale_tracker_file_is_put_right(root: Path) -> None:
    (root / checkpoints.TRACKER).write_text("777")
    resume.settle(root, resume.find(root, "te", was_started=True)[0])
    assert (root / checkpoints.TRACKER).read_text() == "20"


def test_nothing_whole_is_refused(root: Path) -> None:
    cut(root / "iter_0000010")
    flip(root / "iter_0000020")
    with pytest.raises(Refused, match=r"(?s)step 20.*step 10.*without --resume"):
        resume.find(root, "te", was_started=True)


def test_a_start_that_ended_before_its_first_checkpoint_begins_again(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, 10, run=None)
    iteration, sentences = resume.find(tmp_path, "te", was_started=True)
    assert iteration == 0 and "starting at step 1" in sentences[-1]
    resume.settle(tmp_path, 0)
    assert list(tmp_path.iterdir()) == [], "Megatron would load what its tracker file names"


def test_nothing_to_resume_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Refused, match="nothing to resume"):
        resume.find(tmp_path / "nowhere", "te", was_started=False)


def test_another_runs_checkpoint_is_refused(root: Path) -> None:
    with pytest.raises(Refused, match="that of a te run, not of native"):
        resume.find(root, "native", was_started=True)


# --- what makes way --------------------------------------------------------------------------------------


def test_a_new_run_keeps_the_earlier_checkpoints_aside(root: Path) -> None:
    write_checkpoint(root.with_name("te.previous"), 5)
    resume.begin_anew(root, is_ours=True)
    assert not root.exists() and iterations(root.with_name("te.previous")) == [10, 20]


def test_a_new_run_does_not_take_over_the_users_folder(root: Path) -> None:
    write_checkpoint(root, 30, run=None)  # by Megatron without the launcher, for all we know
    with pytest.raises(Refused, match="step 10, 20, 30"):
        resume.begin_anew(root, is_ours=False)
    unseal(root / "iter_0000010")
    unseal(root / "iter_0000020")
    with pytest.raises(Refused, match="step 10, 20, 30"):
        resume.begin_anew(root, is_ours=False)
    assert iterations(root) == [10, 20, 30]


def test_only_the_newest_are_kept(root: Path) -> None:
    write_checkpoint(root, 30)
    write_checkpoint(root, 5, run=None)
    write_checkpoint(root, 40, run=None)  # being written
    checkpoints.prune(root, 2)
    assert iterations(root) == [20, 30, 40]


def test_checkpoints_are_sealed_when_the_log_says_so(tmp_path: Path) -> None:
    for iteration in (100, 200, 300):
        write_checkpoint(tmp_path, iteration, run=None)
    sealed_before: list[bool] = []

    def sync() -> None:
        sealed_before.append(all(c.is_sealed for c in checkpoints.checkpoints_in(tmp_path)[:-1]))

    keeper = CheckpointKeeper(tmp_path, "te", keep=2, before_sealing=sync)
    keeper.start()
    line = b"  [2026-01-01 00:00:00.0] successfully saved checkpoint from iteration     %d to /x [ t 1/1 ]\n"
    text = (
        b"".join(b"x" * 3000 + b"\n" + line % i for i in (100, 200)) + b"saving checkpoint at iteration 300"
    )
    for position in range(0, len(text), 7):  # as a pipe may deliver it
        keeper.watch(text[position : position + 7])
    keeper.finish()
    assert keeper.problem is None
    assert sealed_before == [False, False], "the log is on the disk before the seal is"
    sealed = {c.iteration: checkpoints.defect(c) for c in checkpoints.checkpoints_in(tmp_path)}
    assert sealed == {100: None, 200: None, 300: "was not finished"}


def test_a_checkpoint_that_cannot_be_sealed_is_told(tmp_path: Path) -> None:
    keeper = CheckpointKeeper(tmp_path / "nowhere", "te", keep=2)
    keeper.start()
    keeper.watch(b"successfully saved checkpoint from iteration 7 to /x")
    keeper.finish()
    assert keeper.problem is not None and "step 7" in keeper.problem


# --- what a configuration must save ----------------------------------------------------------------------


def config(**arguments: object) -> RunConfig:
    flags = {f"--{name.replace('_', '-')}": value for name, value in arguments.items()}
    return RunConfig(Path("c.yaml"), {}, flags)


def test_save_every_sets_folder_and_interval() -> None:
    got = resume.with_checkpoints(config(save="${CKPT_DIR:-}", save_interval=1000), {}, Path("d"), 25, False)
    assert (got.arguments["--save"], got.arguments["--save-interval"]) == ("d", 25)
    kept = resume.checkpoint_root(config(save="${CKPT_DIR:-}"), {"CKPT_DIR": "mine"}, Path("out"), "te")
    ours = resume.checkpoint_root(config(save="${CKPT_DIR:-}"), {}, Path("out"), "te")
    assert (kept, ours) == (Path("mine"), Path("out/checkpoints/te"))


@pytest.mark.parametrize(
    ("settings", "every", "words"),
    [
        ({"finetune": True}, 5, "--finetune"),
        ({"no_save_optim": True}, 5, "--no-save-optim"),
        ({}, 0, "--save-every is 0"),
        ({}, None, "saves no checkpoints"),
        ({"save": "d"}, None, "saves no checkpoints"),
    ],
)
def test_what_could_not_be_continued_is_refused(
    settings: dict[str, object], every: int | None, words: str
) -> None:
    with pytest.raises(Refused, match=words):
        resume.with_checkpoints(config(**settings), {}, Path("d"), every, resume=True)


def test_loading_from_a_folder_without_a_checkpoint_is_refused(root: Path) -> None:
    resume.check_load(config(load=str(root)), {})
    resume.check_load(config(load="new", save="new"), {})
    resume.check_load(config(load="${LOAD_DIR:-}"), {})
    with pytest.raises(Refused, match="loads from nowhere, and there is no checkpoint"):
        resume.check_load(config(load="nowhere", save="elsewhere"), {})
