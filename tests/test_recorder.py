"""The recorder of what the compiler makes of programs (tests/recorder.py)."""

from tests.recorder import compare, recorded

LOOPS = "tests.layers.LoopExperts"


def test_hashes_are_those_of_another_recording_and_tell_another_plan():
    (name, first), (_, again) = (recorded((f"{LOOPS} 2", "")) for _ in range(2))
    _, whole = recorded((f"{LOOPS} 1", ""))
    assert compare({name: first}, {name: again}) == []
    assert compare({name: first}, {name: whole}) == [f"{name}: graphs, plans, journals, traced"]
    assert compare({name: first}, {}) == [f"{name}: recorded in one of both alone"]
