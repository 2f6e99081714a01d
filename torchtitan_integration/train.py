"""torchtitan's training loop on GPUs, whose steps may run again; `torchrun -m` runs this module.

Contract
    Takes torchtitan's own arguments. A job without `megamoe.host_reads = "none"` is trained as by
    `torchrun -m torchtitan.train`.
"""

from __future__ import annotations

from torchtitan.train import Trainer
from torchtitan.train import main as train

from torchtitan_integration.run_again import without_reads


def main() -> None:
    """Train as `torchtitan.train` does."""
    train(without_reads(Trainer))


if __name__ == "__main__":
    main()
