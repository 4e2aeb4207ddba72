"""The check that txl_lightning/callbacks and txl_lightning/configs are folders.

In the repository both are symbolic links. A clone made with core.symlinks=false holds small text files in their place,
and without this check nothing would say so before the first import or compose fails. Imports only the standard
library and nothing of ours: `setup.py` and the Makefile run this file before anything is installed.
"""

from __future__ import annotations

import sys
from pathlib import Path

LINKS = ("callbacks", "configs")
CURE = "git config core.symlinks true && git checkout -- txl_lightning"


def broken_link() -> str | None:
    """One line with the path, what is there, the rule and the cure; None if all is well."""
    for name in LINKS:
        path = Path(__file__).parent / name
        if not path.is_dir():
            rule = f"must be a link to the folder {name}/"
            value, rule = ("a text file", "this clone has no symbolic links") if path.is_file() else ("missing", rule)
            return f"error: txl_lightning/{name}={value}: {rule}; run '{CURE}'"
    return None


def check_links() -> None:
    """Leave with exit code 2 and one line on stderr if a linked folder is not there.

    Raises:
        SystemExit: not an ImportError, so that `import txl_lightning` ends with the line and without a traceback.
    """
    fault = broken_link()
    if fault:
        print(fault, file=sys.stderr)
        raise SystemExit(2)


if __name__ == "__main__":
    print(broken_link() or "", end="")
