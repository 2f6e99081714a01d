"""What `megamoe train` shows of a job's output, folds away, and measures."""

import logging

from torch import nn

from torchtitan_integration.parallelize import announce_first_calls
from torchtitan_integration.run_output import RunOutput

JOB = """\
[rank0]:[titan] 2026-11-26 10:00:00,000 - root - INFO - Building deepseek_v3 debug_cpu with {
[rank0]:  "dim": 128,
[rank0]:}
[rank0]:/site-packages/torchdata/loader.py:379: UserWarning: 'set_vital' is deprecated
[rank0]:  torch.set_vital("Dataloader")
[rank0]:[titan] 2026-11-26 10:00:01,000 - root - WARNING - Error running lspci: no such file
[rank0]:[titan] 2026-11-26 10:00:01,000 - root - WARNING - Peak flops undefined for: cpu
[rank0]:[titan] 2026-11-26 10:00:01,000 - root - INFO - Trainer is initialized, total steps 31
[rank0]:[titan] 2026-11-26 10:00:02,000 - root - INFO - Training starts at step 1
[rank0]:[titan] 2026-11-26 10:00:02,500 - torchtitan_integration.parallelize - INFO - \
compiling block 1 of 2
[rank0]:/site-packages/torch/_inductor/lowering.py:2633: UserWarning: no complex operators
[rank0]:  warnings.warn(
[rank0]:[titan] 2026-11-26 10:00:33,000 - torchtitan_integration.parallelize - INFO - \
compiling block 2 of 2
[rank0]:[titan] 2026-11-26 10:00:40,000 - moe_compile.backend - WARNING - megamoe: an exchange
[rank0]:[titan] 2026-11-26 10:00:42,000 - root - INFO - \x1b[31mstep:  1  loss:  8.0\x1b[39m
[rank0]:[titan] 2026-11-26 10:00:43,000 - root - INFO - step: 11  loss:  7.0
[rank0]:[titan] 2026-11-26 10:00:46,000 - root - INFO - step: 21  loss:  6.0
[rank0]:[titan] 2026-11-26 10:00:47,200 - root - INFO - step: 31  loss:  5.0
[rank0]:[rank0]:W1126 10:00:47.250000 29 a/_redistribute.py:390] While redistributing from (x)
[rank0]:[rank0]:W1126 10:00:47.260000 29 torch/_dynamo/a.py:3] [7/8] recompile limit
[rank0]:[titan] 2026-11-26 10:00:47,300 - root - INFO - Training completed
[rank0]:[titan] 2026-11-26 10:00:47,300 - root - INFO - Process group destroyed
"""
SHOWN = """\
Training starts at step 1
compiling block 1 of 2, 0 s
compiling block 2 of 2, 31 s
warning: megamoe: an exchange
step:  1  loss:  8.0
step: 11  loss:  7.0
step: 21  loss:  6.0
step: 31  loss:  5.0
warning: [7/8] recompile limit
Training completed
"""


def shown(text, **settings):
    output = RunOutput(**settings)
    lines = [line for given in text.splitlines(True) for line in output.take(given)]
    return "".join(f"{line}\n" for line in lines), output


def test_steps_progress_and_warnings_are_shown_and_notes_are_folded():
    text, output = shown(JOB, on_cpu=True)
    assert text == SHOWN
    assert output.doing == "training, step 31 of 31"
    assert output.num_folded == len(JOB.splitlines()) - len(SHOWN.splitlines())
    assert "Peak flops undefined" in shown(JOB)[0]


def test_nothing_is_folded_where_all_is_asked_for():
    assert shown(JOB, verbose=True)[0] == JOB


def test_steps_are_measured_from_when_the_rank_logged_them():
    _, output = shown(JOB)
    assert (output.first_step_s, output.later_step_s) == (40.0, 0.12)
    assert output.measured() == (
        "Measured on the rank shown: first step 40.0 s, compilation included; later steps 0.12 s "
        "(median)."
    )
    first_alone = JOB[: JOB.index("[rank0]:[titan] 2026-11-26 10:00:43")]
    assert shown(first_alone)[1].measured().endswith("40.0 s, compilation included.")
    assert shown("")[1].measured() == ""


def test_what_goes_wrong_is_shown_whole_and_of_torchrun_its_end():
    text, _ = shown(
        "[rank1]:[titan] 2026-11-26 10:00:00,000 - root - INFO - folded\n"
        "[rank1]:Traceback (most recent call last):\n"
        "[rank1]:  File 'a.py', line 1\n"
        "[rank1]:ValueError: wrong\n"
        "Traceback (most recent call last):\n"
        "  File 'torchrun.py', line 1\n"
        "ChildFailedError: a rank failed\n"
        "Root Cause\n"
    )
    assert text == (
        "Traceback (most recent call last):\n  File 'a.py', line 1\nValueError: wrong\n"
        "ChildFailedError: a rank failed\nRoot Cause\n"
    )


def test_a_block_says_once_that_it_is_about_to_be_compiled(caplog):
    model = nn.Sequential(nn.Identity(), nn.Identity())
    announce_first_calls([[block] for block in model])
    with caplog.at_level(logging.INFO, logger="torchtitan_integration"):
        model(1)
        model(1)
    assert [r.message for r in caplog.records] == [
        "compiling block 1 of 2",
        "compiling block 2 of 2",
    ]
    assert not any(block._forward_pre_hooks for block in model)


def test_of_blocks_that_are_one_graph_the_first_speaks_for_all(caplog):
    model = nn.Sequential(*(nn.Identity() for _ in range(3)))
    announce_first_calls([[model[0], model[1]], [model[2]]])
    with caplog.at_level(logging.INFO, logger="torchtitan_integration"):
        model(1)
    assert [r.message for r in caplog.records] == [
        "compiling blocks 1 to 2 of 3",
        "compiling block 3 of 3",
    ]
