"""GPUs, and the share of their memory bandwidth that a kernel's instruction count allows.

A decode kernel reads every cached byte once, so its limit is memory, unless it issues more warp instructions
per cached token than the card issues while the token's bytes arrive: ``Card.budget``. Bandwidths are data
sheets' peaks. What a copy reaches is about a tenth less, so a share of 1 leaves a tenth to spare.
"""

from __future__ import annotations

from dataclasses import dataclass

#: Bytes of shared memory (LDS) a block may have, sm_86 as many as sm_89: CUDA C++ Programming Guide, table of technical
#: specifications; AMD CDNA3 ISA.
SHARED_LIMITS = {
    "sm_80": 163 * 1024,
    "sm_89": 99 * 1024,
    "sm_90": 227 * 1024,
    "sm_100": 227 * 1024,
    "sm_120": 99 * 1024,
    "gfx942": 64 * 1024,
}

#: Bytes of shared memory and threads of an SM: the same table.
PROCESSORS = {
    "sm_80": (164 * 1024, 2048),
    "sm_89": (100 * 1024, 1536),
    "sm_90": (228 * 1024, 2048),
    "sm_100": (228 * 1024, 2048),
    "sm_120": (100 * 1024, 1536),
}

#: Warp schedulers of an SM, each of which issues one instruction a cycle (compute capability 8.0 to 10.0).
SCHEDULERS = 4


@dataclass(frozen=True)
class Card:
    """A GPU.

    Attributes:
        target: whose instruction count stands for it.
        processors: SMs.
        clock: boost clock in Hz.
        bandwidth: of its memory, in bytes a second.
    """

    target: str
    processors: int
    clock: float
    bandwidth: float

    @property
    def instruction_rate(self) -> float:
        """Warp instructions a second."""
        return self.processors * SCHEDULERS * self.clock

    def budget(self, token_bytes: int) -> float:
        """Warp instructions there is time for while ``token_bytes`` are read."""
        return self.instruction_rate * token_bytes / self.bandwidth

    def share(self, token_bytes: int, per_token: float) -> float:
        """The share of bandwidth that ``per_token`` warp instructions for each cached token allow."""
        return min(1.0, self.budget(token_bytes) / per_token)


#: NVIDIA's data sheets "A100 80GB" (SXM: 108 SMs, 1410 MHz, 2039 GB/s), "H100" and "H200" (SXM: 132 SMs,
#: 67 TFLOPS of fp32 = 132 * 256 * 1.98 GHz; 3.35 and 4.8 TB/s) and "L4" (30.3 TFLOPS = 58 * 256 * 2.04 GHz,
#: 300 GB/s); white paper "Ada GPU Architecture" (RTX 4090: 128 SMs, 2520 MHz, 1008 GB/s). The last two
#: are sm_89.
CARDS: dict[str, Card] = {
    "a100": Card("sm_80", 108, 1.41e9, 2.039e12),
    "h100": Card("sm_90", 132, 1.98e9, 3.35e12),
    "h200": Card("sm_90", 132, 1.98e9, 4.8e12),
    "rtx4090": Card("sm_89", 128, 2.52e9, 1.008e12),
    "l4": Card("sm_89", 58, 2.04e9, 0.3e12),
}


def shares(target: str, token_bytes: int, per_token: float | None) -> dict[str, float | None]:
    """Of every card the share of bandwidth on it; None for cards of other targets and without a count."""
    return {
        name: round(card.share(token_bytes, per_token), 2)
        if card.target == target and per_token
        else None
        for name, card in CARDS.items()
    }
