"""What several programs do alike, and no decision depends on: TLS, the end of a command, names of images, page headers.

Operator, sidecar, local cluster and command line never import each other, so what they must do alike stands here. This
is the only folder of the package with input or output; the rest of the package must not import it.
"""
