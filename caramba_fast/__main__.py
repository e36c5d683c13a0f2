"""``python -m caramba_fast``: the command line without its script."""

from caramba_fast.cli import main

main()
