"""Bad input is one clear sentence on every rank, never a hang; labels are cut only where that is free."""

from __future__ import annotations

from collections.abc import Callable

import bad_input

HANG_S = 60.0
"""A rank that waits in a collective for one that has raised is a failure after this time."""


def test_all_refused(run_ranks: Callable, no_failures: Callable) -> None:
    no_failures(run_ranks(4, bad_input.all_refused, timeout_s=HANG_S))


def test_labels_cut_for_free(run_ranks: Callable, no_failures: Callable) -> None:
    no_failures(run_ranks(4, bad_input.labels_cut_for_free))
