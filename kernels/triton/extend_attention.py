"""extend_attention in Triton: decode_attention's kernels with blocks of a prompt's queries for a program.

Three launches at most, however long the cache is: the queries' transform where K has one, the blocks, the merge. What
they compute is defined by `caramba_fast.ops.attention`.
"""

from __future__ import annotations

from functools import partial

from .decode_attention import decode_attention
from .extend_launch import launch_extend

extend_attention = partial(decode_attention, run=launch_extend)
