"""Which pass makes steps slower than Inductor's: the search for a culprit, by times.

Contract
    A trial compiles one more form and takes its steps in turn with Inductor's, as `faster` does. It
    is wrong where the whole interval of the ratio is above one. On a CPU times are of no cluster.
"""

from __future__ import annotations

from typing import Any, Final

from moe_compile.check.culprit import OUT_OF_TIME, search
from moe_compile.check.faster import Faster
from moe_compile.check.forms import AS_ASKED, PLAIN, Form
from moe_compile.check.paired import ratio
from moe_compile.check.same import OutOfTime, Trials, ended_after, passes_of, places_of
from moe_compile.check.sections import Record, say

NOT_SLOWER: Final = "steps by megamoe are not measurably slower than by Inductor"


class TimedTrials(Trials):
    """Forms that are as slow as Inductor's or slower: wrong is what is slower."""

    def __init__(self, trials: Trials, rounds: int) -> None:
        """Time the job of `trials`, each form in so many rounds."""
        super().__init__(trials.team, trials.job, trials.config, 1, trials.limit_s)
        self._faster, self._rounds = Faster(trials.job, trials.config), rounds

    def is_right(self, form: Form, needs_s: float = 0.0) -> bool:
        """Return, on all ranks, whether steps of a form are as fast as Inductor's, or faster."""
        return self._holds(form, self._timed, judge_times, needs_s)

    def _timed(self, form: Form) -> dict[str, Any]:
        with ended_after(self.limit_s, form.name):
            for one in (PLAIN, form):
                if one not in self._faster.ready:
                    self._faster.compile(one)
            seconds = self._faster.in_turn(self._rounds, (PLAIN.name, form.name))
        report = self.job.forms.report(form)
        return {
            "ours": seconds[form.name],
            "theirs": seconds[PLAIN.name],
            "passes": passes_of(report),
            "places": places_of(report),
        }


def judge_times(form: Form, record: Record, found: list[dict[str, Any]]) -> None:
    """Note whether a form is slower than Inductor; it is no failure if so."""
    against = ratio(found[0]["ours"], found[0]["theirs"])  # all ranks have the slowest's
    said = f"{against.median:.3f} ({against.low:.3f} to {against.high:.3f})"
    row = {
        "form": form.name,
        "found": f"a step takes {said} times as long as by Inductor",
        "holds": against.low <= 1.0,
        "passes": sorted({name for one in found for name in one["passes"]}),
        "places": list(dict.fromkeys(place for one in found for place in one["places"])),
    }
    record.put(tried=[*record.data.get("tried", ()), row])
    say(f"tried: {form.name}: {row['found']}")


def check_slow(trials: Trials, rounds: int) -> None:
    """Run the section `culprit` by times."""
    search_by_times(TimedTrials(trials, rounds))


def search_by_times(timed: TimedTrials) -> None:
    """Find out whether megamoe is slower than Inductor, then by which pass."""
    record = timed.team.record
    try:
        is_slower = not timed.is_right(AS_ASKED)
        why = NOT_SLOWER
    except OutOfTime:
        is_slower, why = False, OUT_OF_TIME
    if is_slower:
        search(timed, AS_ASKED, goes_into_blocks=False)  # blocks as written would be slower still
    elif record is not None:
        record.put(culprit={"why": why})
