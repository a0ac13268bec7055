"""Counting calls of te and native, and the line that each rank prints at exit."""

from __future__ import annotations

import importlib
import re

import pytest
import torch
from fake_megatron import build_fake_megatron
from interpreters import start_python

from megatron_ce_adaptor.megatron import apply_patches, install_import_hook, remove_patches
from megatron_ce_adaptor.megatron.call_counter import call_counts, count_native, summary_line

# Each scenario runs in a child of one interpreter that has imported everything, for torch takes seconds.
# What a child's interpreter writes goes to a file, as it does under torchrun.
PROGRAM = """
import json, os, sys
from megatron_ce_adaptor.megatron import install_import_hook
install_import_hook()
import torch
from megatron.core.models.common.language_module import language_module


def losses(*impls):
    logits, labels = torch.randn(3, 2, 7), torch.zeros(3, 2, dtype=torch.long)
    for impl in impls:
        language_module.loss(impl, logits, labels)


def mixed():
    os.environ["RANK"] = "7"
    losses("te", "te", "native", "unfused", "te")

def native():
    losses("native")

def no_call():
    pass

def forks_then_fails():
    losses("te")
    pid = os.fork()
    if pid == 0:
        sys.exit()
    os.waitpid(pid, 0)
    sys.exit("failed")

def counts_in_a_fork():
    losses("te", "native")
    pid = os.fork()
    if pid == 0:
        os.environ["RANK"] = "1"
        losses("native")
        sys.exit()
    os.waitpid(pid, 0)

def closed_stdout():
    losses("te")
    sys.stdout.close()


for scenario in (mixed, native, no_call, forks_then_fails, counts_in_a_fork, closed_stdout):
    if os.fork() == 0:
        os.dup2(os.open(scenario.__name__, os.O_CREAT | os.O_RDWR), 1)
        os.dup2(os.open(scenario.__name__ + ".err", os.O_CREAT | os.O_RDWR), 2)
        scenario()
        sys.exit()
    os.wait()
"""


@pytest.fixture(scope="module")
def printed(tmp_path_factory):
    """What each scenario wrote to stdout, and to stderr under its name + ``.err``."""
    folder = tmp_path_factory.mktemp("exit")
    result = start_python(PROGRAM, folder, build_fake_megatron(folder / "fake"))
    assert result.returncode == 0, result.stderr
    return {path.name: path.read_text() for path in folder.iterdir() if path.is_file()}


def added(before):
    return {kind: count - before[kind] for kind, count in call_counts().items()}


def test_native_calls_are_counted_and_not_changed(fake_megatron):
    fake_megatron()
    install_import_hook()
    language_module = importlib.import_module("megatron.core.models.common.language_module.language_module")
    logits, labels, group = object(), object(), object()
    before = call_counts()
    name, *passed = language_module.loss("native", logits, labels, group)
    assert name == "fused_vocab_parallel_cross_entropy"
    assert passed[0] is logits
    assert passed[1] is labels
    assert passed[2][0] is group
    assert added(before) == {"te": 0, "native": 1}
    name, *passed = language_module.loss("unfused", logits, labels)
    assert name == "vocab_parallel_cross_entropy"
    assert passed[0] is logits
    assert added(before) == {"te": 0, "native": 2}
    unfused = importlib.import_module("megatron.core.tensor_parallel").vocab_parallel_cross_entropy
    assert unfused(logits, labels, tp_group=group)[-1] == {"tp_group": group}
    remove_patches()
    language_module.loss("native", logits, labels, group)
    language_module.loss("unfused", logits, labels)
    assert added(before) == {"te": 0, "native": 3}


def test_a_call_through_two_of_our_counters_counts_once():
    # another package put its function over ours, with ours inside, and ours was put on top again
    before = call_counts()
    outer = count_native(lambda x: inner(x))
    inner = count_native(lambda x: x + 1)
    assert outer(1) == 2
    assert added(before)["native"] == 1
    with pytest.raises(ZeroDivisionError):
        count_native(lambda x: x // 0)(1)
    assert inner(1) == 2
    assert added(before)["native"] == 3


def test_compiled_native_has_no_graph_break():
    counted = count_native(lambda x: x.sin() + 1)
    compiled = torch.compile(counted, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(torch.ones(3)), torch.ones(3).sin() + 1)


def test_every_counted_kind_is_reported(fake_megatron):
    fake_megatron()
    apply_patches()
    language_module = importlib.import_module("megatron.core.models.common.language_module.language_module")
    language_module.loss("te", torch.randn(2, 1, 5), torch.zeros(2, 1, dtype=torch.long))
    counts = call_counts()
    expected = (
        f"cross entropy: te {counts['te']} calls, native {counts['native']} calls, implementation reference"
    )
    assert re.fullmatch(rf"\[rank \d+\] {expected}", summary_line())


def line(te, native, implementation, rank=0):
    calls = f"te {te} calls, native {native} calls"
    return f"[rank {rank}] cross entropy: {calls}, implementation {implementation}\n"


def test_the_line_at_exit(printed):
    assert printed["mixed"] == line(3, 2, "reference", rank=7)


def test_native_alone_used_no_implementation_of_ours(printed):
    assert printed["native"] == line(0, 1, "none")


def test_no_line_without_a_call(printed):
    assert printed["no_call"] == ""


def test_the_line_appears_after_a_failure_and_not_in_a_forked_worker(printed):
    assert printed["forks_then_fails"] == line(1, 0, "reference")
    assert printed["forks_then_fails.err"] == "failed\n"


def test_a_fork_that_computes_losses_counts_its_own(printed):
    assert printed["counts_in_a_fork"] == line(0, 1, "reference", rank=1) + line(1, 1, "reference")


def test_a_closed_stdout_is_no_error_at_exit(printed):
    assert printed["closed_stdout.err"] == ""
