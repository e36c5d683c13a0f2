"""What caches cost real models: checkpoints, text, the study and tasks; `make real` runs all of it."""
