"""The cost of measuring waits: steps in turn, differences within pairs, and events of a GPU."""

import json

import pytest

from benchmarks.measured_waits import (
    BLOCKS,
    RECORD_US,
    cost_of,
    cost_of_events,
    in_turn,
    main,
    on_a_gpu,
)


def test_steps_take_turns_and_who_is_first_changes():
    ran = []
    seconds = in_turn([lambda: ran.append("with"), lambda: ran.append("without")], 4)
    assert ran == ["without", "with", "with", "without"] * 2
    assert {name: [len(one) for one in both] for name, both in seconds.items()} == {
        "cpu": [4, 4], "wall": [4, 4],
    }  # fmt: skip


def test_what_slows_both_steps_of_a_pair_cancels():
    plain = [0.010, 0.030, 0.011, 0.050, 0.010]
    found = cost_of([one + 1e-5 for one in plain], plain)
    assert found["step_ms"] == pytest.approx(11.0)
    assert found["cost_us"] == pytest.approx(10.0)
    assert found["share"] == pytest.approx(1e-5 / 0.011)
    assert found["least_us"] == pytest.approx(found["most_us"]) == pytest.approx(10.0)


def test_each_wait_of_forward_and_backward_has_two_events():
    code = {"forward": {"order": "LmWmLWW"}, "backward": {"order": "LWm"}}
    least, most = RECORD_US
    assert cost_of_events(code) == {"waits": 4, "least_us": 8 * least, "most_us": 8 * most}
    assert {*on_a_gpu()} == {*BLOCKS} and all(one["waits"] > 20 for one in on_a_gpu().values())


@pytest.mark.slow
def test_a_layer_is_measured_with_its_nine_waits(tmp_path):
    path = tmp_path / "waits.json"
    main(["--pairs=4", "--codegen=fx", f"--json={path}"])
    found = json.loads(path.read_text())["on_a_cpu"]
    assert (found["waits"], found["pairs"]) == (9, 4)
    assert found["cpu"]["step_ms"] > 0.0 and found["wall"]["step_ms"] > 0.0
