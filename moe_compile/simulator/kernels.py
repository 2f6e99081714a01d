"""Times of single kernels and collectives on one kind of GPU.

Contract
    GEMM: max(operations / rate, bytes / memory rate) plus the gap of one kernel, the rate being
    that of a large product times the share that its shape reaches (`hardware/products.py`).
    Collective: latency plus bytes over the link at its share.
"""

from __future__ import annotations

from dataclasses import dataclass

from moe_compile.hardware.cluster import ClusterProfile, Fit
from moe_compile.hardware.links import leaving_share, sent_us
from moe_compile.hardware.products import Product


@dataclass(frozen=True, slots=True)
class Kernels:
    """Microseconds of kernels; factors of the fit included."""

    profile: ClusterProfile
    fit: Fit
    fp8: bool = False
    """Whether plain products run in fp8; gradients of weights never do."""
    grouped_fp8: bool = False
    """Whether grouped products do."""

    def gemm_us(self, rows: float, columns: float, reduction: float) -> float:
        """Return the time of `[rows, reduction] x [reduction, columns]`."""
        product = Product(rows=rows, columns=columns, reduction=reduction, in_eight_bits=self.fp8)
        return self._product_us(product)

    def gradient_us(self, rows: float, left: float, right: float, sum_bytes: int) -> float:
        """Return the time of a weight's `[left, right]` gradient over `rows`, and of its sum."""
        return self._gradient_us(Product(rows=left, columns=right, reduction=rows), sum_bytes)

    def grouped_us(self, groups: float, rows: float, columns: float, reduction: float) -> float:
        """Return the time of `groups` products of `rows` rows each."""
        product = Product(
            groups=groups,
            rows=rows,
            columns=columns,
            reduction=reduction,
            ragged="rows",
            in_eight_bits=self.grouped_fp8,
        )
        return self._product_us(product)

    def grouped_gradient_us(
        self, groups: float, rows: float, left: float, right: float, sum_bytes: int
    ) -> float:
        """Return the time of gradients of `groups` weights `[left, right]`, and of their sum."""
        product = Product(
            groups=groups, rows=left, columns=right, reduction=rows, ragged="reduction"
        )
        return self._gradient_us(product, sum_bytes)

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
        """Return the time of sending scores beside two hops: all over the network."""
        return self.hop_us(nbytes, within=False)

    def _collective_us(self, nbytes: float, gb_per_s: float, latency_us: float) -> float:
        return self.fit.link * (sent_us(nbytes, gb_per_s) + latency_us) if nbytes else 0.0

    def _product_us(self, one: Product) -> float:
        read = (one.rows + one.columns) * one.reduction * (1 if one.in_eight_bits else 2)
        moved = one.groups * (read + 2 * one.rows * one.columns)
        return self._longer_us(one, moved)

    def _gradient_us(self, product: Product, sum_bytes: int) -> float:
        read = (product.rows + product.columns) * product.reduction * 2
        moved = product.groups * (read + product.rows * product.columns * sum_bytes)
        return self._longer_us(product, moved)

    def _longer_us(self, product: Product, nbytes: float) -> float:
        """Return the longer of computing and moving, at a share of the rate of a large product."""
        compute = self.profile.compute
        tflops = compute.large_tflops * compute.share_of(product)
        us = max(product.operations / (tflops * 1e6), self._moved_us(nbytes)) + self._gap_us
        return self.fit.compute * us

    def _moved_us(self, nbytes: float) -> float:
        memory = self.profile.memory
        return sent_us(nbytes, memory.gb_per_s * memory.share)

    @property
    def _gap_us(self) -> float:
        return self.profile.compute.kernel_us
