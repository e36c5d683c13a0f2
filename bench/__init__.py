"""What kernels compile to (`aot`), whether they agree (`parity`), how fast they are (`run`)."""
