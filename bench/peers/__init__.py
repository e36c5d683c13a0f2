"""A decode step of attention with other programs' caches in one process: OpenVINO, ONNX Runtime, ggml, torch."""
