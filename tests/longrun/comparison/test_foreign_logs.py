"""Two logs from anywhere: other stacks' lines, logs that say less than ours, and one run given as two."""

from __future__ import annotations

import gzip
import re
import shutil

import pytest

from megatron_ce_adaptor import cli
from megatron_ce_adaptor.longrun.comparison import ComparisonError, compare
from megatron_ce_adaptor.longrun.gates import Gates
from megatron_ce_adaptor.longrun.megatron_log import parse_log


def call(capsys, *arguments):
    status = cli.main([str(a) for a in arguments])
    out, err = capsys.readouterr()
    assert "Traceback" not in err
    return status, out, err


def refused(capsys, *arguments):
    status, out, err = call(capsys, *arguments)
    assert (status, out) == (2, "") and len(err.strip().splitlines()) == 1, (status, out, err)
    return err


def write(path, text):
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    return path


# --- what they say --------------------------------------------------------------------------------------


def records(before, elapsed, between, behind, factor):
    """Six iteration lines; `elapsed` makes the text of a step's time."""
    counts = "number of skipped iterations:   0 | number of nan iterations:   0 |"
    return [
        f"{before} iteration  {i}/ 6 | consumed samples: {512 * i} |"
        f" elapsed time per iteration {elapsed(i)} | learning rate: 7.7{i}E-05 |"
        f" global batch size:  512 | lm loss: {factor * (5 - i / 4):.6E} |"
        f" grad norm: {factor * 2:.3f} |{between} {counts}{behind}"
        for i in range(1, 7)
    ]


def mindspeed(factor, ms):
    """MindSpeed-LLM: no date, its own fields before and behind the count of NaN iterations."""
    own = " samples per second: 88.256 | TFLOPs: 148.25 | tgs (tokens/gpu/second): 353.02"
    lines = records("", lambda i: f"(ms): {ms + i}.2", " actual seqlen:  4096 |", own, factor)
    return "\ntime (ms)\n".join(lines) + "\n"


def bridge(factor, ms):
    """Megatron-Bridge: no argument dump, words right behind the first record, memory in GB."""
    lines = records("[2025-12-19 10:49:15]", lambda i: f"(ms): {ms + i}", "", "", factor)
    lines[0] += "Number of parameters in transformer layers in billions:  6.98"
    memory = (
        "[Rank 0] (after 1 iterations) memory (GB) | mem-allocated-gigabytes: 51.072 |"
        f" mem-max-allocated-gigabytes: {194.0 * ms / 100:.2f} | mem-alloc-retires: 0"
    )
    return "\n".join([lines[0], memory, *lines[1:]]) + "\n"


def deepspeed(factor, ms):
    """Megatron-DeepSpeed: seconds a step, a launcher's prefix."""
    seconds = records(
        "[default7]:", lambda i: f"(s): {ms / 1000 + i / 100:.2f}", " num zeros: 0.0 |", "", factor
    )
    return "\n".join(seconds) + "\n"


@pytest.mark.parametrize("dialect", [mindspeed, bridge, deepspeed])
def test_dialects_are_compared_without_our_lines(tmp_path, capsys, dialect):
    """They pass, and the verdict itself says what these logs cannot show."""
    native = write(tmp_path / "a.log", dialect(1.0, 200))
    te = write(tmp_path / "b.log", dialect(1.01, 100))
    status, out, _ = call(capsys, "compare", native, te, "--out", tmp_path / "out")
    assert status == 0 and re.search(r"loss MAPE +1 %", out) and re.search(r"grad norm MAPE +1 %", out)
    assert re.search(r"te called +n/a +>= 1 calls +not enforced", out)
    assert "every enforced gate is met, but nothing in te's log shows that te ran." in out
    native_log, te_log = parse_log(native), parse_log(te)
    assert te_log.steps[3].time_ms == pytest.approx({mindspeed: 103.2, bridge: 103, deepspeed: 130}[dialect])
    if dialect is bridge:
        assert native_log.memory[0].max_allocated == pytest.approx(388_000) and "0.5 x" in out
    assert call(capsys, "compare", te, native)[0] == 0, "nor can they show which is which"
    other = write(tmp_path / "c.log", dialect(1.03, 100))
    assert call(capsys, "compare", native, other)[0] == 1


def test_exit_lines_in_one_of_the_logs_make_them_ours(pair, capsys):
    te = pair[1].read_text()
    pair[1].write_text(te[: te.index("[rank 0] cross entropy")])
    status, out, _ = call(capsys, "compare", *pair)
    assert status == 1 and "`require_te_calls: false` in a file given with --gates" in out
    gates = write(pair[0].parent / "g.yaml", "require_te_calls: false\n")
    assert call(capsys, "compare", *pair, "--gates", gates)[0] == 0


def test_a_run_folder_of_ours_must_show_its_calls(run_dir, capsys):
    for name in ("native.log", "te.log"):
        text = (run_dir / name).read_text()
        (run_dir / name).write_text(text[: text.index("[rank 0] cross entropy")])
    status, out, _ = call(capsys, "compare", run_dir)
    assert status == 1 and "failed: te called" in out


def test_messages_tell_two_files_of_one_name_apart(pair, tmp_path, capsys):
    one = write(tmp_path / "one" / "train.log", pair[0].read_text())
    two = write(tmp_path / "two" / "train.log", "")
    assert f"{two} is empty" in refused(capsys, "compare", one, two)
    two.write_text(pair[1].read_text())
    assert f"{two} was run with te and {one} with native" in refused(capsys, "compare", two, one)
    out = tmp_path / "out"
    assert call(capsys, "compare", one, two, "--out", out)[0] == 0
    for name in ("metrics.json", "report.html", "acceptance.md"):
        assert str(tmp_path) not in (out / name).read_text(), "what is shared keeps the base name alone"


# --- how they are written -------------------------------------------------------------------------------


def test_lines_that_every_rank_prints_are_no_restart(tmp_path, maker):
    """Two last ranks print the same lines, one of them late by up to two steps."""
    run = maker("te", steps=9)
    late = [3, 1, 2, 5, 4, 7, 6, 9, 8]  # the order in which the second rank's lines come
    lines = run.argument_lines()
    for step in range(1, 10):
        lines += [run.step_line(step), run.step_line(late[step - 1] if late[step - 1] <= step else step)]
    log = parse_log(write(tmp_path / "x.log", "\n".join(lines) + "\n"))
    assert log.replaced == [] and log.repeated > 0 and log.iterations == list(range(1, 10))
    native = parse_log(maker(steps=9).write(tmp_path))
    assert any("printed by more than one rank" in note for note in compare(native, log, Gates()).notes)


def test_a_restart_that_repeats_the_same_values_is_a_restart(tmp_path, maker):
    run = maker()
    again = [*run.argument_lines(), *[run.step_line(s) for s in range(19, 21)]]
    log = parse_log(write(tmp_path / "x.log", "\n".join([*run.lines()[:-9], *again]) + "\n"))
    assert (log.replaced, log.repeated, log.starts) == ([19, 20], 0, 2)


@pytest.mark.parametrize("stamp", ["2026-07-01T12:00:00.000Z stdout F ", "worker-0 | ", "[1,7]<stdout>:"])
def test_stamps_of_a_collector_hide_no_argument(tmp_path, maker, stamp):
    plain = maker()
    text = "\n".join(stamp + line for line in plain.lines()) + "\n"
    log, expected = parse_log(write(tmp_path / "x.log", text)), parse_log(plain.write(tmp_path))
    assert log.arguments == expected.arguments and log.steps == expected.steps and log.calls == expected.calls


def test_files_written_by_powershell(tmp_path, maker):
    plain = maker()
    path = tmp_path / "x.log"
    path.write_bytes(plain.text().replace("\n", "\r\n").encode("utf-16"))
    log, expected = parse_log(path), parse_log(plain.write(tmp_path))
    assert log.steps == expected.steps and log.arguments == expected.arguments


# --- which runs they are --------------------------------------------------------------------------------


def test_one_run_given_twice_is_refused(pair, tmp_path, capsys):
    gates = write(tmp_path / "g.yaml", "require_te_calls: false\n")
    assert "is given twice" in refused(capsys, "compare", pair[0], pair[0], "--gates", gates)
    copy = tmp_path / "copy.log.gz"
    copy.write_bytes(gzip.compress(pair[0].read_bytes()))
    for options in ([], ["--force"]):
        error = refused(capsys, "compare", pair[0], copy, "--gates", gates, *options)
        assert f"{pair[0]} and {copy} are the log of one run" in error
    # Two runs may have the same losses to the last digit; their step times are never all the same.
    text = re.sub(r"\(ms\): (\d+)\.\d", r"(ms): \1.9", pair[0].read_text())
    assert call(capsys, "compare", pair[0], write(copy.with_name("b.log"), text), "--gates", gates)[0] == 0


def test_different_step_counts(maker, tmp_path, capsys):
    native, te = maker().write(tmp_path), maker("te", steps=15, factor=1.001).write(tmp_path)
    assert "train_iters ('20' in native, '15' in te)" in refused(capsys, "compare", native, te)
    status, out, _ = call(capsys, "compare", native, te, "--force")
    assert status == 1 and "failed: equal step counts" in out and "over 15 steps" in out


def test_a_truncated_log_is_looked_at_only_by_force(pair, capsys):
    text = pair[1].read_text()
    pair[1].write_text(text[: text.index("iteration       13/")])
    assert f"{pair[1]} is truncated" in refused(capsys, "compare", *pair)
    status, out, _ = call(capsys, "compare", *pair, "--force")
    assert status == 1 and "over 12 steps" in out and "failed: missing steps, te" in out
    assert "note: te's log is truncated and was compared all the same: it announces 20 steps" in out


def test_logs_of_different_stretches_are_refused(maker, tmp_path, capsys):
    run = maker()
    first = "\n".join(run.step_line(s) for s in range(1, 11)) + "\n"
    second = "\n".join(run.step_line(s) for s in range(11, 21)) + "\n"
    a = write(tmp_path / "a.log", first.replace("/      20", "/      10"))
    b = write(tmp_path / "b.log", second)
    assert "have no step in common" in refused(capsys, "compare", a, b, "--force")


def test_every_differing_argument_is_named(maker, tmp_path, capsys):
    changed = {f"argument_{n}": "1" for n in range(8)}
    native, te = maker().write(tmp_path), maker("te", arguments=changed).write(tmp_path)
    error = refused(capsys, "compare", native, te)
    assert "(8)" in error and all(name in error for name in changed)


# --- the noise floor ------------------------------------------------------------------------------------


@pytest.fixture
def floor(pair, maker, tmp_path):
    """Check a noise floor made of these maker arguments."""

    def floor(impl="native", edit=None, **changes):
        run = maker(impl, **{"factor": 1.0005, "time_ms": 190, **changes})
        path = write(tmp_path / "f" / "floor.log", edit(run.text()) if edit else run.text())
        logs = [parse_log(path) for path in pair]
        return lambda **options: compare(*logs, Gates(), noise_floor=parse_log(path), **options)

    return floor


def test_noise_floor_of_another_configuration(floor):
    judged = floor(arguments={"seed": "7"})
    with pytest.raises(
        ComparisonError, match=r"noise floor.*seed \(absent in native, '7' in the noise floor\)"
    ):
        judged()
    assert judged(force=True).noise_loss.mean == pytest.approx(0.05, rel=1e-2)


def test_noise_floor_that_is_te(floor):
    with pytest.raises(ComparisonError, match=r"floor\.log is no noise floor: its arguments say .* te"):
        floor("te")(force=True)
    called = floor(
        edit=lambda text: text.replace("[rank 5] cross entropy: te 0", "[rank 5] cross entropy: te 4")
    )
    with pytest.raises(ComparisonError, match="is no noise floor: rank 5 called te"):
        called(force=True)


@pytest.mark.parametrize("which", [0, 1])
def test_noise_floor_that_is_one_of_the_two_runs(pair, tmp_path, which, capsys):
    copy = tmp_path / "floor.log"
    shutil.copy(pair[which], copy)
    assert "are the log of one run" in refused(capsys, "compare", *pair, "--noise-floor", copy)


def test_gaps_of_the_noise_floor_are_noted(floor):
    def gap(text):
        return "".join(line for line in text.splitlines(True) if "iteration        7/" not in line)

    result = floor(edit=gap)()
    assert any("the noise floor is without 1 steps (missing, damaged or NaN: 7)" in n for n in result.notes)
    assert len(result.noise_loss.steps) == 19
