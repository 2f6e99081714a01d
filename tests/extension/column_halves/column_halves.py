"""Send rows as two collectives, each of half their columns: one per adapter, say."""

from dataclasses import dataclass, replace

import torch

from moe_compile.journal.entries import Verdict
from moe_compile.journal.reasons import Reason
from passes.transport import Functional


@dataclass(frozen=True)
class ColumnHalves(Functional):
    name = "column_halves"

    def needs(self, collective, config):
        rows = collective.example
        if rows is None or rows.dim() != 2 or rows.shape[1] % 2:
            detail = "the rows are not known to have an even number of columns"
            return Verdict(candidate=collective.sent.name, reason=Reason.OTHER, detail=detail)
        return None

    def emit(self, early, late, collective):
        half = collective.example.shape[1] // 2
        received = []
        for start in (0, half):
            columns = early.method("narrow", collective.sent, 1, start, half)
            part = replace(collective, sent=early.method("contiguous", columns))
            received.append(super().emit(early, late, part))
        return late.call(torch.cat, received, 1)
