"""Faults and settings of torch, and of CPython, that are worked around or managed: a file for each.

Contract
    A file names the fault, its origin, the versions it was seen in, and the test that notices when
    it is mended. `tests/torch_quirks/test_still_there.py` shows each fault on plain torch. It fails
    where the torch that `make test` installs has mended one.
    A file may also manage state that torch keeps for the whole process: settings, caches, limits.
    Effects on programs that other backends compile in the same process are in docs/limits.md, and
    `tests/torch_quirks/test_bystander.py` holds it there.

Worked around elsewhere, where the code that meets them stands
    Torch 2.11
    - lowers no slice with an open end of a length known at run time (`passes/replay/replayed.py`
      writes the end);
    - returns every value that the body of an `autograd.Function` makes as a result
      (`passes/function_exchanges.py` asks for those that are read, and `results_given_twice.py`
      keeps the gradient of those that are written in place);
    - holds nothing behind an operator that returns a tuple (`passes/pin_order.py` holds it
      behind the elements).
    Torch 2.13, on GPUs of compute capability 10, leaves the gradient of a group without rows
    unwritten (pytorch#172439; `passes/zero_empty_groups.py` writes zeros).
"""
