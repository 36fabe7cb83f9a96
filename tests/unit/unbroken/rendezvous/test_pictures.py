"""The job's tree for people."""

from unbroken.rendezvous.pictures import tree_text
from unbroken_core.coordinator.coordinator import Coordinator
from unbroken_core.protocol.settings import JobSettings
from unbroken_core.ranks.tree import Place, RankTree, explain
from unbroken_core.ranks.worlds import shown_name
from unbroken_core.vocabulary.layers import Layer


def test_text_says_why_before_it_says_who_is_where() -> None:
    layers = [Layer("job", min_ranks=1, max_ranks=2, replace_from=True), Layer("pod", min_ranks=2, replace_from=True)]
    tree = RankTree(layers, [Place(f"uid-{pod}", (f"digits-{pod}#uid-{pod}",), 2) for pod in range(2)])
    tree.start()
    tree.lose("uid-0", [1])
    why = explain(tree.plan(), shown_name)
    job = Coordinator(JobSettings("digits"), 0.0).status(0.0, str)
    assert tree_text(tree, job, why) == (
        "digits: waits for the first pod\n\n"
        "Plan 1: 2 active, 1 spare, 1 lost ranks; 4 workers change their rank.\n"
        "digits-0: 1 healthy of at least 2 workers; it stands aside.\n"
        "digits-0: rank 0 steps aside, healthy: digits-0 is below its minimum.\n"
        "digits-0: lost rank 1.\n"
        "digits-1: takes ranks 0-1 of digits-0, from another part of the tree.\n\n"
        "job  2 active, 1 spare, 1 lost (at most 2)\n"
        "├─ digits-0  [- x]\n"
        "└─ digits-1  [0 1]\n"
    )
