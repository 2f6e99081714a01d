"""Every fault that is put back still changes the product where it did."""

import shutil

import pytest

from tests.mutants.defects import DEFECTS, Change, Defect, put_back
from tests.mutants.sandbox import ROOT


@pytest.mark.parametrize("defect", DEFECTS, ids=lambda defect: defect.name)
def test_a_defect_can_be_put_back(tmp_path, defect):
    for module in {change.module for change in defect.changes}:
        (tmp_path / module).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / module, tmp_path / module)
    put_back(defect, tmp_path)
    for module in {change.module for change in defect.changes}:
        source = (tmp_path / module).read_text()
        assert source != (ROOT / module).read_text()
        compile(source, module, "exec")


def test_a_product_that_reads_otherwise_is_told(tmp_path):
    (tmp_path / "module.py").write_text("a = 1\na = 1\n")
    with pytest.raises(ValueError, match="does not have once"):
        put_back(Defect("twice there", (Change("module.py", "a = 1", "a = 2"),)), tmp_path)
