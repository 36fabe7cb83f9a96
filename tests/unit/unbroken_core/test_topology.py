"""The tree of domains."""

from unbroken_core.topology import SparePool, Topology, natural_key


def tree(*pods: tuple[str, str]) -> Topology:
    topology = Topology(2)
    for name, domains in pods:
        topology.place(name, name, domains.split("/"))
    return topology


def test_names_are_in_natural_order() -> None:
    """3.38"""
    names = ["node-10", "node-2", "node-1", "a", "10", "9"]
    assert sorted(names, key=natural_key) == ["9", "10", "a", "node-1", "node-2", "node-10"]


def test_different_names_never_have_one_key() -> None:
    assert natural_key("a-01") != natural_key("a-1")


def test_the_order_is_that_of_the_domains_then_of_the_pods() -> None:
    topology = tree(("p2", "r10/b"), ("p10", "r2/b"), ("p3", "r2/b"), ("p4", "r2/a"))
    assert topology.ordered(["p2", "p10", "p3", "p4"]) == ["p4", "p3", "p10", "p2"]


def test_missing_domains_are_one_unknown_domain_at_the_end() -> None:
    topology = tree(("p1", ""), ("p2", "unknown/unknown"), ("p3", "z"))
    assert topology.path("p1") == (None, None)
    assert topology.path("p2") == ("unknown", "unknown")
    assert topology.names("p1") == ("unknown", "unknown")
    assert topology.ordered(["p1", "p2", "p3"]) == ["p2", "p3", "p1"]


def test_a_pod_that_moves_leaves_its_old_domains() -> None:
    topology = tree(("p1", "r1/a"))
    topology.place("p1", "p1", ["r2", "b"])
    assert list(topology.pods_under(("r1",))) == []
    assert list(topology.pods_under(("r2", "b"))) == ["p1"]


def test_an_unknown_pod_is_at_the_root() -> None:
    assert tree(("p1", "r1/a")).path("nobody") == ()


def test_the_nearest_spare_shares_the_innermost_domain() -> None:
    topology = tree(("lost", "r2/b"), ("far", "r1/a"), ("rack", "r2/c"), ("near", "r2/b"))
    pool = SparePool(topology, ["far", "rack", "near"])
    taken = [pool.take_nearest(topology.path("lost"), lambda _uid: True) for _turn in range(4)]
    assert taken == ["near", "rack", "far", None]


def test_a_spare_that_does_not_fit_is_passed_over() -> None:
    topology = tree(("lost", "r2/b"), ("far", "r1/a"), ("near", "r2/b"))
    pool = SparePool(topology, ["far", "near"])
    assert pool.take_nearest(topology.path("lost"), lambda uid: uid != "near") == "far"
    assert len(pool) == 1
