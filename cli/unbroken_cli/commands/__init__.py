"""One module for each subcommand of `unbroken`, and what they share (`framework`).

Belongs here: options, what is read, what is printed, the exit code. Does not belong here: sentences (`text`, `advice`),
pictures (`drawings`, `report`), and how a job is read (`sources`).
"""
