"""Times of single kernels and collectives on one kind of GPU.

Contract
    GEMM: max(operations / (peak * share), bytes / memory rate) plus the gap of one kernel, the
    share being that of large tiles, times how evenly tiles fill the SMs, times how long the
    summed dimension is. Grouped GEMM: the profile's curves by rows per expert.
    Collective: latency plus bytes over the link at its share.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from moe_compile.hardware.cluster import ClusterProfile, Curve, Fit
from moe_compile.hardware.collectives import leaving_share
from moe_compile.hardware.links import sent_us

TILE_ROWS: Final = 128
TILE_COLUMNS: Final = 256
"""Output tile of a Hopper GEMM."""


@dataclass(frozen=True, slots=True)
class Kernels:
    """Microseconds of kernels; factors of the fit included."""

    profile: ClusterProfile
    fit: Fit
    fp8: bool = False
    """Whether GEMMs but those of weight gradients run in fp8."""

    def gemm_us(self, rows: float, columns: float, reduction: float) -> float:
        """Return the time of `[rows, reduction] x [reduction, columns]`."""
        read = (rows + columns) * reduction * (1 if self.fp8 else 2)
        share = self._filled(rows, columns) * self._long(reduction)
        return self._product_us(
            2.0 * rows * columns * reduction, self._rate(share), read + 2 * rows * columns
        )

    def gradient_us(self, rows: float, left: float, right: float, sum_bytes: int) -> float:
        """Return the time of a weight's `[left, right]` gradient over `rows`, and of its sum."""
        compute = self.profile.compute
        share = compute.gemm_share * self._filled(left, right) * self._long(rows)
        moved = (left + right) * rows * 2 + left * right * sum_bytes
        return self._product_us(2.0 * left * right * rows, compute.bf16_tflops * share, moved)

    def grouped_us(self, groups: float, rows: float, columns: float, reduction: float) -> float:
        """Return the time of `groups` products of `rows` rows each."""
        curve = self.profile.compute.grouped_forward
        share = self._at(curve, rows) * self._long(reduction)
        element = 1 if self.fp8 else 2
        moved = groups * ((rows + columns) * reduction * element + 2 * rows * columns)
        return self._product_us(2.0 * groups * rows * columns * reduction, self._rate(share), moved)

    def grouped_gradient_us(
        self, groups: float, rows: float, left: float, right: float, sum_bytes: int
    ) -> float:
        """Return the time of gradients of `groups` weights `[left, right]`, and of their sum."""
        compute = self.profile.compute
        share = compute.grouped_weight_gradient.at(rows)
        moved = groups * ((left + right) * rows * 2 + left * right * sum_bytes)
        return self._product_us(
            2.0 * groups * left * right * rows, compute.bf16_tflops * share, moved
        )

    def memory_us(self, nbytes: float, kernels: float = 1) -> float:
        """Return the time to move `nbytes` in `kernels` kernels."""
        return self.fit.compute * (self._moved_us(nbytes) + kernels * self._gap_us)

    def attention_us(self, operations: float, *, is_backward: bool = False) -> float:
        """Return the time of a flash attention kernel of so many operations."""
        compute = self.profile.compute
        share = (
            compute.attention_backward_share if is_backward else (compute.attention_forward_share)
        )
        return self.fit.compute * (operations / (compute.bf16_tflops * share * 1e6) + self._gap_us)

    def gather_us(self, nbytes: float, ranks: int) -> float:
        """Return the time to all-gather to, or reduce-scatter from, `nbytes` in one node."""
        link = self.profile.nvlink
        return self._collective_us(
            nbytes * leaving_share(ranks), link.gather_gb_per_s, link.latency_us
        )

    def exchange_us(self, nbytes: float, ranks: int) -> float:
        """Return the time of an all-to-all of `nbytes` per rank in one node."""
        return self.hop_us(nbytes * leaving_share(ranks), within=True)

    def far_exchange_us(self, between: float, within: float) -> float:
        """Return the time of an all-to-all that sends so many bytes to other nodes and within.

        Both links at once: the slower counts.
        """
        near, far = self.profile.nvlink, self.profile.network
        slower = max(
            sent_us(between, far.exchange_gb_per_s), sent_us(within, near.exchange_gb_per_s)
        )
        return self.fit.link * (slower + far.latency_us)

    def hop_us(self, nbytes: float, *, within: bool) -> float:
        """Return the time of one hop of so many bytes that leave a rank, all over one link."""
        link = self.profile.nvlink if within else self.profile.network
        return self._collective_us(nbytes, link.exchange_gb_per_s, link.latency_us)

    def scores_us(self, nbytes: float) -> float:
        """Return the time of scores beside two hops: all over the network."""
        return self.hop_us(nbytes, within=False)

    def _collective_us(self, nbytes: float, gb_per_s: float, latency_us: float) -> float:
        return self.fit.link * (sent_us(nbytes, gb_per_s) + latency_us) if nbytes else 0.0

    def _product_us(self, operations: float, tflops: float, nbytes: float) -> float:
        us = max(operations / (tflops * 1e6), self._moved_us(nbytes)) + self._gap_us
        return self.fit.compute * us

    def _rate(self, share_of_large: float) -> float:
        """Return 1e12 operations per second at a share of what large GEMMs reach."""
        compute = self.profile.compute
        if self.fp8:
            return compute.fp8_tflops * compute.fp8_gemm_share * share_of_large
        return compute.bf16_tflops * compute.gemm_share * share_of_large

    def _at(self, curve: Curve, rows: float) -> float:
        """Return the curve's share as a share of what large GEMMs reach."""
        return curve.at(rows) / self.profile.compute.gemm_share

    def _filled(self, rows: float, columns: float) -> float:
        """Return how evenly output tiles fill the SMs, 0 to 1."""
        tiles = rows * columns / (TILE_ROWS * TILE_COLUMNS)
        whole = math.ceil(rows / TILE_ROWS) * math.ceil(columns / TILE_COLUMNS)
        waves = math.ceil(whole / self.profile.compute.num_sms)
        return min(max(tiles / (waves * self.profile.compute.num_sms), 1e-3), 1.0)

    def _long(self, reduction: float) -> float:
        return reduction / (reduction + self.profile.compute.half_reduction)

    def _moved_us(self, nbytes: float) -> float:
        memory = self.profile.memory
        return sent_us(nbytes, memory.gb_per_s * memory.share)

    @property
    def _gap_us(self) -> float:
        return self.profile.compute.kernel_us
