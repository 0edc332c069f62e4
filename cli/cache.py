"""`radixlm cache`: show or clear the cache of compiled kernels."""

from __future__ import annotations

import click

from .tables import print_rows


@click.command("cache")
@click.option("--clear", is_flag=True, help="Remove all compiled kernels.")
@click.option("--json", "as_json", is_flag=True, help="Print the figures as JSON.")
def command(clear: bool, as_json: bool) -> None:
    """Show the kernel cache, or clear it.

    Models share most of their kernels. `compile` looks each kernel up in this folder and compiles it only if it is
    missing. Clearing is always safe: compiled models hold copies. The least recently used kernels are removed when
    the folder grows beyond its limit.

    \b
    radixlm cache
    radixlm cache --clear
    """
    import msgspec
    from radixlm.compile.codegen.kernel_cache import KernelCache

    cache = KernelCache.of_user()
    removed = cache.clear() if clear else None
    stats = cache.stats()
    if as_json:
        figures = {
            "folder": str(cache.directory),
            "kernels": stats,
            "limit_bytes": cache.limit_bytes,
            "removed": removed,
        }
        click.echo(msgspec.json.format(msgspec.json.encode(figures)))
        return
    rows = [
        ("folder", str(cache.directory)),
        ("kernels", f"{stats.num_objects:,}, {stats.num_bytes / 1e6:,.1f} MB"),
        ("limit", f"{cache.limit_bytes / 1e6:,.0f} MB"),
    ]
    if removed is not None:
        rows.append(("removed", f"{removed.num_objects:,}, {removed.num_bytes / 1e6:,.1f} MB"))
    print_rows(rows)
