"""One module a subcommand of `unbroken`."""
