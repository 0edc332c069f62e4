"""The command line of a benchmark. Knows argparse, not what is measured."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any


def read_options(doc: str | None, *paths: str, **options: Any) -> argparse.Namespace:
    """Parse the command line, whose help is the module's `doc`.

    Args:
        paths: positional arguments, each the path of a file or folder.
        options: by the name of an option, its default, which has the option's type. A type instead means that the
            default is None; False means a flag; a tuple means a choice of words, all of them by default.
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in paths:
        parser.add_argument(name, type=Path)
    for name, default in options.items():
        flag = f"--{name.replace('_', '-')}"
        if default is False:
            parser.add_argument(flag, action="store_true")
        elif isinstance(default, tuple):
            parser.add_argument(flag, nargs="+", choices=default, default=default)
        elif isinstance(default, type):
            parser.add_argument(flag, type=default)
        else:
            parser.add_argument(flag, type=type(default), default=default, help=f"default: {default}")
    return parser.parse_args()
