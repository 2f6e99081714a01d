"""Vectors in NVFP4: numbers of four bits, a scale per 16 of them, and one more per vector.

Contract
    A vector is quantised by itself, so that the product of a row depends on that row and its weight
    alone, in any chunk and on any rank: no maximum is taken over ranks. NVIDIA's recipe has one
    second scale per tensor ("Pretraining large language models with NVFP4", 2509.25149, appendix
    B). A product takes either after its sum, where a row or a column has one factor.
    A block that holds an infinity or NaN has a scale of NaN, and no other block has.

A vector of K numbers takes K / 2 bytes of payload, K rounded up to 2, and B + 4 bytes of scales:

    payload  [k]              number 2 k in the low four bits, number 2 k + 1 in the high ones
    scales   [b]              scale of block b, numbers [16 b, 16 b + 16): float8_e4m3fn
             [B, B + 4)       scale of the vector: float32, little-endian

Of a vector whose largest finite block maximum is a, at least `LEAST_MAXIMUM`:

    scale of the vector      v = a / (6 * 448)
    scale of block b         s = max |number of b| / 6 / v, rounded to nearest, ties to even
    a number's four bits     number / (s v), rounded to nearest, ties to even; 0 where s is 0

The value of four bits is theirs times s v, in float32. 448 is the largest e4m3, 6 the largest of
four bits. s is rounded, so the largest number of a block may lie above 6 s v and is cut: by a 17th
of itself at most where s is normal, 2**-6 or more, and by all of it where s is 0. v is large enough
that s v is a normal float32.

Worked example, K = 2: [3.0, -1.0] has a = 3, v = 3 / 2688, s = 448, s v = 0.5; the four bits are
6 and -2, that is 0b0111 and 0b1100, in one byte: 0xC7.
"""

from __future__ import annotations

from typing import Final

import torch

BLOCK: Final = 16
"""Numbers that share a scale in e4m3."""
LARGEST: Final = 6.0
"""Of e2m1."""
LARGEST_SCALE: Final = 448.0
LEAST_MAXIMUM: Final = LARGEST * LARGEST_SCALE * 2.0**-117
"""2**-126, the least normal float32, is the product of the scales that this and 2**-9 make."""
VECTOR_BYTES: Final = 4
"""Of the scale of a vector."""
MAGNITUDES: Final = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Values of e2m1 by their three low bits; the fourth is the sign."""
EDGES: Final = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
"""Numbers half-way between two of them: a tie goes to the even bits."""


def quantized_vectors(values_VK: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return payload `[V, K / 2]` and scales `[V, B + 4]`, uint8, of float32 vectors."""
    num_vectors, width = values_VK.shape
    blocks = -(-width // BLOCK)
    filled = torch.nn.functional.pad(values_VK, (0, blocks * BLOCK - width))
    by_block = filled.reshape(num_vectors, blocks, BLOCK)
    amax = by_block.abs().amax(2)
    finite = torch.where(amax.isfinite(), amax, 0.0)
    most = finite.amax(1, keepdim=True).clamp_min(LEAST_MAXIMUM)
    of_vector = most / torch.full_like(most, LARGEST * LARGEST_SCALE)
    wanted = amax / torch.full_like(amax, LARGEST) / of_vector
    cut = torch.where(amax.isfinite(), wanted.clamp_max(LARGEST_SCALE), torch.nan)
    of_block = cut.to(torch.float8_e4m3fn)
    scale = (of_block.float() * of_vector)[:, :, None]
    scaled = torch.where(scale == 0, 0.0, by_block / scale)
    codes = four_bits_of(scaled).reshape(num_vectors, blocks * BLOCK)
    payload = codes[:, 0::2] | codes[:, 1::2] << 4
    scales = torch.cat([of_block.view(torch.uint8), of_vector.view(torch.uint8)], dim=1)
    return payload[:, : -(-width // 2)].contiguous(), scales


def four_bits_of(values: torch.Tensor) -> torch.Tensor:
    """Return the nearest e2m1 of each number, uint8 below 16; of a NaN any."""
    edges = torch.tensor(EDGES, device=values.device)
    low, high = (torch.bucketize(values.abs(), edges, right=right) for right in (False, True))
    code = torch.where(low % 2 == 0, low, high)  # they differ at a tie: the even one
    return (code + 8 * values.signbit()).to(torch.uint8)


def numbers_of(payload_VP: torch.Tensor, width: int) -> torch.Tensor:
    """Return the values `[V, width]`, float32, of four bits, without their scales."""
    low, high = payload_VP & 0xF, payload_VP >> 4
    codes = torch.stack([low, high], dim=2).flatten(1)[:, :width].long()
    magnitudes = torch.tensor(MAGNITUDES, device=payload_VP.device)[codes % 8]
    return torch.where(codes < 8, magnitudes, -magnitudes)


def scales_of(scales_VS: torch.Tensor, width: int) -> torch.Tensor:
    """Return what multiplies each number, float32 `[V, width]`: both scales."""
    of_block, of_vector = scales_VS[:, :-VECTOR_BYTES], scales_VS[:, -VECTOR_BYTES:]
    of_vector = of_vector.clone(memory_format=torch.contiguous_format).view(torch.float32)
    return (of_block.view(torch.float8_e4m3fn).float() * of_vector).repeat_interleave(BLOCK, 1)[
        :, :width
    ]
