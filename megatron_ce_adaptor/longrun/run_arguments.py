"""Were two runs the same but for the cross entropy? Decided from the argument dumps in their logs."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

# What may differ: the thing compared, where output goes, and who this process was.
_FREE = frozenset(
    """
    cross_entropy_fusion_impl cross_entropy_loss_fusion
    save load load_main_params_from_ckpt pretrained_checkpoint
    tensorboard_dir tensorboard_queue_size
    wandb_project wandb_exp_name wandb_save_dir wandb_entity one_logger_project one_logger_run_name
    data_cache_path memory_snapshot_path record_memory_history non_persistent_global_ckpt_dir
    non_persistent_local_ckpt_dir log_progress logging_level error_injection_rate
    rank local_rank master_addr master_port iteration ckpt_step timestamp comment straggler_ctrlr_port
    """.split()  # noqa: SIM905 - a list of thirty quoted names reads worse
)
# What a reader of a report wants to see of a configuration.
SHOWN_ARGUMENTS = (
    "world_size", "tensor_model_parallel_size", "pipeline_model_parallel_size", "expert_model_parallel_size",
    "expert_tensor_parallel_size", "context_parallel_size", "data_parallel_size", "sequence_parallel",
    "num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_experts", "moe_router_topk",
    "padded_vocab_size", "seq_length", "micro_batch_size", "global_batch_size", "train_iters", "lr", "min_lr",
    "lr_decay_style", "lr_warmup_iters", "weight_decay", "clip_grad", "seed", "bf16", "fp16",
    "transformer_impl", "use_distributed_optimizer", "distributed_backend", "data_path",
    "tokenizer_type", "tokenizer_model", "cross_entropy_loss_fusion",
)  # fmt: skip
_PATH = re.compile(r"(?:~|\.{0,2}|[\w.\-]+)/(?:[\w.\-]+/)*([\w.\-]*)")
_OBJECT_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")


@dataclass(frozen=True)
class Difference:
    """One argument in which two runs differ; None where a run's dump has no such argument."""

    name: str
    native: str | None
    te: str | None

    def __str__(self) -> str:
        return self.against("te")

    def against(self, other: str) -> str:
        """The difference in words; `other` names the run that is compared with native."""
        shown = ["absent" if v is None else repr(v[:60]) for v in (self.native, self.te)]
        return f"{self.name} ({shown[0]} in native, {shown[1]} in {other})"


def comparable_arguments(arguments: Mapping[str, str]) -> dict[str, str]:
    """The arguments that decide what is trained; of paths only the last part, which names the data."""
    return {
        name: _OBJECT_ADDRESS.sub("", _PATH.sub(r"\1", value))
        for name, value in arguments.items()
        if name not in _FREE
    }


def argument_differences(native: Mapping[str, str], te: Mapping[str, str]) -> list[Difference]:
    """Arguments in which two dumps differ and may not, sorted by name."""
    a, b = comparable_arguments(native), comparable_arguments(te)
    return [
        Difference(name, a.get(name), b.get(name))
        for name in sorted(a.keys() | b.keys())
        if a.get(name) != b.get(name) and name != "save_interval"  # a resumed run needs one
    ]
