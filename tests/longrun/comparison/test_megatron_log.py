"""The parser on logs as Megatron prints them, and as launchers, terminals, crashes and copies leave them."""

from __future__ import annotations

import gzip
import math
import random
import time
from pathlib import Path

import pytest

from megatron_ce_adaptor.longrun.megatron_log import LogError, parse_log

HERE = Path(__file__).parent


def write(folder: Path, lines: list[str] | str, name: str = "x.log") -> Path:
    path = folder / name
    path.write_text(lines if isinstance(lines, str) else "\n".join(lines) + "\n")
    return path


def test_every_field_of_the_kept_excerpt():
    log = parse_log(HERE / "te_excerpt.log")
    assert log.iterations == list(range(1, 21))
    step = log.steps[3]
    assert (step.lm_loss, step.grad_norm, step.time_ms) == (8.110287, 1.685, 171.9)
    assert (step.learning_rate, step.global_batch_size, step.loss_scale) == (3e-4, 4, 1.0)
    assert (log.announced_steps, log.log_interval, log.missing_steps, log.nan_steps) == (20, 1, [], [])
    assert log.memory[4].max_allocated == 2300.0 and log.memory[4].allocated == 1150.0
    assert log.arguments["data_path"] == "['/somewhere/data/enwiki_text_document']"
    assert (log.sequence_length, log.global_batch_size, log.micro_batches_per_step) == (64, 4, 2)
    assert log.last_stage_ranks == [4, 5, 6, 7]
    assert {r: c.te for r, c in log.calls.items()} == {r: 40 if r >= 4 else 0 for r in range(8)}
    assert log.calls[7].implementation == "reference"


def test_without_loss_fields_of_other_names(tmp_path, maker):
    line = maker().step_line(1).replace("lm loss:", "mtp_1 loss: 9.000000E+00 | lm loss:")
    assert parse_log(write(tmp_path, [line.replace("/      20", "/       1")])).steps[1].lm_loss < 9


def test_dialects(tmp_path):
    """MindSpeed-LLM: consumed tokens, no date. Primus: value/mean pairs. MindSpeed-MM: `loss`, no counts."""
    llm = (
        " iteration  1/ 2 | consumed samples: 512 | consumed tokens: 1048576 | elapsed time per iteration "
        "(ms): 52728.1 |"
        " learning rate: 1.499E-05 | global batch size:  512 | lm loss: 1.376514E+01 | loss scale: 65536.0 |"
        " grad norm: 459.628 | actual seqlen: 2048 | number of skipped iterations: 0 | number of nan "
        "iterations: 0 |"
        " samples per second: 9.710 | TFLOPs: 167.52 |"
    )
    pairs = (
        " iteration  2/ 2 | elapsed time per iteration (ms): 16601.3/17219.3 |"
        " throughput per GPU (TFLOP/s/GPU): 11.9/11.5 | global batch size: 512 | lm loss: 4.447942E+00 |"
        " loss scale: 1.0 | grad norm: 6.142 | number of skipped iterations: 0 | number of nan "
        "iterations: 0 |"
    )
    log = parse_log(write(tmp_path, [llm, pairs]))
    first = log.steps[1]
    assert (first.lm_loss, first.grad_norm, first.time_ms) == (13.76514, 459.628, 52728.1)
    assert (log.steps[2].time_ms, log.steps[2].tflops_per_device) == (16601.3, 11.9)
    mm = [
        f"[..] iteration {i}/ 2 | elapsed time per iteration (ms): 71.9 | loss: 1.9{i}E+00 | grad norm: "
        "134.3 |"
        for i in (1, 2)
    ]
    log = parse_log(write(tmp_path, mm))
    assert [s.lm_loss for s in log.steps.values()] == [1.91, 1.92]


def test_prefixes_colours_and_interleaved_ranks(tmp_path, maker):
    plain = maker("te")
    noise = ["[rank3]: warning: something at iteration 5 of 20", "tensor(1.)", "", "[Rank 0] (after 99 it"]
    lines = []
    for line in plain.lines():
        lines += [f"[default7]:\x1b[32m{line}\x1b[0m", *noise]
    # Two prints of different ranks without a line end between them, and two records on one line.
    glued = "[rank2]: step took" + plain.step_line(7) + plain.step_line(8)
    text = "\n".join(lines).replace(plain.step_line(7), "").replace(plain.step_line(8), glued)
    expected, log = parse_log(plain.write(tmp_path)), parse_log(write(tmp_path, text))
    assert log.steps == expected.steps and log.memory == expected.memory and log.calls == expected.calls
    assert log.arguments == expected.arguments


@pytest.mark.parametrize(
    "torn", ["WARNING: one package is required, see its page", "some words ... and more", "-"]
)
def test_argument_behind_an_unfinished_line_of_another_rank(tmp_path, maker, torn):
    """It would be missing from one run's arguments, and the comparison refuse two runs that are the same."""
    run = maker()
    line = next(line for line in run.argument_lines() if line.strip().startswith("hidden_size "))
    assert line.startswith("  ")
    text = "\n".join(run.lines()).replace(line, torn + line)
    assert parse_log(write(tmp_path, text)).arguments == parse_log(run.write(tmp_path)).arguments


def test_record_broken_over_lines_by_another_rank(tmp_path, maker):
    lines = maker().lines()
    at = next(i for i, line in enumerate(lines) if "iteration        9/" in line)
    whole = lines[at]
    for cut in (60, 130, whole.index("lm loss:") + 14, len(whole) - 3):
        other = "[Rank 1] (after 9 iterations) memory (MB) | allocated: 1.00"
        broken = [*lines[:at], whole[:cut], other, whole[cut:], *lines[at + 1 :]]
        log = parse_log(write(tmp_path, broken))
        assert log.iterations == list(range(1, 21))
        # Either it is read right or it is called damaged: never a wrong number.
        if 9 in log.damaged:
            assert log.steps[9].lm_loss is None
        else:
            assert log.steps[9].lm_loss == parse_log(maker().write(tmp_path)).steps[9].lm_loss
    clean = [*lines[:at], whole[:130], whole[130:], *lines[at + 1 :]]
    assert parse_log(write(tmp_path, clean)).steps[9].grad_norm is not None


def test_nan_in_every_form(tmp_path, maker):
    run = maker()
    lines = run.lines()
    for step, changed in (
        (4, run.step_line(4, nan=True)),  # Megatron leaves the loss out of the line
        (5, run.step_line(5).replace("nan iterations:   0", "nan iterations:   1")),
        (6, run.step_line(6, norm=math.nan)),
        (7, run.step_line(7, norm=math.inf)),
    ):
        lines[lines.index(run.step_line(step))] = changed
    log = parse_log(write(tmp_path, lines))
    assert log.nan_steps == [4, 5, 6, 7] and log.damaged == []


def test_skipped_step_has_no_loss(tmp_path, maker):
    run = maker()
    text = run.text().replace(run.step_line(2), run.step_line(2, skipped=1))
    log = parse_log(write(tmp_path, text))
    assert log.skipped_steps == [2] and log.steps[2].lm_loss is None
    assert log.nan_steps == [] and log.damaged == []


def test_restart_in_the_same_file(tmp_path, maker):
    first = maker(steps=12, announced=20, arguments={"only_in_the_first": "1"})
    second = maker(steps=20, factor=2.0)
    done = {first.step_line(s).split("|")[0].split("/")[0].split("iteration")[1] for s in range(1, 11)}
    resumed = [line for line in second.lines() if not any(f"iteration{d}/" in line for d in done)]
    log = parse_log(write(tmp_path, [*first.lines()[:-9], *resumed]))
    assert log.replaced == [11, 12] and log.starts == 2 and log.missing_steps == []
    assert "only_in_the_first" not in log.arguments and log.arguments["seq_length"] == "64"
    assert log.steps[11].lm_loss == pytest.approx(2 * log.steps[10].lm_loss, rel=0.05)


def test_restart_voids_what_it_has_not_reached_again(tmp_path, maker):
    """Steps 11 to 20 of the first attempt are not the second's, which stopped at 15."""
    lines = [*maker().lines()[:-9], *[maker().step_line(s) for s in range(11, 16)]]
    with pytest.raises(LogError, match=r"announces 20 steps and ends after step 15"):
        parse_log(write(tmp_path, lines))


def test_log_that_continues_a_checkpoint(tmp_path, maker):
    run = maker()
    lines = ["  successfully loaded checkpoint from /x [ t 1/2, p 1/2 ] at iteration 10"]
    lines += [run.step_line(s) for s in range(11, 21)]
    assert parse_log(write(tmp_path, lines)).missing_steps == []
    assert parse_log(write(tmp_path, lines[1:])).missing_steps == list(range(1, 11))


def test_log_interval_and_missing_lines(tmp_path, maker):
    run = maker(steps=105, arguments={"log_interval": "10"})
    every = [*run.argument_lines(), run.step_line(1), *[run.step_line(s) for s in range(10, 101, 10)]]
    log = parse_log(write(tmp_path, every))
    assert log.log_interval == 10 and log.missing_steps == []
    holed = [line for line in every if line != run.step_line(50)]
    assert parse_log(write(tmp_path, holed)).missing_steps == [50]
    no_dump = holed[holed.index(run.step_line(1)) :]
    assert parse_log(write(tmp_path, no_dump)).missing_steps == [50]


def test_exit_interval_is_not_a_truncation(tmp_path, maker):
    run = maker(steps=10, announced=20)
    lines = [*run.lines()[:-9], "[exiting program at iteration 10] datetime: 2026-07-01 12:00:00.0 "]
    assert parse_log(write(tmp_path, lines)).expected_last == 10
    with pytest.raises(LogError, match="truncated"):
        parse_log(write(tmp_path, lines[:-1]))


def resumed_after_exit(maker, first, last, *, banner=True):
    """Stopped by --exit-interval at `first` of 100, then resumed as far as `last`."""
    run = maker(steps=last, announced=100)
    dump = run.argument_lines() if banner else []
    return [
        *run.argument_lines(),
        *[run.step_line(s) for s in range(1, first + 1)],
        f"[exiting program at iteration {first}] datetime: 2026-07-01 12:00:00.0 ",
        *dump,
        *[run.step_line(s) for s in range(first + 1, last + 1)],
    ]


@pytest.mark.parametrize("banner", [True, False])
def test_exit_of_an_earlier_attempt_does_not_excuse_a_later_one(tmp_path, maker, banner):
    with pytest.raises(LogError, match="announces 100 steps and ends after step 73"):
        parse_log(write(tmp_path, resumed_after_exit(maker, 50, 73, banner=banner)))
    log = parse_log(write(tmp_path, resumed_after_exit(maker, 50, 100, banner=banner)))
    assert (log.exit_iteration, log.expected_last, log.missing_steps) == (None, 100, [])


def test_resumed_run_that_repeats_steps_and_is_cut_is_truncated(tmp_path, maker):
    """The later attempt begins before the earlier one's exit and ends before it too."""
    lines = resumed_after_exit(maker, 50, 50)
    run = maker(steps=45, announced=100)
    lines += [run.step_line(s) for s in range(41, 46)]
    with pytest.raises(LogError, match="announces 100 steps and ends after step 45"):
        parse_log(write(tmp_path, lines))


def test_checkpoint_of_an_earlier_attempt_does_not_excuse_missing_steps(tmp_path, maker):
    run = maker()
    loaded = "  successfully loaded checkpoint from /x [ t 1/2, p 1/2 ] at iteration {}"
    second = [run.step_line(s) for s in range(11, 21)]
    lines = [*run.argument_lines(), loaded.format(10), *run.argument_lines(), *second]
    assert parse_log(write(tmp_path, lines)).missing_steps == list(range(1, 11))
    # Two attempts that each continue a checkpoint: the log begins where the first one's does.
    lines = [loaded.format(10), *second[:5], *run.argument_lines(), loaded.format(15), *second[5:]]
    log = parse_log(write(tmp_path, lines))
    assert (log.loaded_iteration, log.missing_steps) == (10, [])


def test_gzip(tmp_path, maker):
    plain = maker().write(tmp_path)
    packed = tmp_path / "named_without_suffix"
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    assert parse_log(packed).steps == parse_log(plain).steps
    packed.write_bytes(packed.read_bytes()[:500])
    with pytest.raises(LogError, match="gzip"):
        parse_log(packed)
    packed.write_bytes(b"\x1f\x8b" + b"no gzip at all")
    with pytest.raises(LogError, match="gzip"):
        parse_log(packed)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("", "is empty"),
        ("hello\nworld\n", "is not a Megatron training log: none of its 2 lines"),
        ("step 1/20 loss 3.4\n" * 50, "is not a Megatron training log"),
        ("---- arguments ----\n  lr .... 1\nValueError: no data\n", "before its first step.*no data"),
    ],
)
def test_unusable(tmp_path, content, sentence):
    with pytest.raises(LogError, match=sentence):
        parse_log(write(tmp_path, content))


def test_binary_file_missing_file_and_folder(tmp_path):
    path = tmp_path / "x.bin"
    path.write_bytes(random.Random(0).randbytes(3 << 20))
    with pytest.raises(LogError, match="not a Megatron training log"):
        parse_log(path)
    with pytest.raises(LogError, match="does not exist"):
        parse_log(tmp_path / "none.log")
    with pytest.raises(LogError, match="is a folder"):
        parse_log(tmp_path)


@pytest.mark.parametrize("keep", [0.2, 0.5, 0.97])
def test_truncated_anywhere(tmp_path, maker, keep):
    steps = "\n".join(maker().lines()[:-9])
    with pytest.raises(LogError, match=r"is truncated.*"):
        parse_log(write(tmp_path, steps[: int(len(steps) * keep)]))


def test_truncated_in_the_last_line(tmp_path, maker):
    """The last step's line is there but for its end: its loss can be read, but it was not finished."""
    text = "\n".join(maker().lines()[:-9])
    with pytest.raises(LogError, match="in the middle of a line after step 19"):
        parse_log(write(tmp_path, text[:-30]))


def test_truncated_by_an_error_quotes_it(tmp_path, maker):
    lines = [*maker(steps=5, announced=20).lines()[:-9], "[rank2]: RuntimeError: out of memory"]
    lines.append("torch.distributed.elastic.multiprocessing.errors.ChildFailedError:")
    with pytest.raises(LogError, match=r"20 steps and ends after step 5 .*RuntimeError: out of memory\)"):
        parse_log(write(tmp_path, lines))


def test_lines_without_a_loss_are_refused(tmp_path, maker):
    text = maker().text().replace("lm loss:", "perplexity:")
    with pytest.raises(LogError, match="no finite `lm loss`"):
        parse_log(write(tmp_path, text))


def test_calls_are_summed_over_restarts_and_read_without_rank(tmp_path, maker):
    lines = [*maker("te").lines(), "[rank 7] cross entropy: te 2 calls, native 1 calls, implementation cuda"]
    calls = parse_log(write(tmp_path, lines)).calls[7]
    assert (calls.te, calls.native, calls.implementation) == (42, 1, "cuda")
    lines = [*maker().lines()[:-8], "cross entropy: te 8000 calls, implementation triton-ascend"]
    assert parse_log(write(tmp_path, lines)).calls[0].te == 8000


@pytest.mark.parametrize("name", ["reference", "cuda", "cuda (interpreter)", "triton-ascend"])
@pytest.mark.parametrize("after", ["", " |", "[rank 1] cross entropy: te 2 calls, implementation cuda"])
def test_name_of_the_implementation_is_read_whole(tmp_path, maker, name, after):
    line = f"[rank 0] cross entropy: te 2 calls, native 0 calls, implementation {name}{after}"
    assert parse_log(write(tmp_path, [*maker().lines()[:-8], line])).calls[0].implementation == name


@pytest.mark.slow
def test_hundred_megabytes_in_seconds(tmp_path, maker):
    """300,000 steps with other ranks' chatter in between."""
    run = maker(steps=300_000)
    before, after = run.step_line(1).split("iteration        1/", 1)
    after += "\n[rank3] some chatter that other ranks print meanwhile\n"
    path = tmp_path / "big.log"
    with path.open("w") as file:
        file.writelines(f"{before}iteration {step:8d}/{after}" for step in range(1, 300_001))
    assert path.stat().st_size > 100e6
    start = time.process_time()
    log = parse_log(path)
    assert time.process_time() - start < 30  # about ten on a shared core
    assert len(log.steps) == 300_000 and log.missing_steps == []
