"""One module for each subcommand of `unbroken`, and what they share. Text and drawings are made elsewhere."""
