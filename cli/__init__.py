"""The `radixlm` command; one subcommand per file."""
