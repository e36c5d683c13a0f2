"""Benchmarks of whole generations: decode steps, bytes, speculation, quality and the policy's choices."""
