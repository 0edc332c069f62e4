"""Run the command line: `python -m radixlm` is `radixlm`."""

from __future__ import annotations

from radixlm.cli.main import main

if __name__ == "__main__":
    main()
