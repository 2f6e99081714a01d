"""One rank of a section in which the second rank dies, and one hangs: for the driver's test."""

import os
import sys

import torch
import torch.distributed as dist

from benchmarks.node import one_rank


def die():
    if dist.get_rank() == 1:
        os._exit(9)
    dist.barrier()


def add_up():
    mine = torch.ones(1)
    dist.all_reduce(mine)
    return mine.item()


def section(team, sizes, out):
    def note(record, found):
        record.add_row({"sums": found})

    for what, work in (("first", add_up), ("dies", die), ("second", add_up)):
        team.run(what, work, note)


one_rank.SECTIONS = {"links": section}

if __name__ == "__main__":
    status = one_rank.main()
    sys.stdout.flush()
    os._exit(status)
