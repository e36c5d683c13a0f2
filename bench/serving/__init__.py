"""Serving benchmarks: a fixed load on the engine, static batches and transformers; bytes moved between devices."""
