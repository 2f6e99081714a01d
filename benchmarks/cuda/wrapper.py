"""What the Python code that Inductor generates for CUDA does, call by call.

Contract
    Reads the text; nothing is imported or run. Sizes are expressions of the code's own symbols.
    Views, and buffers that take over a storage, share one. Calls that are not known are an error,
    not left out. The calls of a part that a CUDA graph captures stand where the part is called, and
    what it returns of what it was given is the same storage, though a replay may have copied it.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Final

from benchmarks.cuda.calls import Call, Kind, Tensor, Wrapper

ITEMSIZE: Final = {
    "bool": 1, "uint8": 1, "int8": 1, "int16": 2, "int32": 4, "int64": 8, "float8_e4m3fn": 1,
    "bfloat16": 2, "float16": 2, "float32": 4, "float64": 8, "complex64": 8,
}  # fmt: skip
INTEGERS: Final = "megamoe.integers"
"""Ours; or `.tolist()`, which is written for it."""
WAITS: Final = {
    "_c10d_functional.wait_tensor": Kind.WAIT,
    "_c10d_functional.wait_tensors": Kind.WAIT,
    "megamoe.measured_wait": Kind.WAIT,
    "ao.wait_tensor": Kind.COPY_WAIT,
}
COPIES: Final = ("ao.offload", "ao.reload")
STARTS: Final = ("_c10d_functional.", *COPIES)
SILENT: Final = {
    "assert_alignment", "copy_if_misaligned", "get_raw_stream",
    "torch.cuda._DeviceGuard", "torch.cuda.set_device", "args.clear", "RuntimeError",
    "torch._check", "torch.Event",
}  # fmt: skip
"""Calls that move no data."""
ASSERTS_SIZE: Final = ("assert_size_stride", "assert_tensor_metadata")
"""The second asserts a type, too; torch 2.14 and newer write it."""
NAME: Final = re.compile(r"[\w.]+")
METHOD: Final = re.compile(r"\.([a-z]\w*)\(")
EVENT: Final = re.compile(r"event\w*\.(record|synchronize)$")
PART: Final = re.compile(r"partition_(\d+)")
PART_ARGUMENTS: Final = re.compile(r"partition\d+_args")
CALLER: Final = "the names of the caller of a part"
SIZE: Final = re.compile(r"[su]\d+")
READ: Final = ("in_ptr", "arg_")
"""How pointers begin that a kernel only reads: fused ones', and those of templates."""
WRITTEN_BY_FLEX: Final = frozenset({"arg_LSE", "arg_MAX", "arg_DQ", "arg_DV"})
"""But these of FlexAttention's, of which the first is read in the backward."""
OF_PYTHON: Final = {"max", "min", "abs", "int", "float", "len"}
BYTES_OF_RESULTS: Final = {
    "megamoe.gather_quantize_pack": (1,),
    "megamoe.message_rows": (1, 4),
    "megamoe.quantize_rows": (1, 4),
    "megamoe.quantize_weight": (1, 4),
}
"""Bytes of an element of each result, where no argument says its type and no operand has it."""
VIEWS: Final = {
    "view_as_complex", "view_as_real", "_conj", "view", "detach", "permute", "reshape",
}  # fmt: skip
"""ATen operators that return a view."""


def read_wrapper(source: str) -> Wrapper:
    """Return what the code does, in its order."""
    return _Reader(ast.parse(source)).read()


class _Reader:
    def __init__(self, module: ast.Module) -> None:
        self._pointers = dict(_pointers(module))
        self._itemsizes = dict(_itemsizes(module))
        self._shapes = dict(_shapes(module))
        self._functions = list(_functions(module))
        self._parts = _parts(module)
        self._part: int | None = None
        self._given_to: dict[str, dict[str, Tensor]] = {}
        """List of arguments of a part -> what it holds."""
        self._allocated: list[str] = []
        self._lists_given: list[str] = []
        self._tensors: dict[str, Tensor] = {}
        self._tuples: dict[str, Call] = {}
        """Result of an operator, of which there may be several -> its call."""
        self._lists: dict[str, list[str]] = {}
        """List of integers -> the names that they have been given."""
        self._heir = ""  # what the statement before made of another, which may be given up for it
        self._calls: list[Call] = []
        self._equations: list[tuple[str, str]] = []
        self._numbers: dict[str, str] = {}
        self._named: dict[str, str] = {}
        self._checks: dict[str, int] = {}
        self._inputs: tuple[str, ...] = ()
        self._results: tuple[str, ...] = ()

    def read(self) -> Wrapper:
        for function in self._functions:
            for statement in _flat(function.body):
                self._statement(statement)
        return Wrapper(
            calls=self._calls,
            inputs=self._inputs,
            tensors=frozenset(self._itemsizes) & set(self._inputs),
            results=self._results,
            equations=self._equations,
            named_sizes=self._named,
            num_range_checks=self._checks,
            num_triton_sources=len(self._pointers),
            lists_given=tuple(self._lists_given),
            allocated_again=tuple(n for n, times in Counter(self._allocated).items() if times > 1),
        )

    def _statement(self, statement: ast.stmt) -> None:
        heir, self._heir = self._heir, ""
        if isinstance(statement, ast.Assign):
            self._assign(statement.targets[0], statement.value)
        elif isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
            self._call(statement.value, None)
        elif isinstance(statement, ast.Delete):
            for target in statement.targets:
                self._free(statement, ast.unparse(target), heir)
        elif isinstance(statement, ast.If):
            self._check(statement.test)
        elif isinstance(statement, ast.Return):
            self._return(statement)

    def _free(self, statement: ast.stmt, name: str, heir: str) -> None:
        """Note a storage that no name refers to any more, or that another buffer has taken over."""
        given_up = self._tensors.pop(name, None)
        if given_up is None:
            return
        if heir in self._tensors and self._tensors[heir].buffer == given_up.buffer:
            self._tensors[heir] = replace(self._tensors[heir], reused_as=heir)
        held = [
            *self._tensors.values(),
            *(t for of in self._given_to.values() for t in of.values()),
        ]
        if all(t.storage != given_up.storage for t in held):
            self._say(statement, Kind.FREE, given_up.storage, reads=[given_up])

    def _assign(self, target: ast.expr, value: ast.expr) -> None:
        name = ast.unparse(target)
        if isinstance(value, ast.Call) and ast.unparse(value.func).startswith("self.partitions"):
            self._run_part(value)
        elif isinstance(target, ast.Tuple):
            self._take_inputs(target, value)
        elif isinstance(value, ast.List) and PART_ARGUMENTS.fullmatch(name):
            held = {ast.unparse(e): self._tensor(e) for e in value.elts if not _is_number(e)}
            self._given_to[name] = held
            self._numbers[name] = ast.unparse(value)
        elif isinstance(value, ast.Call):
            self._call(value, name)
        elif isinstance(value, ast.Name) and value.id in self._tensors:
            self._tensors[name] = self._tensors[value.id]
            self._heir = name
        elif isinstance(value, ast.Subscript) and (made := _subscripted(value)) in self._lists:
            self._lists[made].append(name)
        elif isinstance(value, ast.Subscript) and made in self._tuples:
            maker, whole = self._tuples[made], self._tensors[made]
            sizes = BYTES_OF_RESULTS.get(maker.name, ())
            place = value.slice.value if isinstance(value.slice, ast.Constant) else None
            itemsize = sizes[place] if sizes and place is not None else whole.itemsize
            self._tensors[name] = Tensor(name, None, itemsize)
            maker.writes.append(self._tensors[name])
        else:
            self._note_number(name, value)

    def _note_number(self, name: str, value: ast.expr) -> None:
        self._numbers[name] = ast.unparse(value)
        if SIZE.fullmatch(name) and isinstance(value, ast.BinOp):
            self._named[name] = self._numbers[name]

    def _run_part(self, call: ast.Call) -> None:
        """Note a captured part as one call, then each of its own."""
        assert isinstance(call.func, ast.Subscript)
        number = int(ast.unparse(call.func.slice))
        name = ast.unparse(call.args[0])
        held = {n: self._sized(t) for n, t in self._given_to.pop(name).items()}
        self._say(call, Kind.PART, self._parts[number].name, reads=list(held.values()))
        self._calls[-1].symbols += [
            e for e in self._numbers.pop(name).strip("[]").split(", ") if e and e not in held
        ]
        outer, self._part = dict(self._tensors), number
        self._given_to[CALLER] = outer  # names that outlive the part
        self._tensors.update(held)
        body, result = list(_flat(self._parts[number].body)), ast.Return()
        elements = [s.value for s in body if isinstance(s, ast.Assign)]
        taken = {_subscripted(v) for v in elements if isinstance(v, ast.Subscript)}
        self._lists_given += sorted(taken & held.keys())
        for statement in body:
            if isinstance(statement, ast.Return):
                result = statement
            else:
                self._statement(statement)
        returned = {ast.unparse(e) for e in _members(result.value)} if result.value else set()
        for local in [name for name in self._tensors if name not in {*outer, *returned}]:
            self._free(result, local, "")
        del self._given_to[CALLER]
        made = {name: self._tensors[name] for name in returned if name in self._tensors}
        self._tensors, self._part = {**outer, **made}, None

    def _sized(self, tensor: Tensor) -> Tensor:
        """Return an argument of a part with its size: a part is given none that a run changes."""
        shape = tensor.shape or self._shapes.get(tensor.storage)
        return replace(tensor, shape=shape) if tensor.buffer == tensor.storage else tensor

    def _take_inputs(self, target: ast.Tuple, value: ast.expr) -> None:
        if ast.unparse(value) == "args" and self._part is None:
            self._inputs = tuple(map(ast.unparse, target.elts))
            known = [name for name in self._inputs if name in self._itemsizes]
            self._tensors.update((n, Tensor(n, None, self._itemsizes[n])) for n in known)

    def _call(self, call: ast.Call, target: str | None) -> None:
        name = ast.unparse(call.func)
        is_silent = name in SILENT | OF_PYTHON or EVENT.search(name)
        if not is_silent and not self._makes_buffer(call, name, target):
            self._does(call, name, target)

    def _makes_buffer(self, call: ast.Call, name: str, target: str | None) -> bool:
        """Note a buffer or its size, if that is what is called."""
        if name in ASSERTS_SIZE:
            self._note_size(ast.unparse(call.args[0]), _elements(call.args[1]))
            return True
        if name == "assert_size_stride_grouped":
            for one, shape in zip(*(_members(a) for a in call.args[:2]), strict=True):
                self._note_size(ast.unparse(one), _elements(shape))
            return True
        if target is not None and name == "reinterpret_tensor":
            self._tensors[target] = self._tensor(call)
            self._heir = target
            return True
        if target is not None and name.startswith("empty_strided_"):
            shape, _, dtype = call.args
            itemsize = ITEMSIZE[ast.unparse(dtype).removeprefix("torch.")]
            self._tensors[target] = Tensor(target, _elements(shape), itemsize)
            self._allocated.append(target)
            return True
        return False

    def _does(self, call: ast.Call, name: str, target: str | None) -> None:
        short = name.removeprefix("torch.ops.").removesuffix(".default")
        of = call.func.value if isinstance(call.func, ast.Attribute) else call.func
        if name.endswith(".run"):
            self._kernel(call, name.removesuffix(".run"))
        elif name.endswith(".item") and target is not None:
            self._say(call, Kind.ITEM, target, reads=[self._tensor(of)])
            self._calls[-1].integers.append(target)
        elif (short == INTEGERS or name.endswith(".tolist")) and target is not None:
            given = self._given(call) or [self._tensor(of)]
            self._say(call, Kind.INTEGERS, INTEGERS, reads=given)
            self._lists[target] = self._calls[-1].integers
        elif name.endswith(".copy_"):
            reads, writes = [self._tensor(call.args[0])], [self._tensor(of)]
            self._say(call, Kind.TO_HOST, "copy_", reads=reads, writes=writes)
        elif short in WAITS:
            kind, awaited = WAITS[short], list(map(self._tensor, _members(call.args[0])))
            self._say(call, kind, short, reads=awaited)
            if target is not None:
                self._tensors[target] = self._tensor(call.args[0])
        elif short.startswith(STARTS):
            self._launch(call, short, target)
        else:
            self._operator(call, short, target)

    def _kernel(self, call: ast.Call, name: str) -> None:
        made = Call(kind=Kind.TRITON, name=name, part=self._part, line=call.lineno)
        pointers = self._pointers.get(name, ())
        for place, argument in enumerate(call.args):
            pointer = pointers[place] if place < len(pointers) else ""
            if (tensor := self._tensor_or_none(argument)) is None:
                text = ast.unparse(argument)
                kept = made.numels if pointer.endswith("numel") else made.symbols
                kept.append(self._numbers.get(text, text))
                continue
            if not pointer.startswith("out_ptr"):
                made.reads.append(tensor)
            if not pointer.startswith(READ) or pointer in WRITTEN_BY_FLEX:
                made.writes.append(tensor)
        self._calls.append(made)

    def _launch(self, call: ast.Call, name: str, target: str | None) -> None:
        reads = self._given(call)
        splits, group = None, ""
        if "all_to_all" in name:
            received, sent = call.args[1], call.args[2]
            splits, group = (_elements(received), _elements(sent)), ast.literal_eval(call.args[3])
        made = Tensor(target or "", None, reads[0].itemsize)
        if name.endswith("_") or "out" in {k.arg for k in call.keywords}:
            made = reads[-1]  # in place
        if target is not None:
            self._tensors[target] = made
        kind = Kind.COPY if name in COPIES else Kind.LAUNCH
        self._say(call, kind, name, reads=reads, writes=[made], splits=splits, group=group)

    def _operator(self, call: ast.Call, name: str, target: str | None) -> None:
        name = _operator_name(call, name)
        short = name.removeprefix("aten.").partition(".")[0]
        reads, writes = self._given(call), list[Tensor | None]()
        if not reads and (own := self._tensor_or_none(call)) is not None:
            reads = [own]
        if short in VIEWS and target is not None:
            self._tensors[target] = Tensor(reads[0].storage)
            return
        for keyword in call.keywords:
            if keyword.arg is not None and keyword.arg.startswith("out"):
                writes.append(self._tensor_or_none(keyword.value))
        kept = [w for w in writes if w is not None]
        if target is not None:
            itemsize = _itemsize_of_result(call, name, reads)
            self._tensors[target] = Tensor(target, None, itemsize)
            kept.append(self._tensors[target])
        elif not kept:
            kept = list(reads)  # in place
        self._say(call, Kind.EXTERN, name, reads=reads, writes=kept)
        if target is not None:
            self._tuples[target] = self._calls[-1]

    def _say(
        self,
        node: ast.AST,
        kind: Kind,
        name: str,
        reads: list[Tensor] | None = None,
        writes: list[Tensor] | None = None,
        splits: tuple[tuple[str, ...], tuple[str, ...]] | None = None,
        group: str = "",
    ) -> None:
        line = getattr(node, "lineno", 0)
        self._calls.append(
            Call(
                kind=kind,
                name=name,
                reads=reads or [],
                writes=writes or [],
                splits=splits,
                group=group,
                part=self._part,
                line=line,
            )
        )

    def _given(self, call: ast.Call) -> list[Tensor]:
        values = [*call.args, *(k.value for k in call.keywords if k.arg != "out")]
        flat = [e for v in values for e in (v.elts if isinstance(v, ast.List | ast.Tuple) else [v])]
        return [t for v in flat if (t := self._tensor_or_none(v)) is not None]

    def _tensor(self, value: ast.expr) -> Tensor:
        found = self._tensor_or_none(value)
        if found is None:
            raise ValueError(f"line {value.lineno}: {ast.unparse(value)} is no known tensor")
        return found

    def _tensor_or_none(self, value: ast.expr) -> Tensor | None:
        if isinstance(value, ast.Name):
            return self._tensors.get(value.id)
        if isinstance(value, ast.Call) and ast.unparse(value.func) == "reinterpret_tensor":
            base = self._tensor(value.args[0])
            return replace(base, shape=_elements(value.args[1]))
        if isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute):
            return self._tensor_or_none(value.func.value)
        if isinstance(value, ast.Subscript):
            return self._tensor_or_none(value.value)
        return None

    def _note_size(self, name: str, shape: tuple[str, ...]) -> None:
        if (known := self._tensors.get(name)) is not None and known.shape is None:
            sized = replace(known, shape=shape)
            self._tensors[name] = sized
            for call in self._calls[-3:]:
                call.writes = [sized if w == known else w for w in call.writes]

    def _check(self, test: ast.expr) -> None:
        if isinstance(test, ast.UnaryOp) and isinstance(test.operand, ast.Compare):
            compared = test.operand
            left, right = compared.left, compared.comparators[0]
            if isinstance(compared.ops[0], ast.Eq):
                self._equations.append((ast.unparse(left), ast.unparse(right)))
                return
            for side, other in ((left, right), (right, left)):
                if isinstance(side, ast.Name) and isinstance(other, ast.Constant):
                    self._checks[side.id] = self._checks.get(side.id, 0) + 1

    def _return(self, statement: ast.Return) -> None:
        value = statement.value
        elements = value.elts if isinstance(value, ast.Tuple) else [value] if value else []
        found = [self._tensor_or_none(e) for e in elements]
        self._results = tuple(t.buffer if t is not None else "" for t in found)
        self._say(statement, Kind.RETURN, "return", reads=[t for t in found if t is not None])


def _itemsize_of_result(call: ast.Call, name: str, reads: Sequence[Tensor]) -> int:
    """Return that of the type that an operator is given, of its kind, or of what it reads."""
    given = (ast.unparse(a).removeprefix("torch.") for a in call.args)
    types = [ITEMSIZE[one] for one in given if one in ITEMSIZE]
    read = [r.itemsize for r in reads if r.itemsize]
    return next(iter([*types, *BYTES_OF_RESULTS.get(name, ())[:1], *read]), 0)


def _operator_name(call: ast.Call, name: str) -> str:
    if not NAME.fullmatch(name):  # such as a sum of a slice of a workspace
        return " ".join(METHOD.findall(name))
    if name.startswith("higher_order."):  # runs the operator that it is given
        given = map(ast.unparse, call.args)
        return " ".join([name, *(a for a in given if a.startswith("torch.ops."))])
    return name


def _subscripted(value: ast.expr) -> str:
    """Return the name of what `name[1][0]` is an element of."""
    while isinstance(value, ast.Subscript):
        value = value.value
    return ast.unparse(value)


def _flat(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    for statement in body:
        if isinstance(statement, ast.With):
            yield from _flat(statement.body)
        else:
            yield statement


def _is_number(value: ast.expr) -> bool:
    """Return whether an argument of a captured part is a size."""
    return isinstance(value, ast.Name) and SIZE.fullmatch(value.id) is not None


def _parts(module: ast.Module) -> dict[int, ast.FunctionDef]:
    """Return the captured parts, by number."""
    functions = [node for node in module.body if isinstance(node, ast.FunctionDef)]
    return {int(found[1]): f for f in functions if (found := PART.fullmatch(f.name))}


def _functions(module: ast.Module) -> Iterator[ast.FunctionDef]:
    """Return what runs: the wrapper's `call`."""
    for node in ast.walk(module):
        if isinstance(node, ast.ClassDef) and node.name == "Runner":
            yield from (f for f in node.body if isinstance(f, ast.FunctionDef) and f.name == "call")


def _pointers(module: ast.Module) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Return the parameters of every Triton kernel, by the name the code calls it by."""
    for node in module.body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
            if ast.unparse(node.value.func) != "async_compile.triton":
                continue
            text = ast.literal_eval(node.value.args[1])
            name = ast.literal_eval(node.value.args[0])
            found = re.search(rf"def {re.escape(name)}\(([^)]*)\)", text)
            names = [p.partition(":")[0].strip() for p in found[1].split(",")] if found else []
            yield ast.unparse(node.targets[0]), tuple(names)


def _itemsizes(module: ast.Module) -> Iterator[tuple[str, int]]:
    """Return the bytes of an element of each tensor among the inputs; some share storages."""
    shared: dict[str, int] = {}
    for node in ast.walk(module):
        if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Call):
            continue
        made, name = ast.unparse(node.value.func), ast.unparse(node.targets[0])
        if made == "torch.as_strided" and (of := ast.unparse(node.value.args[0])) in shared:
            yield name, shared[of]
        dtypes = [ast.unparse(k.value) for k in node.value.keywords if k.arg == "dtype"]
        if dtypes and made in ("rand_strided", "torch.empty_strided"):
            shared[name] = ITEMSIZE[dtypes[0].removeprefix("torch.")]
            yield name, shared[name]


def _shapes(module: ast.Module) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Return the size of each tensor among the inputs, as an example has it."""
    for node in ast.walk(module):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
            made, name = ast.unparse(node.value.func), ast.unparse(node.targets[0])
            if made in ("rand_strided", "torch.as_strided"):
                yield name, _elements(node.value.args[made == "torch.as_strided"])


def _members(value: ast.expr) -> list[ast.expr]:
    """Return what is listed; what stands in parentheses by itself is one."""
    return value.elts if isinstance(value, ast.Tuple | ast.List) else [value]


def _elements(value: ast.expr) -> tuple[str, ...]:
    assert isinstance(value, ast.Tuple | ast.List), ast.unparse(value)
    return tuple(map(ast.unparse, value.elts))
