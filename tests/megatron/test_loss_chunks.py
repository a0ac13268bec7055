"""The settings of the loss without logits: values, the pretrain flag, doctor, and the rule for auto."""

from __future__ import annotations

import argparse
import enum
import os
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from megatron_ce_adaptor import doctor
from megatron_ce_adaptor.longrun.megatron_log import CROSS_ENTROPY_CALLS
from megatron_ce_adaptor.megatron import call_counter, pretrain
from megatron_ce_adaptor.megatron.chunk_rule import BASE, LEAST, choose_chunk_tokens
from megatron_ce_adaptor.megatron.loss_chunks import GRADIENTS, TOKENS, chunk_setting, gradients_setting
from megatron_ce_adaptor.megatron.output_and_loss import _captures_whole_step

TE = ["--cross-entropy-loss-fusion", "--cross-entropy-fusion-impl", "te"]


@pytest.fixture(autouse=True)
def settings(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing is set; what a test sets is unset again, also where the entry sets it."""
    for name in (TOKENS, GRADIENTS):
        monkeypatch.setenv(name, "")
    yield


@pytest.mark.parametrize(
    ("text", "expected"), [("", None), ("0", None), ("1", 1), ("4096", 4096), ("auto", "auto")]
)
def test_what_the_setting_means(
    monkeypatch: pytest.MonkeyPatch, text: str, expected: int | str | None
) -> None:
    monkeypatch.setenv(TOKENS, text)
    assert chunk_setting() == expected


@pytest.mark.parametrize("text", ["-1", "4k", "4096.0", "1e3", " 8", "²", "Auto"])
def test_a_value_that_is_none_gets_one_sentence(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    sentence = f"{TOKENS} is {text!r}, expected a number of tokens such as 4096, auto, or 0 for a loss that"
    monkeypatch.setenv(TOKENS, text)
    with pytest.raises(ValueError) as error:
        chunk_setting()
    assert str(error.value).startswith(sentence)
    with pytest.raises(pretrain.UsageError) as usage:  # before Megatron starts
        pretrain.take_loss_chunks(TE)
    assert str(usage.value) == str(error.value)


def test_when_the_gradients_are_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert gradients_setting() == "forward"
    monkeypatch.setenv(GRADIENTS, "backward")
    assert gradients_setting() == "backward"
    monkeypatch.setenv(GRADIENTS, "sideways")
    with pytest.raises(ValueError, match=f"{GRADIENTS} is 'sideways', expected forward .* or backward"):
        gradients_setting()
    with pytest.raises(pretrain.UsageError, match="sideways"):
        pretrain.take_loss_chunks(TE)


def test_the_entrys_flag_is_not_shown_to_megatron() -> None:
    assert pretrain.take_loss_chunks(["--loss-chunk-tokens", "64", *TE]) == TE
    assert os.environ[TOKENS] == "64"
    assert pretrain.take_loss_chunks([*TE, "--loss-chunk-tokens=64", "--loss-chunk-tokens=auto"]) == TE
    assert os.environ[TOKENS] == "auto"
    assert pretrain.take_loss_chunks(TE) == TE


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        ([*TE, "--loss-chunk-tokens"], "--loss-chunk-tokens has no value"),
        (["--loss-chunk-tokens", *TE], "--loss-chunk-tokens has no value"),
        ([*TE, "--loss-chunk-tokens="], "--loss-chunk-tokens has no value"),
        ([*TE, "--loss-chunk-tokens", "-4"], "--loss-chunk-tokens is '-4', expected a number of tokens"),
        ([*TE, "--loss-chunk-tokens=many"], "--loss-chunk-tokens is 'many', expected a number of tokens"),
        (["--loss-chunk-tokens", "4"], "--loss-chunk-tokens has no effect without --cross-entropy-loss"),
        ([*TE[:2], "native", "--loss-chunk-tokens", "4"], "--loss-chunk-tokens has no effect without"),
    ],
)
def test_a_flag_that_cannot_work_is_refused(argv: list[str], sentence: str) -> None:
    with pytest.raises(pretrain.UsageError) as error:
        pretrain.take_loss_chunks(argv)
    assert str(error.value).startswith(sentence)


def doctors_lines(capsys: pytest.CaptureFixture[str]) -> tuple[int, list[str]]:
    parser = argparse.ArgumentParser()
    doctor.add_arguments(parser)
    status = doctor.run(parser.parse_args(["--no-megatron"]))
    return status, [line for line in capsys.readouterr().out.splitlines() if "loss without logits" in line]


def test_doctor_says_whether_it_is_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert doctors_lines(capsys) == (0, [f"loss without logits: off ({TOKENS} is not set)"])
    monkeypatch.setenv(TOKENS, "4096")
    status, (line,) = doctors_lines(capsys)
    assert status == 0
    assert line.startswith("loss without logits: on, chunks of 4096 tokens, gradients in forward; touches ")
    assert "GPTModel._postprocess" in line
    monkeypatch.setenv(TOKENS, "few")
    status, (line,) = doctors_lines(capsys)
    assert status == 1
    assert line.startswith(f"! loss without logits: {TOKENS} is 'few', expected")


def test_the_line_at_exit_and_who_reads_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_counter, "_counts", {"te": 80, "native": 2})
    monkeypatch.setattr(call_counter, "_in_chunks", {"calls": 60, "tokens": 4096})
    monkeypatch.setattr(call_counter, "_implementation", lambda: "cuda (interpreter)")
    line = call_counter.summary_line()
    assert line.endswith("implementation cuda (interpreter), te 60 calls in chunks of at most 4096 tokens")
    (read,) = CROSS_ENTROPY_CALLS.finditer(line)
    assert (read["te"], read["native"], read["implementation"]) == ("80", "2", "cuda (interpreter)")


GIB = 2**30


@pytest.mark.parametrize(
    ("tokens", "hidden", "columns", "free", "expected", "why"),
    [
        (262_144, 4096, 62_080, None, BASE, "a further chunk costs little"),
        (262_144, 4096, 62_080, 80 * GIB, BASE, "a further chunk costs little"),
        (262_144, 8192, 16_160, 80 * GIB, 8 * BASE, "at most a quarter of the gradients' 4.25 GiB"),
        (262_144, 4096, 248_320, 8 * GIB, 2048, "at most an eighth of the free 8.00 GiB"),
        (262_144, 4096, 248_320, GIB // 8, LEAST, "256 tokens are the least, though only 0.12 GiB are free"),
        (3000, 4096, 62_080, None, 3000, "3000 tokens fit into one chunk"),
        (262_144, 8192, 4000, GIB, 262_144, "4000 columns are no more than hidden size 8192"),
        (0, 64, 100, None, 1, "fit into one chunk"),
    ],
)
def test_auto(tokens: int, hidden: int, columns: int, free: int | None, expected: int, why: str) -> None:
    choice = choose_chunk_tokens(tokens, hidden, columns, 2, free)
    assert choice.tokens == expected
    assert why in choice.reason


def test_graphs_of_the_whole_step_are_known_in_every_version() -> None:
    """They cannot wait for an answer from the device."""
    scope = enum.Enum("scope", ["full_iteration", "attn"])  # megatron-core 0.16 and 0.17

    def captured(**config: object) -> bool:
        return _captures_whole_step(SimpleNamespace(**config))

    assert captured(cuda_graph_impl="full_iteration", cuda_graph_scope=None)
    assert captured(cuda_graph_impl="local", cuda_graph_scope=[scope.full_iteration])
    assert captured(cuda_graph_impl="local", cuda_graph_scope="full_iteration")
    assert not captured(cuda_graph_impl="local", cuda_graph_scope=[scope.attn])
    assert not captured(cuda_graph_impl="none", cuda_graph_scope=[])
    assert not captured()
