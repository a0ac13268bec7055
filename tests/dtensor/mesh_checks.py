"""What the ranks check of each case. Imported on the ranks by name; every function returns (number of
checks, list of sentences that say what was wrong)."""

from __future__ import annotations

import contextvars
import traceback
from collections import Counter
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
import torch.nn.functional as F
from mesh_cases import (
    FOUR,
    Case,
    Example,
    MeshLayout,
    cut,
    example,
    label_placements,
    logits_placements,
    mesh_of,
)
from poison import poisoned_empty
from tolerances import ROUNDINGS, compute_dtype, storage_error, unit_roundoff
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate
from tp_cases import CollectiveCounter

from megatron_ce_adaptor import (
    gather_tensor_parallel_logits,
    is_loss_parallel_active,
    loss_parallel,
    loss_parallel_cross_entropy,
)

Outcome = tuple[int, list[str]]


class Checks:
    """Collects what was wrong, so that one rank never stops in front of a collective of the others."""

    def __init__(self) -> None:
        self.count = 0
        self.failures: list[str] = []

    def that(self, good: bool, text: str) -> None:
        self.count += 1
        if not good:
            self.failures.append(text)

    def close(self, actual: Tensor, expected: Tensor, allowed: float, text: str) -> None:
        same_shape = actual.shape == expected.shape
        error = (
            (actual.detach().double() - expected.double()).abs() if same_shape else torch.tensor(torch.inf)
        )
        worst = float(error.max()) if error.numel() else 0.0
        self.that(worst <= allowed, f"{text}: error {worst:.3g} > {allowed:.3g}, shape {tuple(actual.shape)}")

    def raises(
        self, kind: type[Exception], words: Sequence[str], call: Callable[[], object], text: str
    ) -> None:
        try:
            call()
        except kind as error:
            missing = [word for word in words if word not in str(error)]
            self.that(not missing, f"{text}: {missing} not in: {error}")
        except Exception:
            self.that(False, f"{text}: expected {kind.__name__}, got {traceback.format_exc()[-600:]}")
        else:
            self.that(False, f"{text}: no {kind.__name__}")

    @property
    def outcome(self) -> Outcome:
        return self.count, self.failures


def run_cases(rank: int, cases: Sequence[Case]) -> Outcome:
    checks = Checks()
    for case in cases:
        with poisoned_empty():
            check_case(case, checks)
    return checks.outcome


def call(case: Case, logits: DTensor, labels: Tensor, weight: Tensor | None) -> DTensor:
    if case.direct:
        return loss_parallel_cross_entropy(
            logits,
            labels,
            weight=weight,
            label_smoothing=case.label_smoothing,
            z_loss_weight=case.z_loss_weight,
            reduction=case.reduction,
        )
    with loss_parallel(strict=case.strict):
        return F.cross_entropy(
            logits, labels, weight, reduction=case.reduction, label_smoothing=case.label_smoothing
        )


def check_case(case: Case, checks: Checks) -> None:
    """Loss, placements, gradient, collectives and untouched inputs."""
    dense, mesh = example(case), mesh_of(case.layout)
    logits = cut(dense.logits, mesh, logits_placements(case)).requires_grad_()
    labels = cut(dense.labels, mesh, label_placements(case))
    before = (logits._local_tensor.detach().clone(), labels._local_tensor.clone())
    with CollectiveCounter() as forward:
        loss = call(case, logits, labels, dense.weight)
    check_loss(case, dense, loss, checks)
    with CollectiveCounter() as backward:
        upstream = dense.upstream.to(loss.dtype)
        if case.reduction == "none":
            loss.backward(cut(upstream, mesh, label_placements(case)))
        else:
            loss.backward(cut(upstream, mesh, [Replicate()] * mesh.ndim))
    check_gradient(case, dense, logits, checks)
    checks.that(not backward.calls, f"{case}: backward communicates: {dict(backward.calls)}")
    expected = forward_collectives(case)
    checks.that(
        +forward.calls == expected, f"{case}: forward calls {dict(forward.calls)}, expected {dict(expected)}"
    )
    checks.that(
        torch.equal(before[0], logits._local_tensor) and torch.equal(before[1], labels._local_tensor),
        f"{case}: logits or labels were changed",
    )


def check_loss(case: Case, dense: Example, loss: DTensor, checks: Checks) -> None:
    wanted: list[object] = list(label_placements(case))
    if case.reduction != "none":
        wanted = [p if p.is_replicate() else Partial() for p in label_placements(case)]
    checks.that(list(loss.placements) == wanted, f"{case}: placements {loss.placements}, expected {wanted}")
    checks.that(loss.shape == dense.loss.shape, f"{case}: loss has shape {tuple(loss.shape)}")
    checks.that(loss.dtype == compute_dtype(case.dtype), f"{case}: loss has dtype {loss.dtype}")
    allowed = ROUNDINGS * unit_roundoff(compute_dtype(case.dtype)) * dense.scale
    if case.reduction == "none":
        mine = cut(dense.loss, loss.device_mesh, label_placements(case))._local_tensor
        checks.close(loss._local_tensor, mine, allowed, f"{case}: this rank's losses")
    else:
        checks.close(loss.detach().full_tensor(), dense.loss, allowed, f"{case}: loss")


def check_gradient(case: Case, dense: Example, logits: DTensor, checks: Checks) -> None:
    gradient = logits.grad
    if not isinstance(gradient, DTensor):
        checks.that(False, f"{case}: the gradient is a {type(gradient).__name__}")
        return
    checks.that(
        gradient.placements == logits.placements, f"{case}: gradient has placements {gradient.placements}"
    )
    checks.that(
        gradient.shape == logits.shape and gradient.stride() == logits.stride(),
        f"{case}: gradient has shape {gradient.shape} and stride {gradient.stride()}",
    )
    expected = cut(dense.gradient, logits.device_mesh, logits.placements)._local_tensor
    size = float(dense.gradient.abs().max()) + float(dense.upstream.abs().max()) * (1 + 1 / (1 + dense.scale))
    computed = ROUNDINGS * unit_roundoff(compute_dtype(case.dtype)) * size
    allowed = computed + storage_error(case.dtype) * float(dense.gradient.abs().max())
    checks.close(gradient._local_tensor, expected, allowed, f"{case}: gradient")


def is_split(layout: MeshLayout) -> bool:
    """Whether several ranks share the vocabulary."""
    return any(role == "tp" and size > 1 for role, size in zip(layout.roles, layout.ranks, strict=True))


def forward_collectives(case: Case) -> Counter[str]:
    """One gather over a split vocabulary, and the mean's sums over each mesh dimension of the batch; none
    where a rank's part of the batch is empty or the TP dimension has one rank."""
    layout = case.layout
    mesh = mesh_of(layout)
    rows = cut(example(case).labels, mesh, label_placements(case))._local_tensor.numel()
    counts: Counter[str] = Counter()
    if is_split(layout) and rows:
        counts["c10d::_allgather_base_"] = 1
    if case.reduction == "mean":
        counts["c10d::allreduce_"] = sum(role in ("batch", "seq") for role in layout.roles)
    return +counts


def statistics_and_bf16(rank: int, case: Case) -> Outcome:
    """Statistics are DTensors like the loss; bf16 logits have fp32 losses."""
    checks = Checks()
    dense, mesh = example(case), mesh_of(case.layout)
    logits = cut(dense.logits, mesh, logits_placements(case))
    labels = cut(dense.labels, mesh, label_placements(case))
    loss, statistics = loss_parallel_cross_entropy(logits, labels, return_statistics=True)
    x = dense.logits.double()
    log_p = x.log_softmax(-1)
    kept = dense.labels != -100
    target = log_p.gather(-1, dense.labels.clamp(min=0)[..., None])[..., 0]
    expected = {
        "log_sum_exp": x.logsumexp(-1),
        "target_log_prob": torch.where(kept, target, 0.0),
        "entropy": -(log_p.exp() * log_p).sum(-1),
        "correct": kept & (dense.labels == x.argmax(-1)),
    }
    checks.that(loss.dtype == torch.float32, f"loss of {case.dtype} has dtype {loss.dtype}")
    for name, value in expected.items():
        actual = getattr(statistics, name)
        checks.that(list(actual.placements) == label_placements(case), f"{name} has {actual.placements}")
        full = actual.full_tensor()
        compared = kept if name in ("log_sum_exp", "entropy") else torch.ones_like(kept)
        checks.close(full[compared].double(), value[compared].double(), 1e-4, name)
    return checks.outcome


def plain_shards(rank: int, classes: int, shape: tuple[int, ...], reduction: str, described: bool) -> Outcome:
    """The direct API on plain tensors and a group, every option at once."""
    checks = Checks()
    group, world = dist.group.WORLD, dist.get_world_size()
    case = Case(
        layout=None,  # type: ignore[arg-type]
        shape=(*shape, classes),
        reduction=reduction,
        weighted=True,
        label_smoothing=0.1,
        ignored="some",
        z_loss_weight=1e-2,
        direct=True,
    )
    dense = example(case)
    full = -(-classes // world)
    mine = slice(min(classes, rank * full), min(classes, (rank + 1) * full))
    logits = dense.logits[..., mine].clone().requires_grad_()
    with CollectiveCounter() as counter:
        loss = loss_parallel_cross_entropy(
            logits,
            dense.labels,
            group,
            classes if described else None,
            dense.weight,
            label_smoothing=0.1,
            z_loss_weight=1e-2,
            reduction=reduction,
        )
        loss.backward(dense.upstream)
    checks.that(sum(counter.calls.values()) == 1, f"collectives {dict(counter.calls)}")
    checks.close(loss, dense.loss, 1e-12 * dense.scale, f"loss of {case}")
    checks.close(logits.grad, dense.gradient[..., mine], 1e-12 * dense.scale, f"gradient of {case}")
    return checks.outcome


def overwritten(rank: int, case: Case) -> Outcome:
    """`overwrite_input` puts the gradient into the logits' memory, and whoever needs the logits later is
    told."""
    checks = Checks()
    dense, mesh = example(case), mesh_of(case.layout)
    leaf = cut(dense.logits, mesh, logits_placements(case)).requires_grad_()
    labels = cut(dense.labels, mesh, label_placements(case))
    logits = leaf * 1.0
    loss = loss_parallel_cross_entropy(logits, labels, reduction="sum", overwrite_input=True)
    (gradient,) = torch.autograd.grad(loss, logits)
    checks.that(
        gradient._local_tensor.data_ptr() == logits._local_tensor.data_ptr(),
        "the gradient has its own memory",
    )
    plain = loss_parallel_cross_entropy(leaf, labels, reduction="sum")
    (expected,) = torch.autograd.grad(plain, leaf)
    checks.close(gradient._local_tensor, expected._local_tensor, 0.0, "gradient")
    logits = leaf * 1.0
    other = logits.square()
    loss = loss_parallel_cross_entropy(logits, labels, reduction="sum", overwrite_input=True)
    loss.backward()
    checks.raises(
        RuntimeError, ["modified by an inplace operation"], lambda: other.sum().backward(), "a later reader"
    )
    checks.raises(
        ValueError,
        ["overwrite_input=True", "leaf"],
        lambda: loss_parallel_cross_entropy(leaf, labels, overwrite_input=True),
        "a leaf",
    )
    return checks.outcome


def replicated_upstream(rank: int, case: Case) -> Outcome:
    """HAZARDS 21: an upstream gradient of any placements, and a loss that goes on being computed with."""
    checks = Checks()
    dense, mesh = example(case), mesh_of(case.layout)
    labels = cut(dense.labels, mesh, label_placements(case))
    replicate = [Replicate()] * mesh.ndim

    def gradient(finish: Callable[[DTensor], None]) -> DTensor:
        logits = cut(dense.logits, mesh, logits_placements(case)).requires_grad_()
        finish(call(case, logits, labels, dense.weight))
        return logits

    upstream = dense.upstream
    ways: dict[str, Callable[[DTensor], None]] = {
        "replicated grad_output": lambda loss: loss.backward(cut(upstream, mesh, replicate)),
        "full_tensor": lambda loss: (loss.full_tensor() * upstream).sum().backward(),
        "redistributed": lambda loss: (
            (loss.redistribute(mesh, replicate) * cut(upstream, mesh, replicate)).sum().backward()
        ),
        "half twice": lambda loss: (
            loss.backward(cut(upstream * 0.5, mesh, replicate), retain_graph=True),
            loss.backward(cut(upstream * 0.5, mesh, replicate)),
        )[0],
    }
    for name, finish in ways.items():
        logits = gradient(finish)
        check_gradient(case, dense, logits, checks)
        if checks.failures:
            checks.failures[-1] = f"{name}: {checks.failures[-1]}"
    return checks.outcome


def gather_cases(rank: int, cases: Sequence[Case]) -> Outcome:
    """One gather; the gathered logits and their gradient, of DTensors and of plain shards."""
    checks = Checks()
    for case in cases:
        dense, mesh = example(case), mesh_of(case.layout)
        placements = logits_placements(case)
        logits = cut(dense.logits, mesh, placements).requires_grad_()
        whole = [
            Replicate() if role == "tp" else p for role, p in zip(case.layout.roles, placements, strict=True)
        ]
        with CollectiveCounter() as counter:
            gathered = gather_tensor_parallel_logits(logits)
            gathered.backward(cut(dense.gradient.to(case.dtype), mesh, whole))
        checks.that(list(gathered.placements) == whole, f"{case}: placements {gathered.placements}")
        expected = cut(dense.logits, mesh, whole)._local_tensor
        checks.that(torch.equal(gathered._local_tensor, expected), f"{case}: gathered logits differ")
        wanted_calls = {"c10d::_allgather_base_": 1} if is_split(case.layout) else {}
        checks.that(dict(counter.calls) == wanted_calls, f"{case}: {dict(counter.calls)}")
        checks.that(logits.grad.placements == logits.placements, f"{case}: {logits.grad.placements}")
        wanted = cut(dense.gradient.to(case.dtype), mesh, placements)._local_tensor
        checks.that(torch.equal(logits.grad._local_tensor, wanted), f"{case}: gradient differs")
    return checks.outcome


def gather_plain(rank: int, sizes: Sequence[int], described: bool, dtype: torch.dtype) -> Outcome:
    checks = Checks()
    classes = sum(sizes)
    generator = torch.Generator().manual_seed(1)
    full = torch.randn(2, 3, classes, generator=generator).to(dtype)
    upstream = torch.randn(2, 3, classes, generator=generator).to(dtype)
    mine = slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))
    logits = full[..., mine].clone().requires_grad_()
    with CollectiveCounter() as counter:
        gathered = gather_tensor_parallel_logits(logits, dist.group.WORLD, classes if described else None)
        gathered.backward(upstream)
    checks.that(torch.equal(gathered, full), f"{sizes}: gathered logits differ")
    checks.that(torch.equal(logits.grad, upstream[..., mine]), f"{sizes}: gradient differs")
    checks.that(sum(counter.calls.values()) == (1 if described else 2), f"{sizes}: {dict(counter.calls)}")
    return checks.outcome


def same_loss_in_every_position(rank: int, case: Case) -> Outcome:
    """The context counts for the call alone: nested, re-entered, after exceptions, backward outside."""
    checks = Checks()
    dense, mesh = example(case), mesh_of(case.layout)
    labels = cut(dense.labels, mesh, label_placements(case))

    def fresh() -> DTensor:
        return cut(dense.logits, mesh, logits_placements(case)).requires_grad_()

    def loss_of(logits: DTensor) -> DTensor:
        return torch.nn.CrossEntropyLoss(reduction=case.reduction)(logits, labels)

    logits = fresh()
    context = loss_parallel()
    with context:
        with context, loss_parallel(strict=False):
            checks.that(is_loss_parallel_active(), "not active inside")
        loss = loss_of(logits)  # after the inner ones have ended
        checks.that(is_loss_parallel_active(), "an inner exit ended the outer context")
    checks.that(not is_loss_parallel_active(), "still active outside")
    check_loss(case, dense, loss, checks)
    loss.backward(cut(dense.upstream, mesh, [Replicate()] * mesh.ndim))
    check_gradient(case, dense, logits, checks)

    class Unusual(Exception):
        pass

    for _ in range(2):
        try:
            with context, loss_parallel(mesh=mesh):
                raise Unusual
        except Unusual:
            checks.that(not is_loss_parallel_active(), "an exception left the context open")
    checks.that(torch._C._len_torch_function_stack() == 0, "a mode was left on the stack")

    @loss_parallel()
    def decorated() -> DTensor:
        return loss_of(fresh())

    check_loss(case, dense, decorated(), checks)
    return checks.outcome


def refusals_of_the_context(rank: int) -> Outcome:
    checks = Checks()
    case = Case(FOUR[1], (8, 16), "mean")
    dense, mesh = example(case), mesh_of(case.layout)
    logits = cut(dense.logits, mesh, logits_placements(case))
    labels = cut(dense.labels, mesh, label_placements(case))
    refused: dict[str, Callable[[], object]] = {
        "F.log_softmax": lambda: F.log_softmax(logits, dim=-1),
        "F.log_softmax without dim": lambda: F.log_softmax(logits),
        "torch.log_softmax": lambda: torch.log_softmax(logits, 1),
        "torch.special.log_softmax": lambda: torch.special.log_softmax(logits, 1),
        "Tensor.log_softmax": lambda: logits.log_softmax(dim=1),
        "nn.LogSoftmax": lambda: torch.nn.LogSoftmax(dim=1)(logits),
        "F.nll_loss": lambda: F.nll_loss(logits, labels),
        "nn.NLLLoss": lambda: torch.nn.NLLLoss(reduction="sum")(logits, labels),
    }
    for name, function in refused.items():
        with loss_parallel():
            checks.raises(NotImplementedError, ["inside loss_parallel", "Shard(dim=1)"], function, name)
    soft = cut(dense.logits.softmax(-1), mesh, logits_placements(case))
    with loss_parallel():
        checks.raises(
            TypeError, ["class probabilities"], lambda: F.cross_entropy(logits, soft), "float targets"
        )
        whole = gather_tensor_parallel_logits(logits)
        checks.close(
            F.log_softmax(whole, -1).full_tensor(), dense.logits.log_softmax(-1), 1e-12, "of whole rows"
        )
        # An asyncio task that did not open the context runs on its thread, with the function mode on.
        other = contextvars.Context().run(lambda: F.log_softmax(logits, -1))
        checks.close(other.full_tensor(), dense.logits.log_softmax(-1), 1e-12, "in another task")
    outside = F.log_softmax(logits, -1)
    checks.close(outside.full_tensor(), dense.logits.log_softmax(-1), 1e-12, "outside")
    return checks.outcome


def strict_torch(rank: int) -> Outcome:
    """PyTorch's own restrictions, and nothing else."""
    checks = Checks()
    for layout in FOUR[:2]:
        for reduction in ("none", "sum", "mean"):
            case = Case(layout, (9, 17), reduction, weighted=True, strict="torch", ignored="some")
            if reduction == "mean" and len(layout.ranks) > 1:
                words = ["reduction='mean'", "2 dimensions", "strict='torch'"]
                _expect_refusal(case, words, checks)
            else:
                check_case(case, checks)
    smoothing = Case(FOUR[0], (9, 17), "sum", label_smoothing=0.1, strict="torch")
    _expect_refusal(smoothing, ["label_smoothing=0.1", "strict='torch'"], checks)
    return checks.outcome


def _expect_refusal(case: Case, words: Sequence[str], checks: Checks) -> None:
    dense, mesh = example(case), mesh_of(case.layout)
    logits = cut(dense.logits, mesh, logits_placements(case))
    labels = cut(dense.labels, mesh, label_placements(case))
    checks.raises(NotImplementedError, words, lambda: call(case, logits, labels, dense.weight), str(case))
