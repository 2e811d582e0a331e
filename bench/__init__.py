"""Measures the engine: over HTTP beside other servers, and in process bucket by bucket.

Each command is a module (``python -m bench.NAME --help``; the table is in bench/README.md). Nothing here is imported by
jaxcb, and no number is printed without the machine and the versions that it was measured on.
"""

import importlib.util
import sys

_MISSING = [name for name in ("httptools", "httpx", "matplotlib", "psutil") if importlib.util.find_spec(name) is None]
if _MISSING:
    sys.exit(f"error: the benches need {', '.join(_MISSING)}: pip install -e '.[bench]'")
