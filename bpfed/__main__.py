"""The command ``bpfed``, and ``python -m bpfed``."""

import sys


def main() -> None:
    """Run the command (see `bpfed.cli.main`); Ctrl-C before it is loaded ends it as quietly as later."""
    try:
        from bpfed.cli import main as command
    except KeyboardInterrupt:
        sys.stderr.write("bpfed: Stopped.\n")
        sys.exit(130)
    command()


if __name__ == "__main__":
    main()
