"""What `make trace` counts of the sources, on small ones, and that it reads the product's own."""

from __future__ import annotations

from pathlib import Path

from bench.structure import ROOT, forwarding, imports, longest_chain, only_importers, sources

TOP = """
from typing import TYPE_CHECKING
from . import middle
if TYPE_CHECKING:
    from .low import Low

class Top:
    def read(self): return self._low.number
    async def run(self, x): await self._low.run(x + 1)
    def own(self): return self.number
    def more(self):
        x = self._low.number
        return x
"""
MIDDLE = """
def late():
    from radixlm.cli.low import Low
try:
    from .lowest import One
except ImportError:
    pass
"""


def test_chains_importers_and_forwarding_methods_are_counted(tmp_path: Path) -> None:
    (tmp_path / "cli").mkdir()
    for name, text in {"__init__": "", "top": TOP, "middle": MIDDLE, "low": "", "lowest": ""}.items():
        (tmp_path / "cli" / f"{name}.py").write_text(text)
    files = sources(tmp_path)
    loaded = imports(files, all_of_them=False)
    assert longest_chain(loaded) == ("cli.top", "cli.middle", "cli.lowest")
    assert only_importers(imports(files, all_of_them=True))["cli.lowest"] == "cli.middle"
    assert "cli.low" not in only_importers(imports(files, all_of_them=True))
    assert list(forwarding(files)) == [("cli.top", "Top.read"), ("cli.top", "Top.run")]


def test_the_product_is_read() -> None:
    files = sources(ROOT)
    assert len(files) > 300 and "runtime.cache.radix_tree" in files
    assert len(longest_chain(imports(files, all_of_them=False))) > 10
