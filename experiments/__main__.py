"""``python -m experiments``: the paper's tables and figures, each one command."""

import sys

from bpfed.cli import main

if __name__ == "__main__":
    main(["paper", *sys.argv[1:]])
