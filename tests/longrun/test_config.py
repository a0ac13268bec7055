"""`configs/*.yaml` -> Megatron's words, environment and process layout."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_ce_adaptor.longrun.config import ConfigError, RunConfig, load_config, substitute

SHIPPED = sorted(
    path
    for path in (Path(__file__).resolve().parents[2] / "configs").glob("*.yaml")
    if "MODEL_ARGS" in path.read_text()
)


def config(tmp_path: Path, arguments: str = "  --seq-length: 8\n", head: str = "") -> RunConfig:
    path = tmp_path / "c.yaml"
    path.write_text(f"{head}MODEL_ARGS:\n{arguments}")
    return load_config(path)


def refusal(tmp_path: Path, text: str) -> str:
    path = tmp_path / "c.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as refused:
        load_config(path)
    assert "c.yaml" in str(refused.value) and "\n" not in str(refused.value)
    return str(refused.value)


# --- the form --------------------------------------------------------------------------------------------


def test_values_become_words(tmp_path: Path) -> None:
    read = config(
        tmp_path,
        "  --bf16: true\n  --fp16: false\n  --save: null\n  --lr: 1.0e-3\n  --split: 99,1,0\n"
        "  --data-path: [0.3, a, 0.7, b]\n  --min-lr: 0\n",
    )
    assert read.argument_vector({}) == (
        [
            "--bf16",
            "--lr",
            "0.001",
            "--split",
            "99,1,0",
            "--data-path",
            "0.3",
            "a",
            "0.7",
            "b",
            "--min-lr",
            "0",
        ]
    )


def test_references_are_replaced_as_a_shell_does(tmp_path: Path) -> None:
    variables = {"A": "1", "EMPTY": ""}
    for text, expected in (
        ("${A}", "1"),
        ("x${A}y${A}", "x1y1"),
        ("${A:-2}", "1"),
        ("${B:-2}", "2"),
        ("${EMPTY:-2}", "2"),
        ("${B:-}", ""),
        ("$A", "$A"),
    ):
        assert substitute(text, variables, "here") == expected


@pytest.mark.parametrize("text", ["${B}", "${EMPTY}", "${A", "${A-2}", "${}", "${1}"])
def test_references_without_a_value_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^here"):
        substitute(text, {"A": "1", "EMPTY": ""}, "here")


def test_env_vars_may_depend_on_the_caller_and_win_over_it(tmp_path: Path) -> None:
    head = "ENV_VARS:\n  THREADS: 1\n  PORT: ${PORT:-6000}\n"
    read = config(tmp_path, "  --x: ${THREADS}\n", head)
    caller = {"THREADS": "8", "PORT": "7000"}
    assert read.environment_values(caller) == {"THREADS": "1", "PORT": "7000"}
    assert read.argument_vector(caller) == ["--x", "1"]


def test_flag_with_an_empty_default_is_left_out(tmp_path: Path) -> None:
    read = config(tmp_path, "  --save: ${CKPT_DIR:-}\n  --bf16: true\n")
    assert read.argument_vector({}) == ["--bf16"]
    assert read.argument_vector({"CKPT_DIR": "k"}) == ["--save", "k", "--bf16"]


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("", "ENV_VARS and MODEL_ARGS"),
        ("- a\n", "list"),
        ("ENV_VARS: {A: 1}\n", "no MODEL_ARGS"),
        ("MODEL_ARGS: [1]\n", "list"),
        ("MODEL_ARGS: {--a: 1}\nMODLE: 1\n", "'MODLE'"),
        ("MODEL_ARGS: {bf16: true}\n", "'bf16'"),
        ("MODEL_ARGS: {--a: {b: 1}}\n", "--a"),
        ("MODEL_ARGS: {--a: []}\n", "--a"),
        ("MODEL_ARGS: {--a: [x, null]}\n", "--a"),
        ("MODEL_ARGS:\n  --a: 1\n  --a: 2\n", "twice (line 3)"),
        ("ENV_VARS: {A: true}\nMODEL_ARGS: {--a: 1}\n", "A: True"),
        ("ENV_VARS: {A-B: 1}\nMODEL_ARGS: {--a: 1}\n", "'A-B'"),
        ("DEVICE: tpu\nMODEL_ARGS: {--a: 1}\n", "'tpu'"),
        ("MODEL_ARGS: {--a: 1\n", "not valid YAML (line"),
    ],
)
def test_what_is_wrong_is_said_in_one_sentence(tmp_path: Path, text: str, word: str) -> None:
    assert word in refusal(tmp_path, text)


def test_missing_file_and_folder_are_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "nowhere.yaml", tmp_path):
        with pytest.raises(ConfigError, match=str(path)):
            load_config(path)


# --- overrides -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "written", ["", "  --cross-entropy-loss-fusion: true\n  --cross-entropy-fusion-impl: te\n"]
)
@pytest.mark.parametrize(
    ("implementation", "expected"),
    [
        ("native", ["--cross-entropy-loss-fusion", "--cross-entropy-fusion-impl", "native"]),
        ("te", ["--cross-entropy-loss-fusion", "--cross-entropy-fusion-impl", "te"]),
        ("unfused", []),
    ],
)
def test_implementation_sets_both_flags(
    tmp_path: Path, written: str, implementation: str, expected: list[str]
) -> None:
    read = config(tmp_path, "  --bf16: true\n" + written)
    assert read.with_overrides(implementation).argument_vector({}) == ["--bf16", *expected]


def test_unknown_implementation_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"'TE'.*native, te, unfused"):
        config(tmp_path).with_overrides("TE")


def test_steps_keep_the_schedule_of_the_file(tmp_path: Path) -> None:
    read = config(tmp_path, "  --train-iters: ${TRAIN_ITERS:-2000}\n")
    assert read.with_overrides(steps=5).argument_vector({}) == [
        "--train-iters",
        "5",
        "--lr-decay-iters",
        "2000",
    ]
    assert read.with_overrides(steps=9000).values("--lr-decay-iters", {}) == ["9000"]
    assert read.argument_vector({"TRAIN_ITERS": "7"}) == ["--train-iters", "7"]
    written = config(tmp_path, "  --train-iters: 2000\n  --lr-decay-iters: 50\n").with_overrides(steps=5)
    assert written.values("--lr-decay-iters", {}) == ["50"]
    with pytest.raises(ConfigError, match="0 steps"):
        read.with_overrides(steps=0)


# --- process layout --------------------------------------------------------------------------------------

PARALLEL = """\
  --tensor-model-parallel-size: 2
  --pipeline-model-parallel-size: 2
  --expert-model-parallel-size: 2
  --expert-tensor-parallel-size: 1
  --micro-batch-size: 2
  --global-batch-size: 16
  --seq-length: 1024
"""


def test_layout_of_tp2_pp2_ep2_on_eight(tmp_path: Path) -> None:
    layout = config(tmp_path, PARALLEL).layout(8, {})
    assert (layout.data, layout.micro_batches_per_step, layout.last_stage_ranks) == (2, 4, [4, 5, 6, 7])
    assert (layout.sequence_length, layout.global_batch_size) == (1024, 16)


def test_last_stage_where_data_parallel_varies_slowest(tmp_path: Path) -> None:
    """Megatron's order tp-cp-ep-pp-dp: stage of rank r is (r // 2) % 2."""
    layout = config(tmp_path, PARALLEL + "  --use-tp-pp-dp-mapping: true\n").layout(8, {})
    assert layout.last_stage_ranks == [2, 3, 6, 7]


@pytest.mark.parametrize(
    ("processes", "changes", "words"),
    [
        (6, {}, ["6 processes", "TP 2 x PP 2 x CP 1 = 4", "4 or 8"]),
        (2, {}, ["2 processes", "for example 4"]),
        (4, {"--context-parallel-size": 2}, ["TP 2 x PP 2 x CP 2 = 8", "for example 8"]),
        # Without an expert-TP Megatron splits the experts over the tensor ranks too.
        (4, {"--expert-tensor-parallel-size": None}, ["expert-TP 2 x EP 2 x PP 2 = 8"]),
        (
            8,
            {"--global-batch-size": 6},
            ["6 samples", "micro-batches of 2", "2 data-parallel ranks", "2 x 2 = 4"],
        ),
        (8, {"--tensor-model-parallel-size": "two"}, ["--tensor-model-parallel-size", "'two'"]),
        (8, {"--pipeline-model-parallel-size": 0}, ["--pipeline-model-parallel-size", "'0'"]),
        (0, {}, ["0 processes"]),
    ],
)
def test_layouts_that_do_not_fit_show_the_arithmetic(
    tmp_path: Path, processes: int, changes: dict[str, object], words: list[str]
) -> None:
    read = config(tmp_path, PARALLEL)
    read.arguments.update(changes)
    with pytest.raises(ConfigError) as refused:
        read.layout(processes, {})
    for word in words:
        assert word in str(refused.value)


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_shipped_configurations_fit_their_processes(path: Path) -> None:
    """Every run that is shipped loads, carries no path of one machine, and fits one or eight processes."""
    read = load_config(path)
    variables = {
        "DATA_PATH": "data/x_text_document",
        "TOKENIZER_MODEL": "data/tokenizer",
        "OUT_DIR": "runs/x",
    }
    for implementation in ("native", "te"):
        words = read.with_overrides(implementation, 5).argument_vector(variables)
        assert not [word for word in words if word.startswith(("/", "~"))]
    layout = read.layout(1 if path.stem.endswith("_1rank") else 8, variables)
    assert layout.micro_batches_per_step >= 1
    assert layout.sequence_length > 1
