"""What one exchange of a region takes in two hops: tasks on the compute stream and on both links.

Contract
    Tasks are those that compiled code has, in as many parts: hop 1 in slices of tokens, hop 2 of a
    slice once that is there, in chunks of experts. Each hop takes the link that it goes over, at
    the rate of that; both take one where the profile knows one.
    Of what two hops spare the gather of the flat rows is taken off, tokens read and rows written,
    where rows are copied; for their sum at home nothing, but in eight bits.
    In eight bits a row is packed in front of the first hop, handed on as it came, and unpacked
    behind the second; sums of a node are packed anew on their way home.
    Experts are chosen evenly.

Per row of a rank, D nodes a token of k rows: D / k rows are gathered for hop 1 and cross, but for
those of the own node; all are gathered for hop 2, go to ranks of the node, and are put in order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from moe_compile.cost.hop_shape import INDEX_KERNELS, MOVED, PLACE_KERNELS, HopShape
from moe_compile.cost.rates import Rates
from moe_compile.cost.region_work import RegionWork, Work
from moe_compile.cost.tasks import LINK, NODE_LINK, TaskList
from moe_compile.hardware.collectives import leaving_share
from moe_compile.plan.candidates import Candidate


def goes_in_hops(work: Work, nodes: str, *, is_forward: bool) -> bool:
    """Whether an exchange goes in two hops where the option says `nodes`.

    Rows of tokens forward, and gradients of their sums backward, are copies: these do by either.
    """
    return work.exchange == _copies(is_forward) or (
        nodes == "rounded" and work.exchange == _copies(not is_forward)
    )


def _copies(is_forward: bool) -> str:
    return "dispatch" if is_forward else "combine"


@dataclass(frozen=True, slots=True)
class HopTasks:
    """Adds the tasks of one exchange in two hops to a list."""

    made: TaskList
    region: RegionWork
    work: Work
    candidate: Candidate
    rates: Rates
    is_forward: bool

    @property
    def sums(self) -> bool:
        """Whether rows are summed on their way, which takes those of all chunks."""
        return self.work.exchange != _copies(self.is_forward)

    def add(self, needs: Sequence[Sequence[int]]) -> list[int]:
        """Return the last task of each chunk, or of all where rows are summed.

        `needs` are of each chunk where rows are summed, else of all.
        """
        if not self.sums:
            (of_all,) = needs
            return self._copied(self._told(of_all) if self.is_forward else of_all)
        last = self._summed(needs)
        return [last] if self.is_forward else [self._scores([last])]

    @property
    def _hops(self) -> HopShape:
        assert self.region.hops is not None
        return self.region.hops

    @property
    def _rows(self) -> float:
        """Bytes of a rank's rows."""
        rows = self.region.imbalance if self.work.is_chunked else 1.0
        return self.work.link_bytes * rows / leaving_share(self.region.num_ranks)

    @property
    def _num_rows(self) -> float:
        return self._rows / self._hops.row_bytes

    @property
    def _tokens(self) -> float:
        """Bytes of a rank's tokens."""
        return self._rows / self._hops.rows_per_token

    @property
    def _far(self) -> float:
        """Bytes of the rows of hop 1."""
        return self._tokens * self._hops.nodes_per_token

    def _told(self, needs: Sequence[int]) -> list[int]:
        """Add what goes beside the rows, and finding them."""
        slices = self.candidate.hop_slices
        num_kernels = INDEX_KERNELS
        num_kernels += PLACE_KERNELS if self.candidate.nodes == "rounded" else 0.0
        indices_us = self.rates.compute_us(0.0, 0.0, num_kernels)
        last = self.made.add("indices", indices_us, needs)
        masks = self._hops.mask_bytes(self._num_rows) / slices
        for _ in range(slices):
            last = self._link("masks", self.rates.hop_us(masks, within=False), LINK, [last])
        return [self._scores([last])]

    def _scores(self, needs: Sequence[int]) -> int:
        scores = self._hops.score_bytes(self._num_rows)
        return self._link("scores", self.rates.link_us(scores), LINK, [self._launch(needs)])

    def _copied(self, needs: Sequence[int]) -> list[int]:
        slices, chunks, share = self.candidate.hop_slices, self.candidate.num_chunks, self._share
        moved = self._moving(share * self._far, needs)  # the flat gather reads the tokens as well
        came: list[list[int]] = [[] for _ in range(chunks)]
        # the flat gather writes as many rows, which nothing needs here: they are taken off where
        # rows are written, behind hop 2 if these were packed
        between = share * self._far + (share * self._rows if self._packs else 0.0)
        for _ in range(slices):
            there = self._moving(between / slices, [self._across([moved])])
            for of_chunk in came:
                of_chunk.append(self._inside([there]))
        passes = share if self._packs else MOVED
        passes += MOVED * share * (slices > 1)  # slices are joined
        return [self._moving(passes * self._rows / chunks, of_chunk) for of_chunk in came]

    def _summed(self, needs: Sequence[Sequence[int]]) -> int:
        slices, chunks = self.candidate.hop_slices, self.candidate.num_chunks
        came: list[list[int]] = [[] for _ in range(slices)]
        for of_chunk in needs:
            moved = self._moving(self._before_sums / chunks, of_chunk)
            for of_slice in came:
                of_slice.append(self._inside([moved]))
        rows, home = self._summed_bytes  # a sum reads rows of all chunks, or slices, as they came
        across = []
        for of_slice in came:
            summed = self._moving(rows / slices, of_slice, num_packing=chunks + 1)
            across.append(self._across([summed]))
        return self._moving(home, across, num_packing=slices)

    @property
    def _before_sums(self) -> float:
        """Return what is read and written before hop 2 of rows that are summed."""
        is_weighted = self._packs and self.is_forward and "combine" in self.region.weighted
        return (1.0 + self._share + MOVED * is_weighted) * self._rows

    @property
    def _summed_bytes(self) -> tuple[float, float]:
        """Return what is read and written on the node, and at home.

        The sum that the model would make at home, of all rows, is taken off on the node, and what
        it writes is not counted again: of rows that are packed the sums' own are left, and that
        they are unpacked in front of a sum and packed behind it.
        """
        rows, far, tokens = self._rows, self._far, self._tokens
        if not self._packs:
            return rows + far, far + tokens
        packed = 1.0 + self._share
        return packed * (rows + far) + far, packed * far + far

    @property
    def _share(self) -> float:
        """Bytes of a row that travels over those in the model's number format."""
        exchange = self.work.exchange
        return self.candidate.wire_share(self.region, exchange, is_forward=self.is_forward)

    @property
    def _packs(self) -> bool:
        """Whether rows travel as messages."""
        return self._share < 1.0

    def _across(self, needs: Sequence[int]) -> int:
        """Add hop 1 of a slice."""
        sent = self._share * self._hops.across_bytes(self._rows) / self.candidate.hop_slices
        us = self.rates.hop_us(sent, within=False)
        return self._link("hop between nodes", us, LINK, [self._launch(needs)])

    def _inside(self, needs: Sequence[int]) -> int:
        """Add hop 2 of a chunk of a slice."""
        one, sent = self.candidate, self._share * self._hops.inside_bytes(self._rows)
        us = self.rates.hop_us(sent / (one.hop_slices * one.num_chunks), within=True)
        link = NODE_LINK if self.rates.intra_node_gb_per_s else LINK
        return self._link("hop inside the node", us, link, [self._launch(needs)])

    def _launch(self, needs: Sequence[int]) -> int:
        return self.made.add("launch", self.rates.op_overhead_us, needs)

    def _link(self, name: str, us: float, link: str, needs: Sequence[int]) -> int:
        return self.made.add(name, us, needs, link)

    def _moving(self, nbytes: float, needs: Sequence[int], num_packing: int = 0) -> int:
        """Add moving rows, with kernels of its own for each time they are packed or unpacked."""
        num_kernels = 1.0 + num_packing * self._packs
        return self.made.add("rows", self.rates.compute_us(0.0, nbytes, num_kernels), needs)
