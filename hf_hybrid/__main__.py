"""`python -m hf_hybrid` is `hf-hybrid`."""

import sys

from hf_hybrid.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
