"""What a shard of the wrong size sends where no rank looks at the sizes, as on a device after the first
call."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron_ce_adaptor import vocab_shard
from megatron_ce_adaptor.vocab_shard import VocabShard


def test_a_misfit_that_is_not_compared_makes_all_losses_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[torch.Tensor] = []

    def all_gather(output: torch.Tensor, payload: torch.Tensor, group: Any) -> None:
        sent.append(payload.clone())
        output.copy_(payload.repeat(2))

    monkeypatch.setattr(vocab_shard.dist, "all_gather_into_tensor", all_gather)
    monkeypatch.setattr(VocabShard, "must_compare", lambda self, payload: False)
    shard = VocabShard(object(), 0, 2, 0, 5, 9, False, sizes=(5, 4), misfit=6)
    with pytest.raises(ValueError, match=r"have \[6\] columns on this rank"):
        shard.gather(torch.zeros(3 * 7 + 4), header=4)
    assert bool(sent[0][:-4].isnan().all())  # the statistics of which the others make their losses
    assert sent[0][-4:].tolist() == [0.0, 6.0, 0.0, 0.0]
