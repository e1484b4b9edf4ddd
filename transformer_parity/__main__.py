"""Run the ``parity`` command via ``python -m transformer_parity``."""

import sys

from transformer_parity.cli.entry import main

if __name__ == "__main__":
    sys.exit(main())
