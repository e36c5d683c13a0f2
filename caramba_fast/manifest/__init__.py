"""Manifests: YAML files that describe reproducible runs."""

from caramba_fast.manifest.load import load_manifest, read_manifest
from caramba_fast.manifest.prepare import Prepared, prepare
from caramba_fast.manifest.run import run_manifest
from caramba_fast.manifest.schema import (
    Benchmark,
    Manifest,
    ManifestError,
    RunReport,
    RunSpec,
    Target,
)

__all__ = [
    "Benchmark",
    "Manifest",
    "ManifestError",
    "Prepared",
    "RunReport",
    "RunSpec",
    "Target",
    "load_manifest",
    "prepare",
    "read_manifest",
    "run_manifest",
]
