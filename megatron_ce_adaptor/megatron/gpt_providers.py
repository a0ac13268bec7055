"""GPT for Megatron's training loop: what builds the model, the datasets and one forward step.

Megatron-LM keeps these in ``pretrain_gpt.py``, which the megatron-core wheel does not carry.  Here are our
own for dense and mixture-of-experts GPT over indexed (or mock) data; they follow its loss accounting, so
the logged losses are the same to the printed digits.

Imports torch and Megatron: prepare the device first (see :mod:`megatron_ce_adaptor.megatron.pretrain`).
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import fields
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_mtp_block_spec
from megatron.core.rerun_state_machine import get_rerun_state_machine
from megatron.core.utils import StragglerDetector, get_attr_wrapped_model, get_batch_on_this_cp_rank
from megatron.training import get_args, get_timers, get_tokenizer, print_rank_0
from megatron.training.arguments import core_transformer_config_from_args
from megatron.training.utils import get_blend_and_blend_per_split, is_first_or_last_pipeline_stage

# A loss this many times the largest one seen so far is reported with --check-for-spiky-loss.
_SPIKE_FACTOR = 10

_BATCH_KEYS = ("tokens", "labels", "loss_mask", "attention_mask", "position_ids")

# Dataset settings whose names differ from those of the command line.
_ARGUMENT_OF_FIELD = {
    "random_seed": "seed",
    "sequence_length": "seq_length",
    "path_to_cache": "data_cache_path",
    "create_attention_mask": "create_attention_mask_in_dataloader",
    "fast_cache_load": "dataloader_fast_cache_load",
    "defer_npy_index_mmap": "dataloader_defer_npy_index_mmap",
}

_straggler_detector = StragglerDetector()


# --- model -----------------------------------------------------------------------------------------------


def model_provider(
    pre_process: bool = True,
    post_process: bool = True,
    vp_stage: int | None = None,
    config: Any = None,
    pg_collection: Any = None,
) -> GPTModel:
    """Build this pipeline stage's part of the GPT that the command line describes.

    Args:
        pre_process: the part starts with the embedding.
        post_process: the part ends with the output layer and the loss.
        vp_stage: index of the virtual pipeline stage, or None without interleaving.
        config: a TransformerConfig to use in place of the one made from the command line.
        pg_collection: process groups to use in place of the global ones.
    """
    args = get_args()
    print_rank_0("building GPT model ...")
    if config is None:
        config = core_transformer_config_from_args(args)
    layers = get_gpt_decoder_block_spec(
        config,
        use_transformer_engine=args.transformer_impl == "transformer_engine",
        normalization=args.normalization,
        qk_l2_norm=args.qk_l2_norm,
        vp_stage=vp_stage,
    )
    # Multi-token prediction: None on the stages that have none
    mtp = None
    if config.mtp_num_layers:
        mtp = get_gpt_mtp_block_spec(
            config, layers, args.transformer_impl == "transformer_engine", vp_stage=vp_stage
        )
    return GPTModel(
        config=config,
        transformer_layer_spec=layers,
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        pre_process=pre_process,
        post_process=post_process,
        fp16_lm_cross_entropy=args.fp16_lm_cross_entropy,
        parallel_output=True,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        rotary_percent=args.rotary_percent,
        rotary_base=args.rotary_base,
        rope_scaling=args.use_rope_scaling,
        mtp_block_spec=mtp,
        vp_stage=vp_stage,
        pg_collection=pg_collection,
    )


# --- data ------------------------------------------------------------------------------------------------


def _dataset_config(args: Any) -> GPTDatasetConfig:
    blend, blend_per_split = get_blend_and_blend_per_split(args)
    settings: dict[str, Any] = {
        "tokenizer": get_tokenizer(),
        "blend": blend,
        "blend_per_split": blend_per_split,
    }
    # The set of fields grows from version to version; every one that the command line sets is passed on.
    for field in fields(GPTDatasetConfig):
        argument = _ARGUMENT_OF_FIELD.get(field.name, field.name)
        if field.init and field.name not in settings and hasattr(args, argument):
            settings[field.name] = getattr(args, argument)
    return GPTDatasetConfig(**settings)


def is_dataset_built_on_rank(vp_stage: int | None = None) -> bool:
    """True on the ranks that read data: tensor rank 0 of the first and the last pipeline stage."""
    on_edge = is_first_or_last_pipeline_stage(vp_stage)
    return on_edge and parallel_state.get_tensor_model_parallel_rank() == 0


def train_valid_test_datasets_provider(
    num_samples: list[int], vp_stage: int | None = None
) -> tuple[Any, ...]:
    """Build the training, validation and test datasets.

    Args:
        num_samples: samples wanted of each of the three.
        vp_stage: index of the virtual pipeline stage, or None without interleaving.

    Returns:
        The three datasets, in that order; None on ranks that read no data.
    """
    args = get_args()
    print_rank_0("> building train, validation, and test datasets for GPT ...")
    datasets = BlendedMegatronDatasetBuilder(
        MockGPTDataset if args.mock_data else GPTDataset,
        num_samples,
        partial(is_dataset_built_on_rank, vp_stage=vp_stage),
        _dataset_config(args),
    ).build()
    print_rank_0("> finished creating GPT datasets ...")
    return tuple(datasets)


# Megatron then calls the provider on every rank, and the builder decides who reads.
train_valid_test_datasets_provider.is_distributed = True  # type: ignore[attr-defined]


def _keys_needed(args: Any, vp_stage: int | None) -> list[str]:
    """The entries of a batch that this pipeline stage uses, in the order in which they are broadcast."""
    ignore_virtual = vp_stage is None
    needed = []
    first = parallel_state.is_pipeline_first_stage(ignore_virtual=ignore_virtual, vp_stage=vp_stage)
    last = parallel_state.is_pipeline_last_stage(ignore_virtual=ignore_virtual, vp_stage=vp_stage)
    if first or (last and args.mtp_num_layers):  # multi-token prediction embeds the tokens once more
        needed += ["tokens", "position_ids"]
    if last:
        needed += ["labels", "loss_mask"]
    if needed and args.create_attention_mask_in_dataloader:
        needed.append("attention_mask")
    return needed


def _empty_entry(args: Any, key: str) -> torch.Tensor:
    shape: tuple[int, ...] = (args.micro_batch_size, args.seq_length)
    dtype = torch.int64
    if key == "loss_mask":
        dtype = torch.float32
    elif key == "attention_mask":
        shape = (args.micro_batch_size, 1, args.seq_length, args.seq_length)
        dtype = torch.bool
    return torch.empty(shape, dtype=dtype, device=torch.cuda.current_device())


def get_batch(
    data_iterator: Iterator[dict[str, torch.Tensor]] | None, vp_stage: int | None = None
) -> dict[str, Any]:
    """One micro-batch: read on tensor rank 0, broadcast to the others, cut for context parallelism.

    Returns:
        'tokens', 'labels', 'position_ids' int64 [b, s], 'loss_mask' fp32 [b, s], 'attention_mask' bool
        [b, 1, s, s]; None where this pipeline stage does not use the entry.
    """
    args = get_args()
    batch: dict[str, Any] = dict.fromkeys(_BATCH_KEYS)
    needed = _keys_needed(args, vp_stage)
    if not needed:
        return batch

    if parallel_state.get_tensor_model_parallel_rank() == 0:
        assert data_iterator is not None
        sample = next(data_iterator)
        for key in needed:
            batch[key] = sample[key].cuda(non_blocking=True)
    else:
        for key in needed:
            batch[key] = _empty_entry(args, key)
    for key in needed:
        torch.distributed.broadcast(
            batch[key],
            parallel_state.get_tensor_model_parallel_src_rank(),
            group=parallel_state.get_tensor_model_parallel_group(),
        )

    if args.context_parallel_size > 1:
        options: dict[str, Any] = {"cp_group": parallel_state.get_context_parallel_group()}
        if "is_hybrid_cp" in inspect.signature(get_batch_on_this_cp_rank).parameters:
            options["is_hybrid_cp"] = False
        batch = get_batch_on_this_cp_rank(batch, **options)
    return batch


# --- one step --------------------------------------------------------------------------------------------


def loss_func(
    loss_mask: torch.Tensor, output_tensor: torch.Tensor, model: Any = None
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Sum the losses of the tokens that count.

    Args:
        loss_mask: [b, s], 1 where a token counts.
        output_tensor: loss per token, [b, s].
        model: the model part that made it (unused; Megatron's convention).

    Returns:
        The sum as a 0-d fp32 tensor, the number of tokens that count as a 0-d int tensor, and
        ``{"lm loss": [sum, number]}`` for the log, which Megatron sums over micro-batches and data-parallel
        ranks before dividing.  Megatron itself divides the gradient by the number of tokens.
    """
    args = get_args()
    weights = loss_mask.view(-1).float()
    loss = torch.sum(output_tensor.view(-1).float() * weights)
    num_tokens = weights.sum().detach().to(torch.int)

    checker = get_rerun_state_machine()
    if args.check_for_nan_in_loss_and_grad:
        for name, is_bad in (("NaN", torch.isnan), ("Inf", torch.isinf)):
            checker.validate_result(
                result=loss,
                rejection_func=is_bad,
                message=f"found {name} in local forward loss calculation",
                tolerance=0.0,
                fatal=True,
            )
    if args.check_for_spiky_loss:
        checker.validate_result(
            result=loss,
            rejection_func=partial(checker.is_unexpectedly_large, threshold=_SPIKE_FACTOR, context="loss"),
            message="Spiky loss",
            tolerance=0.0,
            fatal=False,
        )
    return loss, num_tokens, {"lm loss": torch.stack([loss.detach(), num_tokens.to(loss.dtype)])}


def forward_step(data_iterator: Any, model: Any, return_schedule_plan: bool = False) -> tuple[Any, Any]:
    """Run the model on one micro-batch.

    Args:
        data_iterator: yields micro-batches on the ranks that read data.
        model: this rank's part of the model, possibly wrapped.
        return_schedule_plan: return the plan for overlapping expert communication in place of the output.

    Returns:
        The output (loss per token [b, s] on the last stage, hidden states before it) and `loss_func` bound to
        this micro-batch.
    """
    timers = get_timers()
    timers("batch-generator", log_level=2).start()
    with _straggler_detector(bdata=True):
        batch = get_batch(data_iterator, get_attr_wrapped_model(model, "vp_stage"))
    timers("batch-generator").stop()

    inputs = (batch["tokens"], batch["position_ids"], batch["attention_mask"])
    run = model.build_schedule_plan if return_schedule_plan else model
    with _straggler_detector:
        output = run(*inputs, labels=batch["labels"], loss_mask=batch["loss_mask"])
    return output, partial(loss_func, batch["loss_mask"], model=model)
