"""``python -m caramba_fast.cli``."""

from caramba_fast.cli import main

main()
