"""Benchmarks of the ops: timing beside other programs, parity of backends, compiled code, tuning."""
