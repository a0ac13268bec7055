"""The same losses on MindSpore (PyNative), with the names, arguments and meaning of the PyTorch doors.

Importing this package needs MindSpore and no torch; `import megatron_ce_adaptor` needs neither.
"""

from megatron_ce_adaptor.mindspore.chunked import ChunkedLossWrapper
from megatron_ce_adaptor.mindspore.cross_entropy import CrossEntropyStatistics, parallel_cross_entropy
from megatron_ce_adaptor.mindspore.gather import gather_tensor_parallel_logits
from megatron_ce_adaptor.mindspore.hyper_parallel import (
    register_with_hyper_parallel,
    unregister_from_hyper_parallel,
)
from megatron_ce_adaptor.mindspore.loss import loss_parallel_cross_entropy
from megatron_ce_adaptor.mindspore.losses import CrossEntropyLoss

__all__ = [
    "ChunkedLossWrapper",
    "CrossEntropyLoss",
    "CrossEntropyStatistics",
    "gather_tensor_parallel_logits",
    "loss_parallel_cross_entropy",
    "parallel_cross_entropy",
    "register_with_hyper_parallel",
    "unregister_from_hyper_parallel",
]
