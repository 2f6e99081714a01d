"""Checks of a job besides its options and its layout, before a process starts.

Contract
    Every error names the file or the flag, the key, its value, and the remedy. A name that only an
    import of the job's own could make known is not refused. torch is imported only to look up a
    name that is not of the common ones.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Final

from moe_compile.errors import InvalidConfig, listed, nearest
from moe_compile.hardware import load_profile
from torchtitan_integration import titan_keys
from torchtitan_integration.job_file import (
    JobFile,
    layout_faults,
    names_in_list,
    num_ranks,
    option_faults,
    refuse,
    uses_megamoe,
)
from torchtitan_integration.job_folder import why_no_file_in, why_not_written
from torchtitan_integration.launch import uses_cpu
from torchtitan_integration.layout import BACKEND, DEGREES, KEYS, MODEL, read_layout, toml
from torchtitan_integration.resume import check_resume
from torchtitan_integration.titan_keys import Kinds

CONFIG_MODULE: Final = "torchtitan_integration.job_config"
REGISTER: Final = "torchtitan_integration.register"
TEXT: Final = "python_stdlib"
"""The dataset that every machine has."""
TOKENIZERS: Final = ("tokenizer.json", "vocab.json", "vocab.txt")
"""Files that torchtitan looks for in the folder of a tokenizer."""
WITH_BIAS_IN_HF: Final = "deepseek_v3"
"""The model whose published format has the bias on the choice of experts."""
DATASETS: Final = ("hf_datasets/text_datasets.py", "DATASETS")
FLAVORS: Final = ("_args", "_configs")
"""Endings of the names of torchtitan's tables of flavors."""
SIMILAR: Final = 0.65
"""Least share of letters in which names are alike, by `difflib`, to be meant by one another."""
MOST_NAMED: Final = 3
"""Keys that are offered in place of one that there is not."""
DEGREE_NAMES: Final = (*DEGREES, "ep", "etp")
OUR_FLAGS: Final = ("--compare", "--dry-run", "--nproc", "--verbose", "--world")


def checked_ranks(job: JobFile, asked: int | None, *, is_run: bool) -> int:
    """Return the number of ranks of a job in which nothing is wrong; `asked` by a flag, or None.

    Files are checked only if it `is_run`. Raises InvalidConfig with all that is wrong.
    """
    faults, ranks = list(_faults(job, is_run=is_run)), asked or 1
    try:
        ranks = check_ranks(job, asked, "--nproc" if is_run else "--world")
    except InvalidConfig as error:
        faults.append(str(error).removeprefix(f"{job.path}: "))
    if is_run:
        faults += run_faults(job, on_cpu=uses_cpu(ranks))
    refuse(job, faults)
    return ranks


def _faults(job: JobFile, *, is_run: bool) -> Iterator[str]:
    faults = [*option_faults(job), *layout_faults(job), *_module_faults(job), *_key_faults(job)]
    yield from faults
    yield from value_faults(job)
    if uses_megamoe(job) and job.read("experimental.custom_import") == REGISTER and not faults:
        yield from said(lambda: _check_flavor(job))
        if is_run:
            yield from said(lambda: _check_text(job))
    if is_run and not faults:
        yield from said(lambda: check_resume(job))


def _key_faults(job: JobFile) -> Iterator[str]:
    try:
        keys = titan_keys.keys_of_jobs(str(job.read("job.custom_config_module", "")))
    except InvalidConfig as error:
        yield str(error)
        return
    if keys:
        yield from _table_faults(job.content, keys)
        yield from _flag_faults(job.overrides, keys)


def check_ranks(job: JobFile, ranks: int | None, flag: str) -> int:
    """Return the number of ranks; `ranks` is the value of `flag`, None where it is left out.

    Raises InvalidConfig where the job's degrees make another number.
    """
    if ranks is None:
        return num_ranks(job)
    layout = read_layout(job.read)
    degrees = {name: int(getattr(layout, name)) for name in DEGREES}
    product = 1
    for value in degrees.values():
        product *= max(value, 1)
    is_open = min(degrees.values()) < 1
    if ranks == product or (is_open and ranks % product == 0):
        return ranks
    stated = " x ".join(f"{KEYS[n].partition('.')[2]} {v}" for n, v in degrees.items() if v > 1)
    wanted = f"a multiple of {product}" if is_open else f"{product}"
    shards = ranks * layout.dp_shard // product
    instead = f", or write {KEYS['dp_shard']} = {shards}" if ranks % product == 0 else ""
    raise InvalidConfig(
        f"{job.path}: {flag} {ranks}, but [parallelism] has {stated or 'one rank'}: "
        f"write {flag} {wanted}{instead}"
    )


def notes_on(job: JobFile) -> Iterator[str]:
    """Yield notes on settings that are valid, but not as a user of megamoe expects."""
    if not uses_megamoe(job):
        return
    layout = read_layout(job.read)
    if layout.ep == 1 and not layout.is_ulysses:
        ranks = layout.dense_shards * layout.tp if layout.knows_shards else 0
        example = f"{ranks}" if ranks > 1 else "2 or more, a divisor of the ranks"
        yield (
            f"{KEYS['ep']} is 1: every rank has all experts, and there is no exchange to hide; "
            f"to divide experts over ranks write {KEYS['ep']} = {example}"
        )
    if layout.model != WITH_BIAS_IN_HF and job.is_true("checkpoint.last_save_in_hf"):
        yield (
            f"checkpoint.last_save_in_hf: safetensors of {layout.model} have no place for the bias "
            "that balances experts, and without this bias tokens choose other experts"
        )
    if not job.is_true("compile.enable"):
        yield not_compiled(job)
    elif MODEL not in (parts := names_in_list(job.read("compile.components", [MODEL]))):
        said_so = ", ".join(map(toml, [MODEL, *parts]))
        yield (
            f'compile.backend is "{BACKEND}" and compile.components has no "{MODEL}": the model is '
            f"compiled all the same; to say so write compile.components = [{said_so}]"
        )


def not_compiled(job: JobFile) -> str:
    """Return why nothing of a job that names our backend is compiled."""
    if job.is_true("compile.enable"):
        return "no block of the model ran, or its first call failed"
    return (
        f'compile.backend is "{BACKEND}" and compile.enable is false: nothing is compiled; '
        "write compile.enable = true"
    )


def _module_faults(job: JobFile) -> Iterator[str]:
    """Yield faults of a table or a backend that torchtitan knows only by a module of ours."""
    flags = any(word.startswith(f"--{BACKEND}.") for word in job.overrides)
    if (BACKEND in job.content or flags) and not job.read("job.custom_config_module"):
        yield (
            f"torchtitan knows no [{BACKEND}]; write under [job]: "
            f'custom_config_module = "{CONFIG_MODULE}"'
        )
    if not job.read("experimental.custom_import"):
        needs = f'compile.backend = "{BACKEND}"' if uses_megamoe(job) else ""
        if job.read("training.dataset") == TEXT:
            needs = needs or f'training.dataset = "{TEXT}"'
        if needs:
            yield (
                f'{needs} needs our train specs; write under [experimental]: custom_import = "'
                f'{REGISTER}"'
            )


def _table_faults(
    table: Mapping[str, Any], keys: Mapping[str, Kinds], prefix: str = ""
) -> Iterator[str]:
    sections = {key.rpartition(".")[0] + "." for key in keys}
    for name, value in table.items():
        key = prefix + name
        if key == BACKEND:
            continue  # its options are checked as such
        if isinstance(value, dict) and any(s.startswith(f"{key}.") for s in sections):
            yield from _table_faults(value, keys, f"{key}.")
        elif key not in keys:
            yield f"torchtitan has no key {key!r}.{suggestion(key, keys)}"
        elif not titan_keys.admits(keys[key], value):
            yield f"{key} is {value!r}; write {titan_keys.said(keys[key])}"


def _flag_faults(words: tuple[str, ...], keys: Mapping[str, Kinds]) -> Iterator[str]:
    left = list(words)
    while left:
        word = left.pop(0)
        if not word.startswith("--"):
            yield f"{word!r} belongs to no flag: write the value of a flag after the flag"
            continue
        given = left.pop(0) if left and "=" not in word and not left[0].startswith("--") else None
        if fault := _flag_fault(word, given, keys):
            yield fault


def _flag_fault(word: str, given: str | None, keys: Mapping[str, Kinds]) -> str:
    """Return the fault of a flag, "" for none; `given` is the word after it that is no flag."""
    flag, equals, value = word.partition("=")
    key = flag.removeprefix("--").replace("-", "_")
    section, _, name = key.rpartition(".")
    switch = f"{section}.{name.removeprefix('no_')}"
    if section == BACKEND and switch not in keys:
        return ""  # its options are checked as such
    if keys.get(switch) == ("bool",):
        takes = (
            f"{flag} takes no value; write --{switch} or --{section}.no_{name.removeprefix('no_')}"
        )
        return takes if equals or given is not None else ""
    if key not in keys:
        return f"there is no flag {flag!r}.{suggestion(key, keys, '--')}"
    text = value if equals else given
    if text is None:
        return f"{flag} needs a value: {titan_keys.said(keys[key])}"
    if not titan_keys.reads(keys[key], text):
        return f"{flag} is {text!r}; write {titan_keys.said(keys[key])}"
    return ""


def suggestion(key: str, keys: Mapping[str, Kinds], mark: str = "") -> str:
    """Return ` Did you mean 'x'?` for a key that there is not, `mark` before each key.

    In turn: the keys of that name in other tables, a degree by its short name, the keys of a table
    of that name, keys and then tables that are spelt nearly so, and else what there is.
    """
    section, _, name = key.rpartition(".")
    names = {k: k.rpartition(".")[2] for k in keys}
    tables = dict.fromkeys(k.rpartition(".")[0] for k in keys)
    same = [k for k in keys if names[k] == name] + [KEYS[n] for n in DEGREE_NAMES if n == name]
    if not same and name in tables:
        return (
            f" {name} is a table: {', '.join(mark + k for k in keys if k.startswith(f'{name}.'))}."
        )
    own = {k: n for k, n in names.items() if k.startswith(f"{section}.")} or names
    ours = () if section or not mark else [flag.removeprefix(mark) for flag in OUR_FLAGS]
    near = difflib.get_close_matches(name, [*own.values(), *ours], n=1, cutoff=SIMILAR)
    found = same or [k for k in (*ours, *own) if own.get(k, k) in near]
    if not found and section not in tables:
        found = difflib.get_close_matches(section or name, tables, n=1, cutoff=SIMILAR)
    if not found:
        known = tables if own is names else own.values()
        return f" {'Tables' if own is names else f'{section} has'}: {', '.join(known)}."
    alike = difflib.get_close_matches(key, found, n=MOST_NAMED, cutoff=0.0)
    return f" Did you mean {' or '.join(repr(mark + k) for k in alike)}?"


def _check_flavor(job: JobFile) -> None:
    model, flavor = read_layout(job.read).model, str(job.read("model.flavor", "debugmodel"))
    path = f"models/{model}/__init__.py"
    theirs = (name for table in FLAVORS for name in titan_keys.names_in(path, table))
    if flavor in (*theirs, *titan_keys.own_flavors(model)):
        return
    importlib.import_module("torchtitan_integration.cpu_launcher").prepare_torch()
    importlib.import_module(REGISTER)  # after the work-arounds
    specs: Any = importlib.import_module("torchtitan.protocols.train_spec")
    known = tuple(specs.get_train_spec(model).model_args)
    if flavor not in known:
        raise InvalidConfig(f"model.flavor = {flavor!r}: {model} has {listed(flavor, known)}")


def _check_text(job: JobFile) -> None:
    """Refuse a dataset without a name, and one that needs a folder that is not there."""
    _check_dataset(job, "training", "c4_test")
    if job.is_true("validation.enable"):
        _check_dataset(job, "validation", "c4_validation")


def _check_dataset(job: JobFile, section: str, default: str) -> None:
    dataset = str(job.read(f"{section}.dataset", default))
    known = (TEXT, *titan_keys.names_in(*DATASETS))
    instead = f'; write {section}.dataset = "{TEXT}" for text that every machine has'
    if dataset == TEXT or len(known) == 1:
        return
    if dataset.lower() not in known:
        sets = listed(dataset, known)
        raise InvalidConfig(f"{section}.dataset = {dataset!r} is unknown; write one of {sets}")
    is_local = dataset.lower() == "c4_test" and not job.read(f"{section}.dataset_path")
    if is_local and not Path("tests/assets/c4_test").exists():
        raise InvalidConfig(
            f"{section}.dataset = 'c4_test' is a folder in a checkout of torchtitan, and the "
            f"current folder is not such a checkout{instead}"
        )
    if job.read("training.dataset") == TEXT:
        return  # it brings a tokenizer
    assets = Path(str(job.read("model.hf_assets_path", "./tests/assets/tokenizer")))
    if not any((assets / name).is_file() for name in TOKENIZERS):
        raise InvalidConfig(
            f"model.hf_assets_path = {str(assets)!r} holds no tokenizer ({', '.join(TOKENIZERS)}); "
            "fetch the model's by `hf download OWNER/MODEL tokenizer.json tokenizer_config.json "
            f"--local-dir {assets}`{instead.replace('; write', ', or write')}"
        )


LEAST: Final[Mapping[str, int]] = {
    "training.steps": 1,
    "training.seq_len": 1,
    "training.local_batch_size": 1,
    "training.gc_freq": 1,
    "metrics.log_freq": 1,
    "checkpoint.interval": 1,
    "checkpoint.keep_latest_k": 0,
    "validation.freq": 1,
    "validation.seq_len": 1,
    "validation.local_batch_size": 1,
    "profiling.profile_freq": 1,
    "lr_scheduler.warmup_steps": 0,
    "parallelism.pipeline_parallel_microbatch_size": 1,
    "training.global_batch_size": 1,
    "validation.steps": 1,
    "checkpoint.load_step": 0,
    **{KEYS[name]: 1 for name in (*DEGREES, "ep", "etp")},
}
"""Least values of whole numbers."""
OPEN: Final = frozenset(
    {"training.global_batch_size", "validation.steps", "checkpoint.load_step", KEYS["dp_shard"]}
)
"""Keys of these for which -1 means unset."""
NOT_NEGATIVE: Final = (
    "optimizer.lr",
    "optimizer.eps",
    "optimizer.weight_decay",
    "training.max_norm",
)
LOCAL: Final = "training.local_batch_size"
MICRO: Final = "parallelism.pipeline_parallel_microbatch_size"
GLOBAL: Final = "training.global_batch_size"
SIZES: Final[Mapping[str, int]] = {LOCAL: 8, MICRO: 1, GLOBAL: -1}
"""torchtitan's default batch sizes."""
BACKENDS: Final = ("inductor", "eager", "aot_eager", "megamoe")
DUMP: Final = "job.dump_folder"
FOLDERS: Final[Mapping[str, tuple[str, str]]] = {
    "checkpoint.enable": ("checkpoint.folder", "checkpoint"),
    "metrics.enable_tensorboard": ("metrics.save_tb_folder", "tb"),
    "profiling.enable_profiling": ("profiling.save_traces_folder", "profile_traces"),
    "profiling.enable_memory_snapshot": (
        "profiling.save_memory_snapshot_folder",
        "memory_snapshot",
    ),
}
"""Switch -> key and default of the folder that is then written, in the job's folder."""
CODE_CACHE: Final = "TORCHINDUCTOR_CACHE_DIR"
SNAPSHOT: Final = "profiling.enable_memory_snapshot"
PROFILED: Final = {"profiling.profiler_warmup": 3, "profiling.profiler_active": 1}
"""Steps of each round of torchtitan's profiler, and their defaults."""


def value_faults(job: JobFile) -> Iterator[str]:
    """Yield faults of numbers and names of a job."""
    yield from _numbers(job)
    yield from _profiled_steps(job)
    yield from _batches(job)
    yield from _names(job)
    report = str(job.read("megamoe.report", ""))
    if report and (why := why_not_written(Path(report))):
        yield f"megamoe.report = {report!r} cannot be written: {why}"


def run_faults(job: JobFile, *, on_cpu: bool) -> Iterator[str]:
    """Yield faults that keep a job from running here: its folders, and a missing device."""
    yield from folder_faults(job)
    if on_cpu and job.is_true(SNAPSHOT):
        yield f"{SNAPSHOT} is true, which needs a GPU; write {SNAPSHOT} = false on a CPU"
    if on_cpu and job.read("checkpoint.async_mode") == "async_with_pinned_mem":
        yield (
            'checkpoint.async_mode is "async_with_pinned_mem", which pins memory for a GPU; write '
            'checkpoint.async_mode = "async" on a CPU'
        )


def folder_faults(job: JobFile) -> Iterator[str]:
    """Yield why folders that a job writes cannot be written, each cause once."""
    dump = Path(str(job.read(DUMP, "outputs")))
    folders = {DUMP: dump}
    for switch, (key, default) in FOLDERS.items():
        if job.is_true(switch):
            folders[key] = dump / str(job.read(key, default))  # one that is absolute stays
    if cache := os.environ.get(CODE_CACHE):
        folders[CODE_CACHE] = Path(cache)
    known: set[str] = set()
    for key, folder in folders.items():
        if (why := why_no_file_in(folder)) and why not in known:
            known.add(why)
            yield f"{key} = {str(folder)!r} cannot be written: {why}"


def _numbers(job: JobFile) -> Iterator[str]:
    for key, least in LEAST.items():
        value = _number(job, key)
        if value is None or value >= least or (value == -1 and key in OPEN):
            continue
        instead = f"{least} or more" + (", or -1" if key in OPEN else "")
        yield f"{key} is {value}; write {instead}"
    for key in NOT_NEGATIVE:
        value = _number(job, key, float)
        if value is not None and not value >= 0:
            yield f"{key} is {value}; write a number of at least 0"


def _profiled_steps(job: JobFile) -> Iterator[str]:
    every, key = _number(job, "profiling.profile_freq") or 10, " + ".join(PROFILED)
    needed = sum(int(job.read(key, steps)) for key, steps in PROFILED.items())
    if job.is_true("profiling.enable_profiling") and every < needed:
        yield f"profiling.profile_freq is {every}, less than {key}; write {needed} or more"


def _number(job: JobFile, key: str, kind: Callable[[str], Any] = int) -> Any:
    """Return a number of the job; None where it is left out, or is no number."""
    try:
        return kind(str(job.read(key, "")))
    except ValueError:
        return None


def _batches(job: JobFile) -> Iterator[str]:
    sizes = {key: _number(job, key) or least for key, least in SIZES.items()}
    degrees = {name: _number(job, KEYS[name]) or 1 for name in DEGREES}
    is_piped = degrees["pp"] > 1
    key = MICRO if is_piped else LOCAL
    parts = _number(job, "megamoe.batch_parts") or 1
    if min(sizes[LOCAL], sizes[MICRO]) < 1:
        return
    if parts > sizes[key]:
        yield (
            f"megamoe.batch_parts is {parts}, and a batch of {key} = {sizes[key]} has fewer "
            f"sequences; write {key} = {parts} or more, or megamoe.batch_parts = {sizes[key]}"
        )
    validated = _number(job, "validation.local_batch_size") or 8
    if job.is_true("validation.enable") and parts > validated:
        yield (
            f"megamoe.batch_parts is {parts}, and validation.local_batch_size = {validated} has "
            f"fewer sequences; write validation.local_batch_size = {parts} or more"
        )
    if is_piped and sizes[LOCAL] % sizes[MICRO]:
        yield f"{LOCAL} is {sizes[LOCAL]}; write a multiple of {MICRO} = {sizes[MICRO]}"
    shards = _number(job, KEYS["dp_shard"]) or -1
    whole = sizes[LOCAL] * shards * degrees["dp_replicate"]
    if sizes[GLOBAL] > 0 and whole > 0 and sizes[GLOBAL] % whole:
        yield (
            f"{GLOBAL} is {sizes[GLOBAL]}; write a multiple of {whole}, the sequences that all "
            "ranks take at once"
        )


def _names(job: JobFile) -> Iterator[str]:
    yield from _backend(str(job.read("compile.backend", BACKENDS[0])))
    yield from _module(str(job.read("experimental.custom_import", "")))
    hardware = str(job.read("megamoe.hardware", "detect"))
    if hardware != "detect":
        yield from said(lambda: load_profile(hardware))
    if passes := names_in_list(job.read("megamoe.disable_passes", [])):
        pipeline: Any = importlib.import_module("passes.pipeline")  # imports torch
        yield from said(lambda: pipeline.check_names(passes))
    transport = str(job.read("megamoe.transport", "functional"))
    if transport != "functional":
        outside: Any = importlib.import_module("passes.outside")
        yield from said(lambda: outside.find_transport(transport))


def said(check: Callable[[], object]) -> Iterator[str]:
    """Yield the faults that `check` raises as InvalidConfig."""
    try:
        check()
    except InvalidConfig as error:
        yield str(error)


def _backend(name: str) -> Iterator[str]:
    added = [entry.name for entry in entry_points(group="torch_dynamo_backends")]
    if name in (*BACKENDS, *added):
        return
    compiler: Any = importlib.import_module("torch.compiler")
    known = {*BACKENDS, *added, *compiler.list_backends(exclude_tags=())}
    if name not in known:
        yield f"compile.backend is {name!r}, which torch does not know.{nearest(name, known)}"


def _module(name: str) -> Iterator[str]:
    """Yield a fault if there is no module `name`; the module itself is not run."""
    sys.path.append(str(Path.cwd()))  # as `python -m`, by which ranks are started, has it
    try:
        if name and importlib.util.find_spec(name) is None:
            yield f"experimental.custom_import = {name!r}: there is no such module"
    except ImportError as error:
        yield f"experimental.custom_import = {name!r}: {error}"
    finally:
        sys.path.pop()
