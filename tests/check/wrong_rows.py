"""A transport that is wrong: it makes the rows that it carries one part in 128 larger."""

from dataclasses import dataclass, replace

import torch

from passes.transport import Functional

NAME = "wrong_rows"


@dataclass(frozen=True)
class WrongRows(Functional):
    name = NAME

    def emit(self, early, late, collective):
        larger = early.call(torch.mul, collective.sent, 1.0 + 2.0**-7)
        return super().emit(early, late, replace(collective, sent=larger))


def install(folder):
    """Install it into `folder` as pip would: a distribution with an entry point."""
    info = folder / "wrong_rows-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: wrong-rows\nVersion: 0.1.0\n")
    (info / "entry_points.txt").write_text(f"[megamoe.transports]\n{NAME} = {__name__}:WrongRows\n")
