"""The `radixlm` command, with one file or folder per subcommand."""
