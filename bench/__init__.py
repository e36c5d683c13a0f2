"""Benchmarks: compiled code (`kernels.aot`), parity of backends (`kernels.parity`), speed, quality, other programs."""
