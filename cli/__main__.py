"""``python -m moelora.cli``: the same as ``moelora``."""

from __future__ import annotations

import sys
from pathlib import Path

# `python -m` puts the current folder first on sys.path. In a checkout that is a folder with a
# kernels/ in it, which transformers would import in place of Hugging Face's `kernels`.
if not sys.flags.safe_path and Path(sys.path[0] or ".").resolve() == Path.cwd():
    del sys.path[0]
_CHECKOUT = Path(__file__).resolve().parents[1]
sys.path[:] = [entry for entry in sys.path if Path(entry).resolve() != _CHECKOUT]

from moelora.cli.main import main

if __name__ == "__main__":
    main()
