"""Manifests: runs written down in YAML, so that they can be repeated."""

from caramba_fast.manifest.load import ManifestError, load_manifest, read_manifest
from caramba_fast.manifest.runner import RunReport, run_manifest
from caramba_fast.manifest.schema import Benchmark, Manifest, RunSpec, Target

__all__ = [
    "Benchmark",
    "Manifest",
    "ManifestError",
    "RunReport",
    "RunSpec",
    "Target",
    "load_manifest",
    "read_manifest",
    "run_manifest",
]
