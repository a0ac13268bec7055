"""The benchmark's case lists, its peers, its measurements on a CPU, and its tables."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import cases
import goals
import mass_acceptance
import mass_accuracy
import mass_cases
import measure
import peers
import pytest
import render_results
import timing
import torch
from inputs import Call, Exact, Inputs, errors
from peers.base import Peer, PeerMissing
from peers.loading import peers_folder, private_module

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
CPU = torch.device("cpu")


# --- case lists


def test_accuracy_cases() -> None:
    made = mass_cases.accuracy_cases()
    assert len(made) == mass_cases.COUNT == 1500
    assert made == mass_cases.accuracy_cases()
    assert len({c.text for c in made}) == 1500
    for options in (
        Counter(c.dtype for c in made),
        Counter(c.strides for c in made),
        Counter((c.reduce_loss, c.label_smoothing, c.ignored, c.layout) for c in made),
    ):
        assert min(options.values()) >= 20, options
    assert {c.columns for c in made} == set(mass_cases.COLUMNS)
    assert {c.rows for c in made} == set(mass_cases.ROWS)


def test_speed_shapes() -> None:
    made = mass_cases.speed_shapes()
    assert len(made) == 1500
    assert made == mass_cases.speed_shapes()
    assert len({s.text for s in made}) == 1500
    assert max(s.elements for s in made) <= 2**30
    assert len(mass_cases.speed_shapes(20, 1_000_000)) == 20


def test_limit_takes_cases_from_the_whole_list() -> None:
    made = mass_cases.accuracy_cases(20)
    assert len(made) == 20
    assert made[-1].number > 1400


def test_goals_name_peers_and_cases_that_exist() -> None:
    names = [p.name for p in peers.all_peers()]
    assert len(names) == len(set(names))
    wanted = {*goals.CUDA_PEERS, *goals.TP_PEERS, *goals.CPU_PEERS, *goals.FACTORS}
    assert wanted | {goals.OURS, goals.OURS_IN_PLACE} <= set(names)
    assert {n for pair in goals.IRREGULAR for n in pair} <= {c.name for c in cases.CUDA_CASES}


# --- peers


@pytest.mark.parametrize("peer", peers.all_peers(), ids=lambda p: p.name)
def test_peer_says_why_it_cannot_run(peer: Peer) -> None:
    assert peer.dims in ((0, 2, 3) if peer.ours else (2, 3))
    assert peer.saves
    assert peer.available("tpu") is not None
    if not peer.splits_vocabulary:
        assert peer.available(peer.devices[0], 2) == "has no split vocabulary"


def test_packages_that_are_not_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MCE_PEERS", str(tmp_path))
    for module in [m for m in sys.modules if m.startswith(("_peer_", "liger_kernel", "quack"))]:
        monkeypatch.delitem(sys.modules, module)
    for peer in peers.all_peers():
        reason = peer.available(peer.devices[0], 2 if peer.only_split else 1)
        if peer.name.split()[0] in (
            "TransformerEngine",
            "Liger",
            "Unsloth",
            "flash-attn",
            "TorchTitan",
            "quack",
        ):
            assert reason is not None and "fetch_peers.py" in reason, peer.name


def test_private_module_leaves_out_what_is_provided(tmp_path: Path) -> None:
    path = tmp_path / "foreign.py"
    path.write_text(
        "import absent\nfrom .near import helper\nimport math\ndef f(): return absent + math.pi\n"
    )
    module = private_module("_peer_test", path, {"absent": 1})
    try:
        assert module.f() == pytest.approx(4.14159, abs=1e-4)
        assert module.f.__code__.co_filename == str(path)
    finally:
        del sys.modules["_peer_test"]
    with pytest.raises(PeerMissing, match="fetch_peers"):
        private_module("_peer_test", tmp_path / "absent.py")


# The published kernels, through our adapters, in Triton's interpreter.
_INTERPRETED = """
import contextlib, json, sys, torch
sys.path[:0] = {path!r}
torch.cuda.device = lambda *a: contextlib.nullcontext()
from cases import Case
from inputs import Call, Exact, Inputs, errors
import peers, peers.transformer_engine as te
te.load("2.20.2")._validate_inputs = lambda *a: None  # it refuses CPU tensors
inputs = Inputs.make(Case(8, 200, "fp32"), torch.device("cpu"))
exact, found = Exact.of(inputs), {{}}
for peer in peers.all_peers():
    if peer.name.startswith(("Transf", "flash", "Liger")):
        call = Call(peer, peer.make(), inputs)
        inputs.restore()
        call.prepare()
        found[peer.name] = errors(call, call.both(), exact)
print(json.dumps(found))
"""


@pytest.mark.skipif(
    not (peers_folder() / "transformer_engine-2.20.2").is_dir(), reason="needs benchmarks/fetch_peers.py"
)
def test_published_kernels_are_called_right(environment: dict[str, str]) -> None:
    path = [str(BENCHMARKS), str(BENCHMARKS.parent)]
    done = subprocess.run(
        [sys.executable, "-c", _INTERPRETED.format(path=path)],
        capture_output=True,
        text=True,
        env=environment | {"TRITON_INTERPRET": "1"},
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert len(found) == 6
    for name, entry in found.items():
        assert entry["loss_error"] < 3e-6 and entry["gradient_error"] < 1e-5, (name, entry)


# --- measurements


def _ours(name: str = goals.OURS) -> Peer:
    return next(p for p in peers.all_peers() if p.name == name)


def _broken(factor: float) -> Peer:
    """PyTorch's cross entropy, its loss and so its gradient too large by `factor`."""

    def loss_per_token(logits: Any, labels: Any, group: Any = None) -> Any:
        return factor * torch.nn.functional.cross_entropy(logits, labels, reduction="none")

    return Peer("broken", lambda: "0", lambda: loss_per_token, saves="x", devices=("cpu",))


def test_errors_against_fp64() -> None:
    inputs = Inputs.make(cases.Case(16, 300, "fp32"), CPU)
    exact = Exact.of(inputs)

    def measured(peer: Peer) -> dict[str, float]:
        call = Call(peer, peer.make(), inputs)
        inputs.restore()
        call.prepare()
        return errors(call, call.both(), exact)

    right = measured(_ours())
    assert right["confident_loss_error"] < 1e-7 and right["gradient_error"] < 1e-6
    wrong = measured(_broken(1.01))
    assert wrong["gradient_error"] == pytest.approx(0.01, rel=0.01)
    assert wrong["loss_error"] > 0.05
    assert math.isnan(measured(_broken(float("nan")))["loss_error"])


def test_inputs_are_what_the_tables_say() -> None:
    inputs = Inputs.make(cases.Case(200, 96, "bf16", padding=3), CPU)
    assert inputs.work.stride() == (99, 1)
    assert int((inputs.upstream == 0).sum()) == 20
    peer = _ours(goals.OURS_IN_PLACE)
    call = Call(peer, peer.make(), inputs)
    inputs.restore()
    call.prepare()
    assert call._prepared is not None and not call._prepared.is_leaf
    call.both()
    assert not torch.equal(inputs.work, inputs.master)  # in place
    assert call.gradient().data_ptr() == inputs.work.data_ptr()
    inputs.restore()
    assert torch.equal(inputs.work, inputs.master)


def test_memory_of_a_call() -> None:
    case = cases.Case(256, 4096, "fp32", batch=2)
    result = measure.measure_case(
        case, [_ours(goals.OURS_IN_PLACE), _ours(), _broken(1.0)], CPU, None, 0.1, lambda text: None
    )
    extra = {name: entry["extra_memory"] for name, entry in result["results"].items()}
    assert extra[goals.OURS_IN_PLACE] < 0.3
    assert 1.0 <= extra[goals.OURS] < 1.3
    assert 2.9 < extra["broken"] < 3.2
    assert set(result["results"]["broken"]["times_ours"]) == {goals.OURS, goals.OURS_IN_PLACE}
    assert result["results"][goals.OURS]["times_ours"][goals.OURS] == 1.0


def test_a_peer_that_raises_is_named() -> None:
    def raise_always(*arguments: Any) -> Any:
        raise RuntimeError("cannot")

    peer = Peer("bad", lambda: "0", lambda: raise_always, saves="x", devices=("cpu",))
    result = measure.measure_case(cases.TINY[0], [_ours(), peer], CPU, None, 0.1, lambda text: None)
    assert result["results"]["bad"] == {"error": "RuntimeError: cannot"}
    assert "ms" in result["results"][goals.OURS]


def test_orders_give_every_peer_every_place() -> None:
    orders = timing.alternate(["a", "b", "c"], 12)
    assert all(sorted(order) == ["a", "b", "c"] for order in orders)
    for name in "abc":
        places = Counter(order.index(name) for order in orders)
        assert max(places.values()) - min(places.values()) <= 1


# --- mass acceptance


@pytest.mark.parametrize("fault", ["gradient", "loss", "logits"])
def test_accuracy_case_notices_a_fault(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron_ce_adaptor import cross_entropy

    case = next(c for c in mass_cases.accuracy_cases() if c.dtype == "fp32" and c.ignored == "none")
    assert mass_accuracy.run_case(case, CPU) is None
    right = cross_entropy.parallel_cross_entropy

    def faulty(logits: Any, *arguments: Any, **options: Any) -> Any:
        loss = right(logits, *arguments, **options)
        if fault == "logits":
            logits.data.view(-1)[0].add_(1.0)
        return {"gradient": loss * 1.0001 - loss.detach() * 0.0001, "loss": loss + 1e-4}.get(fault, loss)

    monkeypatch.setattr(cross_entropy, "parallel_cross_entropy", faulty)
    failure = mass_accuracy.run_case(case, CPU)
    assert failure is not None and fault in failure["what"]


def _shape(ratio: float, peak: int = 5) -> dict[str, Any]:
    return {"shape": "s", "ratio": ratio, "call_ratio": ratio, "peak_ours": peak, "peak_pytorch": 5}


@pytest.mark.parametrize(
    ("measured", "wanted", "growth", "accepted"),
    [
        ([_shape(0.4), _shape(0.6)], 2, 0, True),
        ([_shape(0.4), _shape(0.7)], 2, 0, False),
        ([_shape(0.1)] * 9 + [_shape(1.01)], 10, 0, False),
        ([_shape(0.4)], 2, 0, False),
        ([_shape(0.4, 6)], 1, 0, False),
        ([_shape(0.4)], 1, 1, False),
        ([_shape(float("nan"))], 1, 0, False),
    ],
)
def test_speed_verdict(measured: list[dict[str, Any]], wanted: int, growth: int, accepted: bool) -> None:
    assert mass_acceptance.speed_summary(measured, wanted, growth, "cuda")["accepted"] is accepted


def test_mass_acceptance_on_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    accuracy, speed = tmp_path / "accuracy.json", tmp_path / "speed.json"
    device = ["--device", "cpu", "--limit", "20"]
    assert mass_acceptance.main(["--accuracy", *device, "--out", str(accuracy)]) == 0
    assert json.loads(accuracy.read_text())["summary"]["passed"] == 20
    status = mass_acceptance.main(["--speed", *device, "--calls", "200", "--out", str(speed)])
    summary = json.loads(speed.read_text())["summary"]
    assert summary["shapes"] == 20
    assert status == (0 if summary["accepted"] else 1)
    assert "mean ratio" in capsys.readouterr().out


# --- command lines


def test_benchmark_on_cpu(tmp_path: Path, environment: dict[str, str]) -> None:
    out = tmp_path / "cpu.json"
    command = [sys.executable, str(BENCHMARKS / "bench_cross_entropy.py"), "--cpu", "--tiny"]
    command += ["--seconds-per-case", "0.2", "--threads", "1", "--only", "torch,Trans", "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    part = json.loads(out.read_text())
    assert part["part"] == "cpu"
    assert [c["name"] for c in part["cases"]] == [c.name for c in cases.TINY]
    missing = {p["name"]: p["missing"] for p in part["peers"]}
    assert missing[goals.OURS] is None and missing["TransformerEngine 2.17.0"] == "runs on cuda only"
    assert "| ours, in place |" in done.stdout and "- TransformerEngine 2.17.0: runs on cuda" in done.stdout
    plot = tmp_path / "plot.png"
    assert render_results.main([str(out), "--plot", str(plot)]) == 0
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_ranks_without_torchrun(environment: dict[str, str]) -> None:
    command = [sys.executable, str(BENCHMARKS / "bench_cross_entropy.py"), "--cpu", "--tp", "2"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 2
    assert "start it with torchrun" in done.stderr and "Traceback" not in done.stderr
