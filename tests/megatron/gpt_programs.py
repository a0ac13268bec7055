"""One real GPTModel on the ranks of a test: its loss and gradients with and without logits."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import sys
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_ce_adaptor.megatron import loss_chunks

SEQUENCE, BATCH, HIDDEN, VOCABULARY = 16, 2, 16, 96
TOKENS = SEQUENCE * BATCH
SIZES = (1, 5, TOKENS, 10 * TOKENS)  # one token, one that does not divide, all, more than there are


@functools.cache
def prepare() -> None:
    """Megatron on this rank's CPU, tensor parallelism over all ranks."""
    import megatron_ce_adaptor  # noqa: F401
    from megatron_ce_adaptor.megatron import apply_patches, cpu_device, wheel_fixes

    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    cpu_device.install()
    cpu_device.install_in_megatron()
    wheel_fixes.apply()
    apply_patches()
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    parallel_state.initialize_model_parallel(tensor_model_parallel_size=dist.get_world_size())
    model_parallel_cuda_manual_seed(3)


@dataclasses.dataclass(frozen=True)
class Variant:
    sequence_parallel: bool = False
    tied: bool = False
    mtp: bool = False
    bf16: bool = False
    fused: bool = False  # the output layer adds to main_grad itself
    ddp: bool = False
    mup: bool = False


def as_this_version_has_it(variant: Variant) -> Variant:
    """From 0.19 on multi-token prediction needs logits, and is refused; 0.16 has no MuP."""
    prepare()
    from megatron.core.transformer import multi_token_prediction
    from megatron.core.transformer.transformer_config import TransformerConfig

    needs_logits = hasattr(multi_token_prediction, "_compute_mtp_acceptance_counts")
    scales = hasattr(TransformerConfig, "use_mup")
    return dataclasses.replace(variant, mtp=variant.mtp and not needs_logits, mup=variant.mup and scales)


def build(variant: Variant) -> Any:
    """A one-layer GPT, the same weights on every call."""
    prepare()
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec, get_gpt_mtp_block_spec
    from megatron.core.transformer.transformer_config import TransformerConfig

    torch.manual_seed(11)
    dtype = torch.bfloat16 if variant.bf16 else torch.float32
    config = TransformerConfig(
        num_layers=1,
        hidden_size=HIDDEN,
        num_attention_heads=max(2, dist.get_world_size()),
        tensor_model_parallel_size=dist.get_world_size(),
        sequence_parallel=variant.sequence_parallel and dist.get_world_size() > 1,
        params_dtype=dtype,
        bf16=variant.bf16,
        pipeline_dtype=dtype,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        cross_entropy_loss_fusion=True,
        cross_entropy_fusion_impl="te",
        mtp_num_layers=1 if variant.mtp else None,
        **({"use_mup": True, "mup_width_mult": 2.0, "mup_output_mult": 0.3} if variant.mup else {}),
    )
    layer = get_gpt_layer_local_spec(normalization="RMSNorm")
    mtp = get_gpt_mtp_block_spec(config, layer, use_transformer_engine=False) if variant.mtp else None
    model = GPTModel(
        config=config,
        transformer_layer_spec=layer,
        vocab_size=VOCABULARY,
        max_sequence_length=SEQUENCE,
        share_embeddings_and_output_weights=variant.tied,
        position_embedding_type="rope",
        mtp_block_spec=mtp,
    )
    if variant.bf16:
        model.bfloat16()
    if variant.ddp:
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

        settings = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True, overlap_grad_reduce=True, use_distributed_optimizer=True
        )
        model = DistributedDataParallel(config, settings, model)
        model.module.output_layer.gradient_accumulation_fusion = variant.fused
    return model


@dataclasses.dataclass(frozen=True)
class Batch:
    tokens: torch.Tensor
    labels: torch.Tensor
    mask: torch.Tensor
    positions: torch.Tensor

    @classmethod
    def make(cls) -> Batch:
        draw = torch.Generator().manual_seed(5)
        tokens = torch.randint(0, VOCABULARY, (BATCH, SEQUENCE + 1), generator=draw)
        mask = (torch.rand(BATCH, SEQUENCE, generator=draw) < 0.7).float()
        labels = tokens[:, 1:].clone()
        labels[mask == 0] = torch.tensor([-1, 0, 10**6])[: 1 + 2][torch.arange(int((mask == 0).sum())) % 3]
        positions = torch.arange(SEQUENCE).expand(BATCH, SEQUENCE)
        return cls(tokens[:, :-1].contiguous(), labels, mask, positions)


@contextlib.contextmanager
def chunks(size: int | str | None, gradients: str = "forward") -> Iterator[None]:
    os.environ[loss_chunks.TOKENS] = "" if size is None else str(size)
    os.environ[loss_chunks.GRADIENTS] = gradients
    try:
        yield
    finally:
        del os.environ[loss_chunks.TOKENS], os.environ[loss_chunks.GRADIENTS]


def step(
    model: Any, size: int | str | None, gradients: str = "forward", upstream: torch.Tensor | None = None
) -> dict[str, torch.Tensor]:
    """The losses and every parameter's gradient of two micro-batches, by name.

    Args:
        upstream: [b, s], multiplied with the loss in the mask's place.
    """
    batch = Batch.make()
    ddp = hasattr(model, "ddp_config")
    model.train()
    model.zero_grad_buffer() if ddp else model.zero_grad()
    weights = batch.mask if upstream is None else upstream
    with chunks(size, gradients):
        for micro_batch in range(2):
            last = contextlib.nullcontext() if micro_batch or not ddp else model.no_sync()
            with last:
                loss = model(batch.tokens, batch.positions, None, labels=batch.labels, loss_mask=batch.mask)
                ((loss * weights).sum() * 0.37 / batch.mask.sum()).backward()
    if ddp:
        model.finish_grad_sync()
    found = {"loss": loss.detach()}
    for name, parameter in model.named_parameters():
        grad = parameter.main_grad if ddp else parameter.grad
        found[name.removeprefix("module.")] = grad.detach().float().clone()
    return found


def assert_equal(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """But for roundings: losses of tokens that count within 1e-6, each gradient's norm within 1e-5."""
    assert actual.keys() == expected.keys()
    assert actual["loss"].dtype == expected["loss"].dtype == torch.float32
    assert actual["loss"].shape == (BATCH, SEQUENCE)
    mask = Batch.make().mask
    for name in expected:
        a, e = (x * mask if name == "loss" else x for x in (actual[name], expected[name]))
        error, size = float((a - e).norm()), float(e.norm())
        assert error <= (1e-6 if name == "loss" else 1e-5) * size, f"{name}: {error:.2e} of {size:.2e}"


def version_in(rank: int, folder: str) -> str:
    """Of the Megatron-Core that is tested here: the one in `folder`."""
    sys.path.insert(0, folder)
    prepare()
    from megatron_ce_adaptor import patch_status

    return str(patch_status().megatron_version)


def equal_with_and_without(rank: int) -> tuple[str, int]:
    """In fp32, to rounding, for every chunk size, gradients in forward and in backward; the line at exit and
    the number of losses in chunks."""
    from megatron_ce_adaptor.megatron.call_counter import summary_line

    calls = 0
    for variant in (
        Variant(),
        Variant(sequence_parallel=True, tied=True, mtp=True),
        Variant(sequence_parallel=True, mtp=True, mup=True),
        Variant(tied=True, mtp=True),
    ):
        variant = as_this_version_has_it(variant)
        model = build(variant)
        whole = step(model, None)
        assert all(
            whole[f"decoder.{name}.weight"].any() for name in ("final_layernorm", "layers.0.mlp.linear_fc2")
        )
        for size in SIZES:
            for gradients in ("forward", "backward"):
                assert_equal(step(model, size, gradients), whole)
                calls += 4 if variant.mtp else 2
    return summary_line(), calls


def data_parallel(rank: int) -> None:
    """Megatron's DDP with a distributed optimizer's buffers, reduced while backward runs (its hooks refuse to
    be called twice), and main_grad that the output layer adds to by itself."""
    for variant in (
        Variant(sequence_parallel=True, ddp=True),
        Variant(tied=True, ddp=True),
        Variant(sequence_parallel=True, tied=True, mtp=True, ddp=True),
    ):
        variant = as_this_version_has_it(variant)
        whole = step(build(variant), None)
        model = build(dataclasses.replace(variant, fused=True))
        for gradients in ("forward", "backward"):
            assert_equal(step(model, 5, gradients), whole)
            shared = model.module.shared_embedding_or_output_weight()
            weight = shared if variant.tied else model.module.output_layer.weight
            assert weight.grad_added_to_main_grad


def in_bf16(rank: int) -> None:
    """Chunks of 3 of 32 tokens are hardly further from fp32 than the whole is."""
    exact = step(build(Variant(ddp=True)), None)

    def distances(found: dict[str, torch.Tensor]) -> dict[str, float]:
        """Of the output layer's gradient, and of all together."""
        squares = {name: (float((found[name] - e).norm()), float(e.norm())) for name, e in exact.items()}
        error, size = squares["output_layer.weight"]
        errors, sizes = (sum(pair[i] ** 2 for pair in squares.values()) ** 0.5 for i in (0, 1))
        return {"output layer": error / size, "all": errors / sizes}

    whole = distances(step(build(Variant(bf16=True, ddp=True)), None))
    for fused in (False, True):
        model = build(Variant(bf16=True, ddp=True, fused=fused))
        for gradients in ("forward", "backward"):
            mine = distances(step(model, 3, gradients))
            for name, distance in whole.items():
                assert mine[name] <= 1.3 * distance, (name, fused, gradients, mine, whole)


def any_upstream(rank: int) -> None:
    """Upstream gradients that the loss mask does not foretell. One that it foretells on the first rank only
    does not leave the ranks waiting for each other."""
    model = build(Variant(sequence_parallel=True))
    batch = Batch.make()
    draw = torch.Generator().manual_seed(2)
    noise = torch.randn(BATCH, SEQUENCE, generator=draw)
    known = ((batch.labels >= 0) & (batch.labels < VOCABULARY)).float()
    for upstream in (noise * batch.mask, batch.mask * -3, batch.mask + 1e-5 * known, noise * known):
        whole = step(model, None, upstream=upstream)
        assert_equal(step(model, 5, upstream=upstream), whole)
    found = step(model, 5, upstream=torch.zeros(BATCH, SEQUENCE))
    assert not any(grad.any() for name, grad in found.items() if name != "loss")
    step(model, 5, upstream=batch.mask + rank * noise.abs())


class Watch(TorchDispatchMode):
    """Counts collectives, and keeps the most rows of a tensor that has this rank's columns of logits."""

    def __init__(self) -> None:
        super().__init__()
        self.collectives: Counter[str] = Counter()
        self.rows = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.namespace == "c10d":
            self.collectives[function._schema.name.partition("::")[2].strip("_")] += 1
        found = function(*args, **(kwargs or {}))
        if isinstance(found, torch.Tensor) and found.dim() > 1 and function is not torch.ops.aten.t.default:
            columns = VOCABULARY // dist.get_world_size()
            self.rows = max(self.rows, found.numel() // columns if found.shape[-1] == columns else 0)
        return found


def logits_and_collectives(rank: int) -> dict[str, tuple[int, dict[str, int]]]:
    """By way: the most logits, and the collectives of output layer and loss in two micro-batches."""
    model = build(Variant(sequence_parallel=True))
    found = {}
    for name, size, gradients in (
        ("whole", None, ""),
        ("forward", 5, "forward"),
        ("backward", 5, "backward"),
    ):
        with Watch() as watch:
            step(model, size, gradients or "forward")
        found[name] = (watch.rows, dict(watch.collectives))
    return found


def without_gradients(rank: int) -> None:
    """Evaluation is chunked, too; logits are there for who asks for them."""
    model = build(Variant(sequence_parallel=True))
    batch = Batch.make()
    given = (batch.tokens, batch.positions, None)
    known = {"labels": batch.labels, "loss_mask": batch.mask}
    with torch.no_grad():
        whole = model(*given, **known)
        logits = model(*given)
        with chunks(5), Watch() as watch:
            torch.testing.assert_close(model(*given, **known), whole)
        assert watch.rows == 5
        with chunks(5):
            assert torch.equal(model(*given), logits)
            gathered = model(*given, **known, runtime_gather_output=True)
    assert gathered.shape == whole.shape
    assert "forward" not in vars(model.output_layer)
    assert "compute_language_model_loss" not in vars(model)


def refused(rank: int) -> list[str]:
    """What a training step says where chunks are set and cannot be had, the same on every rank."""
    batch = Batch.make()
    said: list[str] = []

    def attempt(model: Any, size: str = "5", **more: Any) -> None:
        try:
            with chunks(size):
                model(batch.tokens, batch.positions, None, labels=batch.labels, loss_mask=batch.mask, **more)
            said.append("accepted")
        except (RuntimeError, ValueError) as error:
            said.append(f"{type(error).__name__}: {error}")

    model = build(Variant())
    attempt(model, runtime_gather_output=True)
    attempt(model, output_processor=lambda **given: given["hidden_states"])
    hook = model.output_layer.register_forward_hook(lambda module, args, output: None)
    attempt(model)
    hook.remove()
    model.output_layer.forward = model.output_layer.forward
    attempt(model)
    del model.output_layer.forward
    model.compute_language_model_loss = lambda labels, logits: logits.sum()
    attempt(model)
    del model.compute_language_model_loss
    model.output_layer.weight.__fsdp_param__ = True
    attempt(model)
    del model.output_layer.weight.__fsdp_param__
    attempt(model, "-4")
    attempt(model, "many")
    whole = type(model).__mro__[1].compute_language_model_loss
    logits = torch.zeros(SEQUENCE, BATCH, VOCABULARY // dist.get_world_size(), requires_grad=True)
    try:
        with chunks(5):
            whole(model, batch.labels, logits)
    except RuntimeError as error:
        said.append(str(error))
    attempt(model, "auto")
    model.config.cross_entropy_fusion_impl = "native"
    attempt(model)
    return said
