"""Faults of a release of torch, or of CPython, that are worked around: each goes once it is gone.

Contract
    A file says which fault it is for. `tests/torch_quirks` shows each fault on plain torch, and
    says of a release where it is gone.
    Beside these, torch 2.11
    - lowers no slice with an open end of a length known at run time (`passes/replay/replayed.py`
      writes the end);
    - hands on all that the body of an `autograd.Function` makes as its results
      (`passes/normalize/function_exchanges.py` asks for those that are read);
    - holds nothing behind an operator that returns a tuple (`moe_compile/graph/pinning.py` holds it
      behind the elements).
"""
