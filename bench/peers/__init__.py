"""A decode step of attention in other programs' caches: OpenVINO, ONNX Runtime, ggml, torch; all in one process."""
