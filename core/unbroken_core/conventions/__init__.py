"""What several programs do alike, and no decision depends on: TLS, the end of a command, variables that are missing.

Belongs here: what operator, sidecar, local cluster and command line must do alike, as they never import each other; and
what several processes of one of them do alike before they have anything else. This is the only folder of the package
with input or output. Does not belong here: anything that the rest of the package imports.
"""
