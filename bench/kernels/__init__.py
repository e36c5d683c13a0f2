"""The ops: what is measured and beside what, what kernels compile to, whether backends agree, tuning."""
