"""Quality and speed of caches with real models: checkpoints, text, the study and tasks; `make real` runs all of it."""
