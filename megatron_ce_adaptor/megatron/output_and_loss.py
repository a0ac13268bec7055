"""GPTModel's last step without logits: output layer and loss in chunks of tokens.

Megatron's own ``_postprocess`` runs, with two things exchanged for the time of the call: the output layer
returns `DeferredLogits`, and ``compute_language_model_loss`` computes the loss of such. So multi-token
prediction, tied weights and whatever else a version does there stay Megatron's.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from megatron_ce_adaptor.megatron.deferred_logits import DeferredLogits
from megatron_ce_adaptor.megatron.loss_chunks import TOKENS, chunk_setting, gradients_setting
from megatron_ce_adaptor.megatron.speaker import say_once


def chunk_output_and_loss(postprocess: Callable[..., Any]) -> Callable[..., Any]:
    """Patch replacement of kind ``wrap`` for ``GPTModel._postprocess``.

    Nothing changes while MCE_LOSS_CHUNK_TOKENS is unset or 0, on stages without an output layer, and without
    labels. Where chunks cannot be had, a training step raises RuntimeError with the reason and anything else
    keeps Megatron's path, which is said once.
    """
    signature = inspect.signature(postprocess)

    @functools.wraps(postprocess)
    def postprocess_in_chunks(self: Any, *args: Any, **kwargs: Any) -> Any:
        chunk = chunk_setting()
        if chunk is None or not self.post_process:
            return postprocess(self, *args, **kwargs)
        given = signature.bind(self, *args, **kwargs).arguments
        if _keeps_logits(self, given):
            return postprocess(self, *args, **kwargs)
        with _deferred(self, given, chunk):
            return postprocess(self, *args, **kwargs)

    return postprocess_in_chunks


def refuse_whole_logits(logits: Tensor) -> None:
    """Raises where te gets logits with a gradient although they were to be chunked: a model that is no
    GPTModel, or one whose last step is not Megatron's.

    Raises:
        RuntimeError: see there.
    """
    if chunk_setting() is None or not (torch.is_grad_enabled() and logits.requires_grad):
        return
    from megatron_ce_adaptor.megatron import patching

    status = patching.patch_status()
    state = next(t for t in status.targets if t.target.endswith("GPTModel._postprocess"))
    raise RuntimeError(
        f"{TOKENS} is set, but this model computes the logits of the whole sequence: only megatron-core's "
        f"GPTModel (here {status.megatron_version}; its patch: {state.state.value}) is chunked; unset it."
    )


# ------------------------------------------------------------------------- whether there are chunks


def _keeps_logits(model: Any, given: dict[str, Any]) -> bool:
    """Whether Megatron's path is kept.

    Raises:
        RuntimeError: it would be, in training, for a reason that makes the setting void.
    """
    labels = given.get("labels")
    if not _computes_te(model.config):
        say_once(f"{TOKENS} has no effect without {_TE_FLAGS}", _group(model))
        return True
    if labels is None:
        if torch.is_grad_enabled():
            say_once(
                f"{TOKENS} has no effect where the model is called without labels: it returns logits",
                _group(model),
            )
        return True
    obstacle = _obstacle(model, given)
    if obstacle is None:
        return False
    if torch.is_grad_enabled():
        raise RuntimeError(f"{TOKENS} is set, but {obstacle}; unset it or change that.")
    say_once(f"{TOKENS} has no effect without gradients here, because {obstacle}", _group(model))
    return True


_TE_FLAGS = "--cross-entropy-loss-fusion --cross-entropy-fusion-impl te"


def _computes_te(config: Any) -> bool:
    return bool(config.cross_entropy_loss_fusion) and config.cross_entropy_fusion_impl == "te"


def _group(model: Any) -> Any:
    return getattr(getattr(model, "output_layer", None), "tp_group", None)


def _obstacle(model: Any, given: dict[str, Any]) -> str | None:
    """Why there can be no chunks, as the second half of a sentence."""
    if given.get("output_processor") is not None:
        return "the output processor of this call is given the output layer's logits"
    if given.get("inference_context") is not None or given.get("inference_params") is not None:
        return "inference needs logits"
    if getattr(model.config, "config_logger_dir", ""):
        return "--config-logger-dir logs the logits"
    loss = model.compute_language_model_loss
    owner = getattr(getattr(loss, "__func__", loss), "__globals__", {}).get("__name__", "?")
    if owner != "megatron.core.models.common.language_module.language_module":
        return f"the model's compute_language_model_loss is not Megatron's but one of {owner}"
    head = model.output_layer
    tied = model.share_embeddings_and_output_weights
    of_head = _obstacle_in_head(head, model.shared_embedding_or_output_weight() if tied else head.weight)
    if of_head is not None:
        return of_head
    gathers = given.get("runtime_gather_output")
    if (head.gather_output if gathers is None else gathers) and head.tp_group.size() > 1:
        return "the output layer gathers the logits of all tensor-parallel ranks"
    mtp = sys.modules.get("megatron.core.transformer.multi_token_prediction")
    if model.config.mtp_num_layers and model.training and hasattr(mtp, "_compute_mtp_acceptance_counts"):
        return "multi-token prediction counts accepted tokens in this version, which takes the logits"
    return None


def _obstacle_in_head(head: Any, weight: Tensor) -> str | None:
    from megatron_ce_adaptor.chunked.heads import is_column_parallel
    from megatron_ce_adaptor.chunked.module_call import is_fsdp_module

    name = type(head).__name__
    layers = sys.modules["megatron.core.tensor_parallel.layers"]
    if (
        not is_column_parallel(head)
        or type(head).forward is not layers.ColumnParallelLinear.forward
        or "forward" in vars(head)
    ):
        return f"the output layer, a {name}, may compute something else than Megatron's ColumnParallelLinear"
    if getattr(head.config, "defer_embedding_wgrad_compute", False):
        return "--defer-embedding-wgrad-compute keeps the logits' gradients of several micro-batches"
    if is_fsdp_module(head) or hasattr(weight, "__fsdp_param__") or hasattr(weight, "placements"):
        return "FSDP manages the output layer's weight"
    hooks = (
        *head._forward_hooks.values(),
        *head._backward_hooks.values(),
        *head._backward_pre_hooks.values(),
    )
    if hooks:
        return f"the output layer has hooks that expect logits ({', '.join(map(_name, hooks))})"
    return None


def _name(hook: Any) -> str:
    return str(getattr(hook, "__qualname__", type(hook).__qualname__))


# ------------------------------------------------------------------------------------- the exchange


def _captures_whole_step(config: Any) -> bool:
    """Whether one CUDA graph is made of forward and backward: an implementation from megatron-core 0.18 on,
    before it one of the scopes of another."""
    scopes = getattr(config, "cuda_graph_scope", None) or ()
    names = {scopes} if isinstance(scopes, str) else {getattr(scope, "name", scope) for scope in scopes}
    return "full_iteration" in names | {getattr(config, "cuda_graph_impl", None)}


@contextlib.contextmanager
def _deferred(model: Any, given: dict[str, Any], chunk: int | str) -> Iterator[None]:
    """Inside, the output layer defers its logits and the model's loss takes such."""
    head, labels, loss_mask = model.output_layer, given["labels"], given.get("loss_mask")
    compute_loss = model.compute_language_model_loss
    # a graph of the whole step cannot wait for the answer whether the foreseen gradient was right
    recompute = gradients_setting() == "backward" or _captures_whole_step(model.config)

    def defer(
        input_: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None
    ) -> tuple[DeferredLogits, None]:
        del runtime_gather_output
        return DeferredLogits(head, head.weight if weight is None else weight, input_, chunk), None

    def compute_language_model_loss(of: Tensor, logits: Any) -> Tensor:
        if not isinstance(logits, DeferredLogits):
            return compute_loss(of, logits)
        # The mask is that of the model's own labels: those of multi-token prediction are rolled
        return logits.loss(of, loss_mask if of is labels else None, recompute)

    head.__dict__["forward"] = defer
    model.__dict__["compute_language_model_loss"] = compute_language_model_loss
    try:
        yield
    finally:
        del head.__dict__["forward"]
        del model.__dict__["compute_language_model_loss"]
