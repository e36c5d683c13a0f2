"""Triton kernels: one file an op, imported with the op's first use; they register nothing."""
