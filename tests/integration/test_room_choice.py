"""`row_room = "auto"` between steps: when a room is chosen, what is said, and what a job keeps."""

import json
import logging
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("torchtitan", reason="pip install megamoe[titan]")

from moe_compile.config import ROOM_AT_FIRST, ROOMS
from moe_compile.runtime.rerun import RERUN, RoomTimes
from torchtitan_integration.room_choice import AGAIN, FILE, FIRST, MOST, RoomChoice, begin_anew

TIMES = RoomTimes(us=tuple(1000.0 + 100.0 * room for room in ROOMS), reads_us=1000.0)


@pytest.fixture(autouse=True)
def served():
    RERUN.begin(is_served=True)
    yield
    RERUN.begin(is_served=False)


def choice_in(folder):
    return RoomChoice(folder, torch.device("cpu"))


def changes(choice, needs, *, again=False, times=TIMES):
    """Return the numbers of the steps behind which the graphs are to be compiled again."""
    found = []
    for number, need in enumerate(needs, 1):
        RERUN.needed = need
        RERUN.ran(times)
        if choice.end_step(ran_again=again):
            found.append(number)
    return found


def test_a_room_is_chosen_after_some_steps_and_kept_in_the_folder(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    choice = choice_in(tmp_path)
    assert RERUN.room == ROOM_AT_FIRST
    assert changes(choice, [1.2] * (FIRST + 1)) == [FIRST]
    assert RERUN.room == 1.25
    assert "room 1.25 in place of 1.5; the graphs are compiled again" in caplog.text
    assert "needed 1.20 at most; in 0 of them rows have no room" in caplog.text
    kept = {"room": 1.25, "steps_to_next_choice": 2 * FIRST}
    assert json.loads((tmp_path / FILE).read_text()) == kept
    RERUN.begin(is_served=True)
    again = choice_in(tmp_path)
    assert RERUN.room == 1.25
    assert changes(again, [1.6] * (2 * FIRST)) == [2 * FIRST]


def test_choices_become_rare_and_look_at_the_steps_since_the_last(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    choice = choice_in(tmp_path)
    changes(choice, [1.4] * (FIRST + 2 * FIRST + 4 * FIRST))
    assert caplog.text.count("room 1.5 stays") == 3
    assert f"The last {4 * FIRST} steps needed 1.40 at most" in caplog.text
    changes(choice, [1.4] * 4 * MOST)
    kept = json.loads((tmp_path / FILE).read_text())
    assert kept == {"room": 1.5, "steps_to_next_choice": MOST}


def test_steps_that_run_again_have_the_room_chosen_early(tmp_path):
    choice = choice_in(tmp_path)
    assert changes(choice, [2.2] * AGAIN, again=True) == [AGAIN]
    assert RERUN.room == 2.5


@pytest.mark.parametrize("text", ["{", "[]", '{"room": 1.26, "steps_to_next_choice": 16}'])
def test_a_file_that_is_not_read_is_named(tmp_path, caplog, text):
    (tmp_path / FILE).write_text(text)
    choice_in(tmp_path)
    assert RERUN.room == ROOM_AT_FIRST
    assert "To do: remove the file" in caplog.text and FILE in caplog.text


def test_without_predicted_times_the_room_stays_and_it_is_said_why(tmp_path, caplog):
    choice = choice_in(tmp_path)
    assert changes(choice, [1.1] * FIRST, times=None) == []
    assert RERUN.room == ROOM_AT_FIRST and not (tmp_path / FILE).exists()
    assert "have no predicted time" in caplog.text and "needed 1.10 at most" in caplog.text


def test_behind_a_new_room_all_graphs_are_compiled_again_those_of_stages_ahead():
    graphs = []

    def backend(gm, inputs):
        graphs.append(gm)
        return gm.forward

    double = torch.compile(lambda x: 2 * x, backend=backend)
    for number in (1, 2):
        assert double(torch.ones(3)).tolist() == double(torch.ones(3)).tolist() == [2.0] * 3
        assert len(graphs) == number
        trainer = SimpleNamespace(pp_schedule=SimpleNamespace(num_graphs=4))
        begin_anew(trainer)
        assert trainer.pp_schedule.num_graphs is None
    begin_anew(SimpleNamespace())
