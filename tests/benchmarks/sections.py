"""Results of a check's sections by hand, and what its bars must say of them."""

import json

from benchmarks.bars import judge


def failures(record):
    return [one["what"] for one in json.loads(record.path.read_text())["failures"]]


def section(*rows, failures=(), skipped=(), is_complete=True):
    told = {"failures": list(failures), "skipped": list(skipped), "is_complete": is_complete}
    return {"rows": list(rows) or [{}], **told}


FAILED = section(failures=[{"what": "one", "why": "wrong"}])


def check_bar(bars, name, what, seeded):
    """Check that a bar holds of what is right, is missed for what is wrong, and else is open.

    `seeded` has for each bar results for which it holds, and results with one fault.
    """
    right, wrong = seeded[what]
    found = [
        next(bar.holds for bar in judge({name: one}, bars) if bar.what == what)
        for one in (right, wrong, section(is_complete=False), {})
    ]
    assert found == [True, False, None, None]
