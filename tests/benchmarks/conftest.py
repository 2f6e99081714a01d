"""A record of a check's section, in a folder of its own."""

import time

import pytest

from moe_compile.check.sections import Record


@pytest.fixture
def record(tmp_path):
    return Record(path=tmp_path / "section.json", deadline=time.monotonic() + 900)
