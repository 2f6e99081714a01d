"""What there is said to be room for is what the largest sum of live bytes allows."""

from hypothesis import given
from hypothesis import strategies as st

from moe_compile.schedule.liveness import Liveness, MemoryHeadroom


@st.composite
def programs(draw):
    """Return what nodes allocate and use: each storage is made by one, used by it and by others."""
    number = draw(st.integers(2, 8))
    allocates, uses = ([set() for _ in range(number)] for _ in range(2))
    for storage in range(draw(st.integers(1, 8))):
        maker = draw(st.integers(0, number - 1))
        allocates[maker].add((storage, draw(st.integers(0, 5))))
        users = draw(st.sets(st.integers(maker, number - 1)))
        for user in {maker, *users}:
            uses[user].add(storage)
    return Liveness(tuple(map(tuple, allocates)), tuple(map(tuple, uses)))


def needed(liveness, node):
    """Return the nodes that make what `node` uses."""
    made = {s: n for n, mine in enumerate(liveness.allocates) for s, _ in mine}
    return {made[s] for s in liveness.uses[node]} - {node}


@given(programs(), st.data())
def test_a_node_fits_where_running_it_and_then_the_rest_in_order_does(liveness, data):
    number = len(liveness.uses)
    known = list(range(number))
    allowed = liveness.peak_bytes(known) + data.draw(st.integers(0, 6))
    room, ran = MemoryHeadroom(liveness, known, allowed), []
    while len(ran) < number:
        left = [node for node in known if node not in ran]
        assert room.next_known() == left[0]
        assert room.fits([left[0]])
        ready = [node for node in left if needed(liveness, node) <= {*ran}]
        node = data.draw(st.sampled_from(ready))
        rest = [other for other in left if other != node]
        fits = liveness.peak_bytes([*ran, node, *rest]) <= allowed
        assert room.fits([node]) == fits
        node = node if fits else left[0]
        room.run(node)
        ran.append(node)
    assert liveness.peak_bytes(ran) <= allowed


@given(programs(), st.data())
def test_several_that_are_said_to_fit_do(liveness, data):
    number = len(liveness.uses)
    known = list(range(number))
    allowed = liveness.peak_bytes(known)
    together = data.draw(st.sets(st.integers(0, number - 1)))
    while (more := set().union(together, *(needed(liveness, n) for n in together))) != together:
        together = more
    rest = [node for node in known if node not in together]
    if MemoryHeadroom(liveness, known, allowed).fits(together):
        assert liveness.peak_bytes([*sorted(together), *rest]) <= allowed
