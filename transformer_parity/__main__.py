"""``python -m transformer_parity`` is ``parity``."""

import sys

from transformer_parity.cli.entry import main

if __name__ == "__main__":
    sys.exit(main())
