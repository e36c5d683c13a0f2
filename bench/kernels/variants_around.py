"""What is launched before and after the split-KV kernel, as it is compiled ahead: rotation, schedule, merge."""

from __future__ import annotations

from caramba_fast.bench.kernels.variant import Variant
from caramba_fast.kernels import balanced, merge_splits, splits_launch, tiles_query
from caramba_fast.kernels.tiles_layout import LEAST_ROWS, Shape

HEAD_DIM = 128
#: A balanced launch: four query rows of a lane, padded.
PLAIN = Shape(groups=4, tokens=1, heads=8, per_lane=1, rows=LEAST_ROWS, tile=128, balanced=True)


def prepare() -> Variant:
    """The rotation of a query."""
    return Variant(
        op="decode_attention",
        kind="fp32",
        dtype="fp16",
        block=32,
        kernel=tiles_query.prepare_kernel,
        arguments={
            "q_ptr": "*fp16",
            **{f"q_{axis}_stride": "i32!" for axis in ("batch", "head", "token")},
            "out_ptr": "*fp32",
            "tokens": "i32",
        },
        constants={"DIM": HEAD_DIM, "PADDED": HEAD_DIM},
        num_warps=4,
        values=HEAD_DIM,
        options="prepare",
        fusion=True,
    )


def merge(is_balanced: bool = False) -> Variant:
    """The merge of decoupled attention with everything it can undo."""
    pointers = ("partial_ptr", "lse_ptr", "out_lse_ptr")
    halves = ("out_ptr", "q_ptr", "g_ptr", "null_k_ptr", "null_g_ptr", "null_v_ptr", "aux_ptr")
    strides = [f"{q}_{axis}_stride" for q in ("q", "g") for axis in ("batch", "head", "token")]
    return Variant(
        op="decoupled_decode_attention",
        kind="fp32",
        dtype="fp16",
        block=32,
        kernel=merge_splits.merge_kernel,
        arguments={
            **dict.fromkeys(pointers, "*fp32"),
            **dict.fromkeys(halves, "*fp16"),
            **dict.fromkeys(("seqlens_ptr", "query_lens_ptr"), "*i32"),
            **dict.fromkeys(strides, "i32!"),
            **dict.fromkeys(("factor", "g_factor", "softcap"), "fp32"),
            "splits": "i32",
            "tokens": "i32",
            "schedule_ptr": "*i32" if is_balanced else None,
        },
        constants={
            "GROUPS": 1, "K_DIM": 32, "G_DIM": 64, "DIM": HEAD_DIM, "PADDED": HEAD_DIM,
            "K_PADDED": 64, "MOST": splits_launch.MOST_PARTS, "SOFTCAP": True, "ROTATE": True,
            "C": PLAIN if is_balanced else None,
        },
        num_warps=4,
        values=HEAD_DIM,
        options="merge, balanced" if is_balanced else "merge",
    )  # fmt: skip


def schedule() -> Variant:
    """The schedule of a balanced launch."""
    return Variant(
        op="decode_attention",
        kind="fp32",
        dtype="fp16",
        block=32,
        kernel=balanced.schedule_kernel,
        arguments={
            "lengths": ("*i32", None, None),
            "schedule_ptr": "*i32",
            **dict.fromkeys(
                ("window", "kept", "residual", "walkers", "least", "batch_size"), "i32"
            ),
            "merge_overhead": "fp32",
        },
        constants={"C": PLAIN},
        num_warps=4,
        values=balanced.ROWS_AT_ONCE.value,
        options="schedule",
        fusion=True,
    )
