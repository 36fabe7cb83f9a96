"""Pure: how many pods one plan makes. The next plan follows as soon as these are made, so a large job grows as fast.

A plan of all pods at once held 1.2 GB for 65,536 of them, and went on for as long after the job had changed.
"""

MAX_NEW_PODS = 256
MAX_NEW_CHARACTERS = 8 << 20
"""Of all templates together: each pod has keys, variables and mounts of its own."""


def pods_a_plan(template_size: int, num_refused_rounds: int) -> int:
    """Return the most pods that a plan makes of a template with so many characters.

    After a refusal it is one, to see: the others would be refused as well, once each was made, sent and read.
    """
    if num_refused_rounds:
        return 1
    return max(1, min(MAX_NEW_PODS, MAX_NEW_CHARACTERS // max(1, template_size)))
