"""Serving: a fixed load through engine, static batches and transformers; bytes moved between devices."""
