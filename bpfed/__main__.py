"""``python -m bpfed``: the command, where its script is not on the path."""

from bpfed.cli import main

main()
