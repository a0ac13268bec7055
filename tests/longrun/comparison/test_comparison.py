"""The numbers of a comparison, and every gate on both of its sides."""

from __future__ import annotations

import json
import math
import re

import pytest

from megatron_ce_adaptor.longrun.comparison import ComparisonError, compare
from megatron_ce_adaptor.longrun.files import strict_json
from megatron_ce_adaptor.longrun.gates import Gates, GatesError, default_gates_file, load_gates
from megatron_ce_adaptor.longrun.megatron_log import parse_log
from megatron_ce_adaptor.longrun.metrics import build_metrics, run_from_metrics

GOOD_TE = {"factor": 1.001, "norm_factor": 1.01, "time_ms": 170}


@pytest.fixture
def judge(tmp_path, maker):
    """Compare a native with a te log, each from maker arguments and an edit of its text."""

    def judge(native=None, te=None, edit_native=None, edit_te=None, gates=None, **options):
        logs = []
        for name, changes, edit in (
            ("native", native or {}, edit_native),
            ("te", {**GOOD_TE, **(te or {})}, edit_te),
        ):
            run = maker(name, **changes)
            path = tmp_path / f"{name}.log"
            path.write_text(edit(run.text(), run) if edit else run.text())
            logs.append(parse_log(path))
        judge.logs = logs
        return compare(*logs, gates or Gates(), **options)

    return judge


def outcome(comparison, name):
    return next(o for o in comparison.outcomes if o.name == name)


def test_numbers(judge):
    result = judge()
    assert result.passed and result.sentence.startswith("PASS: over 20 steps")
    assert result.loss.mean == pytest.approx(0.1, rel=1e-4) and result.loss.worst == pytest.approx(
        0.1, rel=1e-3
    )
    assert result.grad_norm.mean == pytest.approx(1.0, rel=0.05)
    assert result.native_speed.median_ms == pytest.approx(180, abs=4)
    assert result.te_speed.median_ms == pytest.approx(170, abs=4)
    assert result.native_speed.steps == 15, "five of twenty steps are warm-up; the first took 20 s"
    assert result.te_speed.tokens_per_second == pytest.approx(4 * 64 / (result.te_speed.median_ms / 1000))
    assert result.native_peak_mb == 2300 and result.memory_ratio == 1.0


def test_mape_by_hand(judge):
    def bump(text, run):
        for step, loss in ((3, 4.0), (5, 5.0)):
            old = run.step_line(step)
            text = text.replace(old, old.replace(f"{run.loss(step) * run.factor:.6E}", f"{loss:.6E}"))
        return text

    flat = {"steps": 5, "loss": lambda s: 4.0}
    result = judge(flat, {**flat, "factor": 1.0}, edit_te=bump)
    assert result.loss.percent == [0, 0, 0, 0, 25.0]
    assert (result.loss.mean, result.loss.worst, result.loss.worst_step) == (5.0, 25.0, 5)
    assert not result.passed and outcome(result, "loss MAPE").status == "fail"
    assert "loss MAPE not met" in result.sentence


def at_step(step, **changes):
    return lambda text, run: text.replace(run.step_line(step), run.step_line(step, **changes))


def without(*steps):
    def edit(text, run):
        for step in steps:
            text = text.replace(run.step_line(step) + "\n", "")
        return text

    return edit


def damaged(run, step):
    """The line as another rank's words in its middle leave it: neither loss nor grad norm can be read."""
    line = run.step_line(step)
    cut = line.index("lm loss:") + 5
    end = line.index(" number of skipped")
    return line[:cut] + "[rank1] warning" + line[end:]


NATIVE = "[rank 0] cross entropy: te 0 calls, native 40"


def without_norm(text, steps):
    lines = text.splitlines()
    for number, line in enumerate(lines):
        found = re.search(r"iteration +(\d+)/", line)
        if found and int(found[1]) in steps:
            lines[number] = re.sub(r" grad norm: \S+ \|", "", line)
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize(
    ("gate", "changes"),
    [
        ("loss MAPE", {"te": {"factor": 1.0201}}),
        ("grad norm MAPE", {"te": {"norm_factor": 1.12}}),
        ("missing steps, native", {"edit_native": without(7, 8)}),
        ("missing steps, te", {"edit_te": without(7)}),
        ("NaN steps, native", {"edit_native": at_step(9, nan=True)}),
        ("NaN steps, te", {"edit_te": at_step(9, nan=True)}),
        ("NaN steps, te", {"edit_te": at_step(9, norm=math.nan)}),
        ("skipped steps, native", {"edit_native": at_step(9, skipped=1)}),
        ("skipped steps, te", {"edit_te": at_step(9, skipped=1)}),
        ("equal step counts", {"edit_te": without(7)}),
        ("te called", {"te": {"micro_batches": 1}}),
        ("te called", {"edit_te": lambda text, run: text.split("[rank 0]")[0]}),
        ("te called", {"edit_te": lambda text, run: text.replace("[rank 6] cross", "[rank 6] lost")}),
        (
            "native calls in the te run",
            {"edit_te": lambda text, run: text.replace("native 0 calls", "native 3 calls")},
        ),
        (  # also at a rank of the first stage, whose calls count for nothing else
            "native calls in the te run",
            {
                "edit_te": lambda text, run: text.replace(
                    "[rank 0] cross entropy: te 0 calls, native 0", NATIVE
                )
            },
        ),
        ("grad norm MAPE", {"edit_native": at_step(9, norm=0.0)}),
        ("grad norm MAPE", {"edit_te": at_step(9, norm=0.0), "gates": Gates(grad_norm_mape_percent=4)}),
        ("grad norm MAPE", {"edit_native": lambda text, run: without_norm(text, {9})}),
        ("grad norm MAPE", {"edit_te": lambda text, run: without_norm(text, set(range(2, 21)))}),
        ("step time, te / native", {"te": {"time_ms": 190}, "gates": Gates(enforce_step_time=True)}),
        (
            "peak memory, te / native",
            {"te": {"memory": (1, 1, 2300, 2420)}, "gates": Gates(enforce_memory=True)},
        ),
        ("peak memory, te / native", {"te": {"memory": ()}, "gates": Gates(enforce_memory=True)}),
        ("loss at the worst step", {"gates": Gates(loss_worst_step_percent=0.09)}),
    ],
)
def test_gate_fails_alone(judge, gate, changes):
    result = judge(**changes)
    assert outcome(result, gate).status == "fail"
    allowed = {gate, "equal step counts"} if "missing" in gate or gate == "equal step counts" else {gate}
    failed = {o.name for o in result.outcomes if o.status == "fail"}
    assert failed <= allowed | ({"missing steps, te"} if gate == "equal step counts" else set())
    assert not result.passed and result.sentence.startswith("FAIL: ")


@pytest.mark.parametrize(
    ("gate", "changes"),
    [
        ("loss MAPE", {"te": {"factor": 1.0199}}),
        ("step time, te / native", {"te": {"time_ms": 170}, "gates": Gates(enforce_step_time=True)}),
        (
            "peak memory, te / native",
            {"te": {"memory": (9, 9, 2400, 2400)}, "gates": Gates(enforce_memory=True)},
        ),
        ("missing steps, te", {"edit_te": without(7), "gates": Gates(max_missing_steps=1)}),
        ("te called", {"te": {"micro_batches": 3}}),  # evaluation calls it too
        (  # both below the last printed digit
            "grad norm MAPE",
            {"edit_native": at_step(9, norm=0.0), "edit_te": at_step(9, norm=0.0)},
        ),
        # What the gates for skipped and missing steps count is not counted again.
        (
            "grad norm MAPE",
            {"edit_te": lambda text, run: without_norm(at_step(9, skipped=1)(text, run), {9})},
        ),
        ("grad norm MAPE", {"edit_te": lambda text, run: text.replace(run.step_line(9), damaged(run, 9))}),
    ],
)
def test_gate_passes_at_its_limit(judge, gate, changes):
    assert outcome(judge(**changes), gate).status == "pass"


def test_grad_norm_that_only_one_run_has_is_named(judge):
    result = judge(edit_native=at_step(9, norm=0.0))
    assert "native's grad norm is 0 at step 9 and te's is not" in outcome(result, "grad norm MAPE").sentence
    result = judge(edit_te=lambda text, run: without_norm(text, {4, 9}))
    assert "in one log only: 4, 9" in outcome(result, "grad norm MAPE").sentence


def test_an_unenforced_grad_norm_gate_stays_so(judge):
    result = judge(
        edit_te=lambda text, run: without_norm(text, {9}), gates=Gates(grad_norm_mape_percent=None)
    )
    assert result.passed and outcome(result, "grad norm MAPE").status == "not enforced"


def test_speed_and_memory_are_only_reported_by_default(judge):
    result = judge(te={"time_ms": 400, "memory": (9000, 9000, 9000, 9000)})
    assert result.passed
    for name in ("step time, te / native", "peak memory, te / native"):
        assert outcome(result, name).status == "not enforced"
    assert result.step_time_ratio > 2 and result.memory_ratio > 3


def test_memory_is_that_of_the_last_stage(judge):
    assert judge(te={"memory": (9000, 9000, 1150, 1150)}).memory_ratio == 0.5


@pytest.mark.parametrize("name", ["seed", "lr", "num_layers", "data_path", "tokenizer_model"])
def test_different_configurations_are_refused(judge, name):
    te = {"arguments": {name: "/somewhere/other_text_document"}}
    with pytest.raises(ComparisonError, match=f"different configurations.*{name}.*--force"):
        judge(te=te)
    result = judge(te=te, force=True)
    assert result.passed and outcome(result, "same configuration").status == "not enforced"
    assert name in outcome(result, "same configuration").sentence


def test_paths_and_the_implementation_may_differ(judge):
    moved = {"data_path": "['/elsewhere/enwiki_text_document']", "tensorboard_dir": "/t"}
    result = judge(te={"arguments": {**moved, "cross_entropy_loss_fusion": "False"}})
    assert result.differences == []
    assert any("cross_entropy_loss_fusion" in note for note in result.notes)


def test_without_dumps_the_lines_tell(judge):
    def no_dump(text, run):
        return text[text.index("> building") :]

    assert judge(edit_native=no_dump, edit_te=no_dump).passed
    with pytest.raises(ComparisonError, match="learning_rate of step 4"):
        judge(
            edit_native=no_dump, edit_te=lambda text, run: no_dump(text, run).replace("4.000000E-04", "5E-04")
        )


def test_different_lengths_and_swapped_logs_are_refused(judge, maker, tmp_path):
    with pytest.raises(ComparisonError, match="train_iters"):
        judge(te={"steps": 30})
    judge()
    with pytest.raises(ComparisonError, match="swapped"):
        compare(judge.logs[1], judge.logs[0], Gates())


def without_exit_lines(text, run):
    return text.split("[rank 0] cross entropy")[0]


@pytest.mark.parametrize(
    ("te_says", "native_edit", "words"),
    [
        # As under an implementation of te that is not ours and prints no line at exit.
        (
            "te",
            without_exit_lines,
            r"native\.log is no baseline: its arguments say cross_entropy_fusion_impl te",
        ),
        ("native", without_exit_lines, "look swapped"),
        ("te", None, r"native\.log is no baseline"),
    ],
)
def test_baseline_whose_arguments_say_te_is_refused(judge, te_says, native_edit, words):
    with pytest.raises(ComparisonError, match=words):
        judge(
            native={"arguments": {"cross_entropy_fusion_impl": "te"}},
            te={"arguments": {"cross_entropy_fusion_impl": te_says}},
            edit_native=native_edit,
            force=True,
        )


def test_baseline_that_called_te_is_refused(judge):
    def one_call(text, run):
        return text.replace("[rank 5] cross entropy: te 0 calls", "[rank 5] cross entropy: te 1 calls")

    with pytest.raises(ComparisonError, match=r"native\.log is no baseline: rank 5 called te"):
        judge(edit_native=one_call)


def test_what_rightly_says_otherwise_is_not_refused(judge):
    """Without loss fusion nothing reads the choice; te's own dump may show native (validate_args)."""
    unfused = {"cross_entropy_fusion_impl": "te", "cross_entropy_loss_fusion": "False"}
    assert judge(native={"arguments": unfused}).passed
    assert judge(te={"arguments": {"cross_entropy_fusion_impl": "native"}}).passed


def test_noise_floor(judge, maker, tmp_path):
    floor = parse_log(maker(factor=1.0005).write(tmp_path, "floor.log"))
    result = judge(noise_floor=floor)
    assert result.noise_loss.mean == pytest.approx(0.05, rel=1e-3)
    assert outcome(result, "loss MAPE over noise floor").value == pytest.approx(2, rel=1e-3)
    assert outcome(result, "loss MAPE over noise floor").status == "not enforced"
    assert not judge(noise_floor=floor, gates=Gates(noise_floor_ratio=1.5)).passed


def test_restart_and_small_losses_are_noted(judge):
    def restarted(text, run):
        again = "\n".join(run.step_line(s) for s in range(15, 21))
        return text.replace(run.step_line(20), run.step_line(20) + "\n" + again)

    result = judge({"loss": lambda s: 0.1}, {"loss": lambda s: 0.1}, edit_te=restarted)
    assert any("te was restarted: steps 15 to 20" in note for note in result.notes)
    assert any("near 0" in note for note in result.notes)


def test_a_killed_and_resumed_te_run_cannot_be_asked_for_every_call(judge):
    def resumed(text, run):
        lost = text.replace("te 40 calls", "te 12 calls")  # the killed process took its count with it
        return "\n".join(run.argument_lines()) + "\n" + lost

    assert outcome(judge(edit_te=resumed), "te called").status == "pass"


def test_metrics_round_trip_gives_the_same_verdict(judge):
    for changes in (
        {},
        {"te": {"factor": 1.05}},
        {"edit_te": at_step(9, nan=True)},
        {"edit_native": at_step(4, norm=math.inf)},
    ):
        result = judge(**changes)
        metrics = build_metrics(*judge.logs, Gates(), result)
        again = json.loads(strict_json(metrics), parse_constant=pytest.fail)
        (native, native_facts), (te, te_facts) = (run_from_metrics(again[r]) for r in ("native", "te"))
        derived = compare(native, te, Gates(**again["limits"]), native_facts=native_facts, te_facts=te_facts)
        assert derived.sentence == result.sentence == again["verdict"]["sentence"]
        assert derived.outcomes == result.outcomes
        assert {"lm loss", "grad norm", "time info", "memo info"} <= again["te"].keys()
        assert "/somewhere" not in json.dumps(again)


def test_shipped_gates_are_the_defaults_and_explain_themselves():
    assert load_gates() == Gates()
    lines = default_gates_file().read_text().splitlines()
    for name in Gates.__dataclass_fields__:
        assert any(line.startswith(f"{name}:") for line in lines), name


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("loss_mape: 3", "unknown gate 'loss_mape'; known are"),
        ("loss_mape_percent: two", "loss_mape_percent is 'two'; expected a number of 0 or more or null"),
        ("enforce_step_time: 1", "expected true or false"),
        ("max_nan_steps: null", "expected a number"),
        ("max_nan_steps: 1.5", "expected a whole number"),
        ("step_time_ratio: -1", "0 or more"),
        ("- a list", "must be a mapping"),
        ("{broken", "is not YAML"),
    ],
)
def test_bad_gates_files(tmp_path, content, sentence):
    (tmp_path / "g.yaml").write_text(content)
    with pytest.raises(GatesError, match=sentence):
        load_gates(tmp_path / "g.yaml")
    with pytest.raises(GatesError, match="cannot be read"):
        load_gates(tmp_path / "none.yaml")


def test_gates_file_changes_only_its_keys(tmp_path):
    (tmp_path / "g.yaml").write_text("loss_mape_percent: 0.05\n")
    assert load_gates(tmp_path / "g.yaml") == Gates(loss_mape_percent=0.05)
