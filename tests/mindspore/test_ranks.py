"""The losses on 2 and 4 processes, each in one job whose results the tests look at."""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

import bad_input
import cases
import numpy as np
import pytest
import ranks
import torch_side

# MCE_MINDSPORE_RANKS=2,4 adds the job of 4 processes.
WORLD_SIZES = tuple(int(size) for size in os.environ.get("MCE_MINDSPORE_RANKS", "2").split(","))
CASES = cases.cases()
KINDS = sorted({(case.dtype, case.reduction, case.weighted, case.label_smoothing) for case in CASES})

# fp32 numbers of size 1 to 30, sums of up to 17 terms, beside fp64; fp64 logits beside fp64
COMPUTED = {"float64": 1e-11}
COMPUTED_ELSE = 4e-6
# and the rounding of the gradient to its dtype
ROUNDED = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-24, "float64": 2.0**-53}


@pytest.fixture(scope="session")
def results(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """results(world_size)[rank][program]"""

    @functools.cache
    def ran(world_size: int) -> Any:
        folder = folders(world_size)
        torch_side.write_inputs(folder)
        try:
            return ranks.run_job(world_size, "everything", folder)
        except AssertionError as failure:  # for every test of it, and not to be run again by each
            return failure

    def of(world_size: int) -> list[dict[str, Any]]:
        found = ran(world_size)
        if isinstance(found, AssertionError):
            raise found
        return list(found)

    @functools.cache
    def folders(world_size: int) -> Path:
        return tmp_path_factory.mktemp(f"ranks{world_size}")

    of.folder = folders
    return of


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize(("dtype", "reduction", "weighted", "smoothing"), KINDS)
def test_loss_and_gradient(
    results: Any, world_size: int, dtype: str, reduction: str, weighted: bool, smoothing: float
) -> None:
    chosen = [
        (case, index)
        for index, case in enumerate(CASES)
        if (case.dtype, case.reduction, case.weighted, case.label_smoothing)
        == (dtype, reduction, weighted, smoothing)
    ]
    assert chosen
    bound = COMPUTED.get(dtype, COMPUTED_ELSE)
    for case, index in chosen:
        of_ranks = [of_rank["reductions"][index] for of_rank in results(world_size)]
        for found in of_ranks:
            loss, right = found["loss"], np.asarray(found["right_loss"])
            assert loss.shape == right.shape, case.name
            assert found["loss_dtype"] == ("Float64" if dtype == "float64" else "Float32"), case.name
            assert found["gradient_dtype"].lower() == dtype, case.name
            assert np.all(np.abs(loss - right) <= bound * (1 + np.abs(right))), case.name
            gradient = found["right_gradient"]
            assert found["gradient"].shape == gradient.shape, case.name
            allowed = bound * (1 + np.abs(gradient).max(initial=0)) + ROUNDED[dtype] * np.abs(gradient)
            if dtype == "float16":
                allowed = allowed + 2.0**-25  # subnormal ones
            assert np.all(np.abs(found["gradient"] - gradient) <= allowed), case.name
            if case.ignored != "none":
                ignored = cases.inputs_of(case, index).labels == cases.IGNORED
                assert not found["gradient"][ignored].any(), case.name
        assert len({found["loss"].tobytes() for found in of_ranks}) == 1, f"{case.name}: not bitwise equal"


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_without_waiting_for_each_operator(results: Any, world_size: int) -> None:
    """MindSpore's default mode gives the same bits as the other tests' synchronous one."""
    for of_rank in results(world_size):
        assert len(of_rank["asynchronous"]) == 3
        for found in of_rank["asynchronous"]:
            same = [other for other in of_rank["reductions"] if np.array_equal(other["loss"], found["loss"])]
            assert any(np.array_equal(other["gradient"], found["gradient"]) for other in same)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_statistics(results: Any, world_size: int) -> None:
    for of_rank in results(world_size):
        found, right = of_rank["statistics"]["found"], of_rank["statistics"]["right"]
        lse, target_log_prob, entropy, correct = found
        np.testing.assert_allclose(of_rank["statistics"]["loss"], right.loss, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(lse, right.lse, rtol=1e-6)
        np.testing.assert_allclose(target_log_prob, right.target_log_prob, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(entropy, right.entropy, rtol=1e-5, atol=1e-6)
        assert correct.dtype == bool and correct.tolist() == right.correct.tolist()
        assert correct.any() and not correct.all()


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_infinite_and_nan_logits(results: Any, world_size: int) -> None:
    """Finite as dense where only -inf occurs; NaN in its row alone; inf where the label is impossible."""
    for of_rank in results(world_size):
        found = of_rank["statistics"]
        loss = found["special_loss"]
        np.testing.assert_allclose(loss[:2], found["special_right"].loss, rtol=1e-5, atol=1e-6)
        assert np.isnan(loss[2]) and np.isnan(loss[3]) and np.isposinf(loss[4])
        np.testing.assert_allclose(
            found["special_gradient"], found["special_right_gradient"], rtol=1e-5, atol=1e-6
        )


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_strides(results: Any, world_size: int) -> None:
    for of_rank in results(world_size):
        for name, (loss, gradient) in of_rank["layouts_of_memory"].items():
            assert loss < 4e-6 and gradient < 4e-6, name


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_chunked_loss(results: Any, world_size: int) -> None:
    """Loss and gradients of hidden, weight and bias; hidden's gradient is added up once, or not at all."""
    bounds = {"float64": 1e-11, "float32": 4e-6, "float16": 3e-3, "bfloat16": 2e-2}
    of_ranks = [of_rank["chunks"] for of_rank in results(world_size)]
    for found in [case for of_rank in of_ranks for case in of_rank]:
        assert max(found["errors"]) < bounds[found["dtype"]], found
        assert found["reductions"] == 1 and found["reductions_without_hidden"] == 0, found
        assert {kind.lower() for kind in found["dtypes"][1:]} == {found["dtype"]}, found
        assert abs(found["evaluated"]) < 20 * bounds[found["dtype"]], found
    for same in zip(*of_ranks, strict=True):
        assert len({found["loss"] for found in same}) == 1


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_collectives(results: Any, world_size: int) -> None:
    """One gather forward, none backward, whatever the reduction."""
    for of_rank in results(world_size):
        assert of_rank["collectives"] == {"none": (1, 0), "sum": (1, 0), "mean": (1, 0)}


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_gather(results: Any, world_size: int) -> None:
    for of_rank in results(world_size):
        found = of_rank["gathers"]
        assert found["gradient"]
        for name, dtype in (("described", "Float32"), ("undescribed", "Float16"), ("bf16", "BFloat16")):
            assert found[name] == ((2, 3, 9), True, dtype), name


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_metrics(results: Any, world_size: int) -> None:
    for of_rank in results(world_size):
        for name, (value, right) in of_rank["metrics"].items():
            assert value == pytest.approx(right, rel=1e-5), name


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("name", sorted(bad_input.EXPECTED))
def test_bad_input(results: Any, world_size: int, name: str) -> None:
    """The same sentence on every rank."""
    kind, words = bad_input.EXPECTED[name]
    raised = [of_rank["errors"][name] for of_rank in results(world_size)]
    assert all(found == kind and words in message for found, message in raised), raised
    assert len(set(raised)) == 1, raised


def test_every_bad_input_is_looked_at(results: Any) -> None:
    assert set(results(WORLD_SIZES[0])[0]["errors"]) == set(bad_input.EXPECTED)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_nothing_waits_for_a_device(results: Any, world_size: int) -> None:
    for of_rank in results(world_size):
        found = of_rank["without_synchronisation"]
        assert found["first call"] == "Synchronised"  # the test's trap works
        assert found["loss"] < 1e-5 and found["gradient"] < 4e-6 and found["finite"]
        assert all(found["changed"]), "shards that changed their sizes must give NaN everywhere"


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_dtensors_on_meshes(results: Any, world_size: int) -> None:
    """The direct API: "none" and "sum" are this rank's tokens, "mean" their sum over the whole batch's
    weight."""
    names = {"1-D", "reversed"} | ({"dp, tp", "tp, dp"} if world_size == 4 else set())
    for of_rank in results(world_size):
        found = of_rank["meshes"]["direct"]
        assert {name for name, _ in found} == names
        for (name, kind), case in found.items():
            if kind == "gather":
                assert case, name
            else:
                assert case["value"] == pytest.approx(case["part"], rel=1e-5), (name, kind)
                assert case["gradient"] < 4e-6, (name, kind)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_hyper_parallel_context(results: Any, world_size: int) -> None:
    """After registration every variant computes with ours; before and after, HyperParallel with its own."""
    for of_rank in results(world_size):
        found = dict(of_rank["meshes"]["routed"])
        assert found.pop("before") and found.pop("after") and found.pop("plain tensors are MindSpore's own")
        assert {variant for _, variant, _ in found} == {
            "dispatched",
            "mint.nn.functional",
            "ops",
            "mint.nn",
            "nn",
        }
        for name, case in found.items():
            assert case["value"] == pytest.approx(case["part"], rel=1e-5), name
            assert case["gradient"] < 4e-6, name


MESH_ERRORS = {
    "not split": ("ValueError", "no mesh dimension shards the classes"),
    "the batch split": ("ValueError", "no mesh dimension shards the classes"),
    "partial": ("ValueError", "expected Shard or Replicate"),
    "labels split": ("ValueError", "redistribute the labels"),
    "another group": ("ValueError", "leave tp_group out for DTensors"),
    "plain logits, labels a DTensor": ("TypeError", "pass the logits as one too"),
    "weights split": ("ValueError", "each rank needs the whole vocabulary's class weights"),
    "weights and unequal shards": ("ValueError", "columns on the ranks of the group"),
}


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_bad_placements(results: Any, world_size: int) -> None:
    raised = [of_rank["meshes"]["errors"] for of_rank in results(world_size)]
    assert set(raised[0]) == set(MESH_ERRORS)
    for name, (kind, words) in MESH_ERRORS.items():
        for found in raised:
            assert found[name][0] == kind and words in found[name][1], (name, found[name])


def test_equal_to_pytorch(results: Any) -> None:
    """The same inputs through PyTorch's implementation, unsplit, and through ours on 2 and 4 ranks: 1e-5 in
    fp32."""
    other = ranks.REPOSITORY / ".venv/bin/python"
    if not other.exists():
        pytest.skip("there is no .venv with torch (st_scripts/setup_env.sh)")
    folder = results.folder(WORLD_SIZES[0])
    results(WORLD_SIZES[0])
    ranks.run_other(other, Path(torch_side.__file__), folder)
    torch_found = np.load(folder / "torch.npz")
    for world_size in WORLD_SIZES:
        of_ranks = results(world_size)
        for index, options in enumerate(torch_side.OPTIONS):
            loss, gradient = torch_found[f"loss{index}"], torch_found[f"gradient{index}"]
            pieces = [of_rank["torch_inputs"][index] for of_rank in of_ranks]
            for piece in pieces:
                np.testing.assert_allclose(piece["loss"], loss, rtol=1e-5, atol=1e-5, err_msg=str(options))
            whole = np.concatenate([piece["gradient"] for piece in pieces], -1)
            np.testing.assert_allclose(whole, gradient, rtol=1e-5, atol=1e-5, err_msg=str(options))
