"""A plan in sentences, and the tree as text and as a drawing."""

from xml.etree import ElementTree

from unbroken.rendezvous.tree_drawing import svg_picture
from unbroken_core.ranks.tree import Place, RankTree, explain, picture
from unbroken_core.vocabulary.layers import Layer

LAYERS = [
    Layer("job", replace_from=True),
    Layer("rack", min_ranks=2, replace_from=True),
    Layer("pod", min_ranks=2, max_ranks=2, replace_from=True),
]


def small(max_ranks: int | None = 6) -> RankTree:
    tree = RankTree(
        [Layer("job", min_ranks=1, max_ranks=max_ranks, replace_from=True), *LAYERS[1:]],
        [Place(f"uid-{pod}", (f"rack-{pod // 2}", f"pod-{pod}"), 2) for pod in range(4)],
    )
    tree.start()
    return tree


def test_sentences_name_the_ranks_the_domains_and_the_reason() -> None:
    tree = small()
    tree.lose("uid-0", [1])
    assert explain(tree.plan()) == [
        "Plan 1: 6 active, 1 spare, 1 lost ranks; 4 workers change their rank.",
        "rack-0/pod-0: 1 healthy of at least 2 workers; it stands aside.",
        "rack-0/pod-0: rank 0 steps aside, healthy: rack-0/pod-0 is below its minimum.",
        "rack-0/pod-0: lost rank 1.",
        "rack-1/pod-3: takes ranks 0-1 of rack-0/pod-0, from another part of the tree.",
    ]
    tree.lose("uid-1")
    assert explain(tree.plan())[-1] == (
        "2 workers move down, from ranks 4-5 to ranks 2-3: ranks below them found no spare."
    )


def test_sentence_says_why_no_plan_is_possible() -> None:
    tree = small()
    for pod in range(4):
        tree.lose(f"uid-{pod}")
    assert explain(tree.plan()) == [
        "Plan 1 is not possible: want at least 1 healthy workers in domains above their minimum, got 0 of 8."
    ]


def test_long_explanations_are_cut_and_say_so() -> None:
    tree = RankTree(
        [Layer("job", replace_from=False), Layer("pod", replace_from=False)],
        [Place(f"u{pod}", (f"pod-{pod}",), 1) for pod in range(100)],
    )
    tree.start()
    for pod in range(1, 100):
        tree.lose(f"u{pod}")
    sentences = explain(tree.plan())
    assert len(sentences) == 51
    assert sentences[-1] == "50 more changes are not listed."


def test_what_happened_to_most_is_said_however_much_is_left_out() -> None:
    places = [Place(f"u{pod}", (f"pod-{pod}",), 2) for pod in range(100)]
    tree = RankTree([Layer("job", replace_from=False), Layer("pod", min_ranks=2, replace_from=False)], places)
    tree.start()
    for pod in range(60):
        tree.lose(f"u{pod}", [0])
    sentences = explain(tree.plan())
    assert (len(sentences), sentences[1]) == (51, "pod-0: 1 healthy of at least 2 workers; it stands aside.")
    assert sentences[-2:] == [
        "132 more changes are not listed.",
        "80 workers move down, from ranks 120-199 to ranks 0-79: ranks below them found no spare.",
    ]


def test_picture_shows_active_spare_lost_and_idle_workers() -> None:
    tree = small()
    tree.lose("uid-0", [1])
    tree.plan()
    assert picture(tree) == (
        "job  6 active, 1 spare, 1 lost (at most 6)\n"
        "├─ rack-0  2 active, 1 spare, 1 lost (at least 2)\n"
        "│  ├─ pod-0  [- x]\n"
        "│  └─ pod-1  [2 3]\n"
        "└─ rack-1  4 active, 0 spare, 0 lost (at least 2)\n"
        "   ├─ pod-2  [4 5]\n"
        "   └─ pod-3  [0 1]\n"
    )
    assert picture(tree, max_lines=2).splitlines()[-1] == "... 5 more lines"


def test_drawing_is_well_formed_and_has_one_square_a_worker() -> None:
    tree = RankTree(LAYERS, [Place(f"u{pod}", (f"rack <{pod // 2}> & co", f"pod-{pod}"), 2) for pod in range(4)])
    tree.start()
    tree.lose("u0", [1])
    tree.plan()
    drawing = ElementTree.fromstring(svg_picture(tree, "a < b"))
    squares = [
        item.get("class") for item in drawing.iter("{http://www.w3.org/2000/svg}rect") if item.get("width") == "26"
    ]
    assert squares == ["aside", "lost", *["active"] * 6]
    assert svg_picture(tree) == svg_picture(tree)


def test_tree_of_the_root_alone_is_drawn_too() -> None:
    tree = RankTree([Layer("job", min_ranks=1, max_ranks=2, replace_from=False)], [Place("all", (), 3)])
    tree.start()
    assert picture(tree) == "job  2 active, 1 spare, 0 lost (at most 2)\n└─ [0 1 s]\n"
    assert svg_picture(tree).count('class="active"') == 3


def test_names_are_shown_as_the_caller_wants() -> None:
    tree = small()
    assert "└─ POD-3  [" in picture(tree, label=str.upper)
    assert ">POD-3</text>" in svg_picture(tree, label=str.upper)
