"""One launch of each decode kernel as on an H100, with a stand-in for Triton's driver: run by test_occupancy.py.

Prints how often the kernel was compiled, and the number of programs its launch was planned for.
"""

from __future__ import annotations

from typing import Any

import torch

from caramba_fast.bench.kernels import host_time
from caramba_fast.kernels import balanced_launch, occupancy, splits, splits_launch
from caramba_fast.ops import registry

H100 = occupancy.Multiprocessor(228 * 1024, 2048)


def main() -> None:
    host_time.stand_in(compiled=True)
    driver = host_time.triton.runtime.driver.active
    driver.utils.load_binary = lambda *_: (object(), 1, 168, 0, 1024)  # 168 registers a thread
    splits.ASSUMED_PROCESSORS = 132
    occupancy.Multiprocessor.of = lambda _: H100  # type: ignore[method-assign, assignment]
    resident_of, planned = occupancy.resident_of, []

    def on_a_gpu(key: Any, _: torch.device, *rest: Any, **options: Any) -> int:
        found = resident_of(key, torch.device("cuda", 0), *rest, **options)
        planned.append(found * splits.ASSUMED_PROCESSORS)
        return found

    splits_launch.resident_of = on_a_gpu
    step = host_time.Step("q4:plain", "cpu", batch=2)
    view = step.layer.plans._current()
    attend = registry._ops["decode_attention"].launcher
    for num_splits, kernel in (
        (0, splits_launch.partials_kernel), (-1, balanced_launch.balanced_kernel),
    ):  # fmt: skip
        kernel.device_caches.clear()
        planned.clear()
        host_time.Launcher.launched = []
        attend(
            step.q, view[0].codes, view[0].scales, view[1].codes, view[1].scales, step.layer.seq_lens,
            view[0].kind, view[1].kind, n_kv_heads=8, num_splits=num_splits,
        )  # fmt: skip
        names = [name for name, _, _ in host_time.Launcher.launched]
        compiled = len(kernel.device_caches[0][0])
        launched = "launched" if names.count(kernel.__name__) == 1 else f"launched {names}"
        print(
            f"{num_splits}: {kernel.__name__} compiled {compiled}, {planned[-1]} at once, {launched}"
        )


if __name__ == "__main__":
    main()
