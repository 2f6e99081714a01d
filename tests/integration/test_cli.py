"""`megamoe train` says what is wrong with a file before it starts anything."""

import contextlib
import dataclasses
import json
import os
import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from moe_compile.cli import main, new_parser
from moe_compile.errors import InvalidConfig
from moe_compile.report.process_report import report_of
from torchtitan_integration.job_checks import OUR_FLAGS, checked_ranks, notes_on
from torchtitan_integration.job_config import asks_for_megamoe, with_model_compiled
from torchtitan_integration.job_file import (
    find_job,
    layout_faults,
    num_ranks,
    rank_with_loss,
    read_job,
    recipes,
)
from torchtitan_integration.launch import (
    ON_GPUS,
    allow_open_files,
    settings_on_gpus,
    train_command,
)
from torchtitan_integration.layout import KEYS, RULES, Layout, check_layout
from torchtitan_integration.run_output import drop_old
from torchtitan_integration.titan_keys import keys_of_jobs, own_flavors

OURS = '[model]\nname = "deepseek_v3"\n[compile]\nbackend = "megamoe"\n'
MODULES = (
    '[job]\ncustom_config_module = "torchtitan_integration.job_config"\n'
    '[experimental]\ncustom_import = "torchtitan_integration.register"\n'
)
VALIDATES = {"validates": True, "validation_steps": 2}
RIGHT = f"""{MODULES}{OURS}enable = true
[training]\ndataset = "python_stdlib"
[parallelism]\ndata_parallel_shard_degree = 2\nexpert_parallel_degree = 2
"""


def write(folder, text):
    path = folder / "job.toml"
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[megamoe]\nchunkz = 2\n", "no option 'chunkz'. Did you mean 'chunks'?"),
        ('[megamoe]\ncodegen = "fxx"\n', "megamoe.codegen is 'fxx'"),
        ('[megamoe]\nattention = "ring"\n', "write one of auto, tensor, ulysses"),
        (
            f'{OURS}[megamoe]\nattention = "ulysses"\n',
            'write megamoe.attention = "auto"',
        ),
        ('[megamoe]\nbatch_parts = "half"\n', 'write "auto" or a whole number'),
        ("megamoe = 3\n", "must be a table"),
        ("[megamoe\n", "is not TOML"),
        (OURS.replace("deepseek_v3", "llama3"), 'write model.name = "deepseek_v3"'),
        (
            OURS.replace("deepseek_v3", "gpt_oss")
            + "[parallelism]\npipeline_parallel_degree = 2\n",
            "write parallelism.pipeline_parallel_degree = 1",
        ),
        (
            f'{OURS}[activation_checkpoint]\nmode = "memory_budget"\n'
            '[megamoe]\nrecompute = "model"\n',
            'write megamoe.recompute = "price"',
        ),
        (
            f"{OURS}[parallelism]\ncontext_parallel_degree = 2\ntensor_parallel_degree = 2\n",
            "write parallelism.tensor_parallel_degree = 1",
        ),
        (f"{OURS}[parallelism]\ndata_parallel_shard_degree = 'x'\n", "a whole number"),
        (
            f"{OURS}[parallelism]\ndata_parallel_shard_degree = 1\n"
            "tensor_parallel_degree = 2\nexpert_parallel_degree = 2\n",
            "write parallelism.data_parallel_shard_degree = 2",
        ),
        (
            f"{OURS}[parallelism]\ndata_parallel_shard_degree = 4\ntensor_parallel_degree = 4\n"
            "expert_parallel_degree = 2\nexpert_tensor_parallel_degree = 2\n",
            "write parallelism.expert_tensor_parallel_degree = 1",
        ),
        (
            f"{OURS}[parallelism]\ndata_parallel_shard_degree = 4\nexpert_parallel_degree = 3\n",
            "write parallelism.expert_parallel_degree = 2",
        ),
        (
            f"{OURS}[parallelism]\npipeline_parallel_degree = 2\n"
            'pipeline_parallel_schedule = "ZBVZeroBubble"\n',
            'write parallelism.pipeline_parallel_schedule = "Interleaved1F1B"',
        ),
        (
            f'{OURS}[parallelism]\nexpert_parallel_comm_backend = "deepep"\n',
            'write parallelism.expert_parallel_comm_backend = "standard"',
        ),
        (
            f"{OURS}[parallelism]\ntensor_parallel_degree = 2\n"
            "enable_async_tensor_parallel = true\n",
            "write parallelism.enable_async_tensor_parallel = false",
        ),
    ],
)
def test_a_wrong_file_is_named_with_what_to_write(tmp_path, capsys, text, message):
    path = write(tmp_path, text)
    assert main(["train", str(path)]) == 2
    said = capsys.readouterr().err
    assert str(path) in said
    assert message in said
    assert "Traceback" not in said


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--megamoe.chunkz", "2"], "Did you mean 'chunks'?"),
        (["--megamoe.no-strickt"], "Did you mean 'strict'?"),
        (["--megamoe.chunks=0"], "megamoe.chunks is 0"),
        (["--megamoe.codegen", "fxx"], "megamoe.codegen is 'fxx'"),
        (["--megamoe.batch-parts", "half"], 'write "auto" or a whole number'),
        (["--megamoe.attention", "ring"], "write one of auto, tensor, ulysses"),
        (
            ["--parallelism.context_parallel_degree", "2", "--megamoe.attention", "tensor"],
            'write megamoe.attention = "ulysses"',
        ),
    ],
)
def test_a_wrong_flag_is_refused_like_the_same_words_in_the_file(tmp_path, capsys, flags, message):
    path = write(tmp_path, f"{OURS}[megamoe]\nchunks = 2\n")
    assert main(["train", str(path), *flags]) == 2
    assert message in capsys.readouterr().err


def test_right_flags_pass(tmp_path):
    path = write(tmp_path, f"{OURS}[megamoe]\nchunks = 2\n")
    flags = ["--megamoe.no-strict", "--megamoe.schedule", "--megamoe.chunks", "4"]
    job = read_job(path, [*flags, "--megamoe.disable-passes", "a,b"])
    assert job.read("megamoe.chunks") == "4"
    assert job.read("megamoe.schedule") is True and job.read("megamoe.strict") is False


def test_a_missing_file_is_said(capsys):
    assert main(["train", "nowhere.toml"]) == 2
    assert "nowhere.toml: there is no such file" in capsys.readouterr().err


def test_without_torchtitan_the_user_is_told_what_to_install(tmp_path):
    path = write(tmp_path, "[parallelism]\ndata_parallel_shard_degree = 2\n")
    code = (
        "import importlib.util as u, sys; find = u.find_spec\n"
        "u.find_spec = lambda name, *a: None if name == 'torchtitan' else find(name, *a)\n"
        f"from moe_compile.cli import main; sys.exit(main(['train', {str(path)!r}]))"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False
    )
    assert run.returncode == 2
    assert "pip install 'megamoe[titan]'" in run.stderr


def test_with_another_torchtitan_the_user_is_told_which_and_why_in_one_line(tmp_path):
    """It was a traceback of every rank's import."""
    path = write(tmp_path, "[parallelism]\ndata_parallel_shard_degree = 2\n")
    for name in ("torchtitan", "torchtitan-0.3.0.dist-info"):
        (tmp_path / name).mkdir()
    (tmp_path / "torchtitan" / "__init__.py").touch()
    metadata = "Metadata-Version: 2.1\nName: torchtitan\nVersion: 0.3.0\n"
    (tmp_path / "torchtitan-0.3.0.dist-info" / "METADATA").write_text(metadata)
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        f"from moe_compile.cli import main; sys.exit(main(['train', {str(path)!r}]))"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False
    )
    assert run.returncode == 2
    (line,) = run.stderr.splitlines()
    assert "torchtitan 0.3.0 is installed" in line and "pip install 'torchtitan==0.2.2'" in line


def test_ranks_are_the_product_of_the_degrees_and_overrides_win(tmp_path):
    text = "[parallelism]\ndata_parallel_shard_degree = 2\ntensor_parallel_degree = 2\n"
    path = write(tmp_path, text)
    assert num_ranks(read_job(path, [])) == 4
    assert num_ranks(read_job(path, ["--parallelism.data_parallel_shard_degree", "4"])) == 8
    assert num_ranks(read_job(path, ["--parallelism.tensor-parallel-degree=1"])) == 2


def test_the_rank_that_prints_the_loss_is_shown(tmp_path):
    path = write(tmp_path, "[parallelism]\npipeline_parallel_degree = 4\n")
    assert rank_with_loss(read_job(path, []), 8) == 6
    command = train_command(path, 8, [], tmp_path, shown_rank=6)
    assert command[command.index("--local-ranks-filter") + 1] == "6"
    assert rank_with_loss(read_job(write(tmp_path, ""), []), 8) == 0


def test_a_degree_left_open_asks_for_nproc(tmp_path):
    path = write(tmp_path, "[parallelism]\nexpert_parallel_degree = 2\n")
    with pytest.raises(InvalidConfig, match=re.escape("--nproc N")):
        num_ranks(read_job(path, []))


def test_fewer_gpus_than_ranks_means_the_cpu(monkeypatch):
    for visible, on_cpu in (
        ("0,1", False),
        ("0,1,2", False),
        ("1", True),
        ("", True),
        ("-1", True),
    ):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        command = train_command(Path("job.toml"), 2, [], Path("logs"))
        assert ("torchtitan_integration.cpu_launcher" in command) is on_cpu
        assert ("torchtitan_integration.train" in command) is not on_cpu


def test_ranks_on_gpus_have_what_they_need_where_the_user_set_nothing_else():
    assert settings_on_gpus({}) == ON_GPUS
    mine = {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "PYTORCH_ALLOC_CONF": "max_split_size_mb:64"}
    assert settings_on_gpus(mine) == {"TORCH_NCCL_HIGH_PRIORITY": "1"}


def test_a_job_may_open_as_many_files_as_the_machine_allows():
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (before[1] // 2, before[1]))
        assert allow_open_files() == before[1]
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (before[1], before[1])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_every_rule_refuses_and_what_it_says_to_write_passes():
    base = Layout(dp_shard=4, tp=2, ep=2)
    wrong = (
        {"model": "llama3"},
        {"dp_shard": 1},
        {"tp": 4, "etp": 2},
        {"ep": 5},
        {"dp_replicate": 4, "dp_shard": 1, "ep": 1},
        {"pp": 2, "pp_schedule": "GPipe"},
        {"pp": 4, "batch": 3},
        {"model": "gpt_oss", "pp": 2},
        {"tp": 1, "cp": 2, "attention": "tensor"},
        {"attention": "ulysses"},
        {"cp": 2},
        {"tp": 1, "cp": 2, "pp": 2},
        {"tp": 1, "cp": 8, "query_heads": 12, "kv_heads": 6},
        {"tp": 1, "cp": 2, "kernel": "flex"},
        {"exchange": "deepep"},
        {"seq_len": 130},
        {"async_tp": True},
        {"checkpointing": "memory_budget", "recompute": "model"},
        {"checkpointing": "full", "recompute_modules": ("moe_act",)},
        {"converters": ("quantize.linear.float8", "quantize.grouped_mm.float8")},
        {"gradient_wire": "bf16_fp32_sum", "reduce_dtype": "bfloat16"},
        {"gradient_wire": "bf16_fp32_sum", "dp_shard": 1, "ep": 1},
        {"validates": True},
        {**VALIDATES, "validation_seq_len": 130},
        {**VALIDATES, "pp": 2, "validation_seq_len": 1024},
        {**VALIDATES, "pp": 2, "validation_batch": 4},
    )
    check_layout(base)
    for rule, changes in zip(RULES, wrong, strict=True):
        layout = dataclasses.replace(base, **changes)
        assert rule.holds(layout)
        with pytest.raises(InvalidConfig, match=re.escape(f"write {KEYS[rule.field]} = ")):
            check_layout(layout)
        check_layout(dataclasses.replace(layout, **{rule.field: rule.instead(layout)}))


@pytest.mark.parametrize(
    ("query_heads", "kv_heads", "ranks", "fits"),
    [(8, 8, 4, True), (8, 2, 4, True), (8, 1, 8, True), (6, 6, 4, False), (12, 3, 2, False)],
)
def test_heads_fit_where_every_rank_has_its_own_or_shares_one(query_heads, kv_heads, ranks, fits):
    layout = Layout(cp=ranks, query_heads=query_heads, kv_heads=kv_heads)
    refusal = contextlib.nullcontext() if fits else pytest.raises(InvalidConfig)
    with refusal:
        check_layout(layout)


@pytest.mark.parametrize(
    ("attention", "cp", "is_ulysses"),
    [("auto", 1, False), ("auto", 2, True), ("ulysses", 2, True), ("tensor", 1, False)],
)
def test_attention_is_ulysses_where_asked_for_or_where_there_is_cp(attention, cp, is_ulysses):
    assert Layout(attention=attention, cp=cp).is_ulysses is is_ulysses


@pytest.mark.parametrize("is_flag", [False, True])
def test_a_list_is_read_of_the_file_and_of_a_flag_and_printed_as_toml_writes_it(tmp_path, is_flag):
    names = ("quantize.linear.float8", "quantize.grouped_mm.float8")
    flags = [f"--model.converters={','.join(names)}"] if is_flag else []
    listed = "" if is_flag else f"converters = {list(names)}\n"
    text = OURS.replace("[model]\n", f"[model]\n{listed}")
    degrees = "[parallelism]\ndata_parallel_shard_degree = 2\nexpert_parallel_degree = 2\n"
    with pytest.raises(InvalidConfig) as said:
        checked_ranks(read_job(write(tmp_path, text + degrees), flags), None, is_run=False)
    assert 'write model.converters = ["quantize.linear.float8"]' in str(said.value)


def test_all_that_is_wrong_is_said_at_once(tmp_path):
    text = (
        "[parallelism]\ncontext_parallel_degree = 2\ntensor_parallel_degree = 2\n"
        "expert_parallel_comm_backend = 'deepep'\n"
    )
    with pytest.raises(InvalidConfig) as said:
        checked_ranks(read_job(write(tmp_path, OURS + text), []), None, is_run=False)
    assert "tensor_parallel_degree = 1" in str(said.value)
    assert 'expert_parallel_comm_backend = "standard"' in str(said.value)


def test_another_backend_is_not_our_business(tmp_path):
    text = OURS.replace("megamoe", "inductor") + "[parallelism]\ncontext_parallel_degree = 2\n"
    assert list(layout_faults(read_job(write(tmp_path, text), []))) == []


@pytest.fixture
def checked(tmp_path, capsys, monkeypatch):
    """Run `megamoe train` where no process can be started; return what it says of a wrong job."""
    monkeypatch.setattr("moe_compile.commands.train.run", lambda *_: pytest.fail("started"))
    monkeypatch.chdir(tmp_path)

    def run(text, *arguments):
        pytest.importorskip("torchtitan", reason="pip install megamoe[titan]")
        assert main(["train", str(write(tmp_path, text)), *arguments]) == 2
        return capsys.readouterr().err

    return run


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--training.step", "5"], "Did you mean '--training.steps'?"),
        (["--trainig.steps", "5"], "Did you mean '--training.steps' or '--validation.steps'?"),
        (["--steps", "5"], "Did you mean '--training.steps' or '--validation.steps'?"),
        (["--training.compile"], "compile is a table: --compile.enable, "),
        (["--ep", "2"], "Did you mean '--parallelism.expert_parallel_degree'?"),
        (["--training.lr", "1"], "Did you mean '--optimizer.lr'?"),
        (["--training.zzz", "1"], "training has: dataset, dataset_path, "),
        (["--zzz", "1"], "Tables: job, profiling, "),
        (["--parallelism.expert_parallel_degree", "3"], "does not divide shards x CP x TP / ETP"),
        (["--nprocs", "2"], "Did you mean '--nproc'?"),
        (["--training.steps", "many"], "write a whole number"),
        (["--training.steps=1e3"], "write a whole number"),
        (["--optimizer.lr", "high"], "write a number"),
        (["--training.steps"], "needs a value"),
        (["--training.steps", "--metrics.log_freq", "1"], "--training.steps needs a value"),
        (["--compile.enable", "true"], "write --compile.enable or --compile.no_enable"),
        (["--optimizer.implementation", "fast"], "one of for-loop, foreach, fused"),
        (["--quantize.linear.float8.recipe_name", "x"], "one of tensorwise, rowwise"),
        (["steps=5"], "belongs to no flag"),
        (["--training.dataset", "c5"], "write one of python_stdlib, c4"),
        (["--training.dataset", "c4"], "holds no tokenizer"),
        (["--training.dataset", "c4"], "--local-dir tests/assets/tokenizer`, or write training.da"),
        (["--training.dataset", "c4_test"], 'write training.dataset = "python_stdlib"'),
        (["--validation.enable", "--validation.steps=1", "--validation.dataset", "c4_test"],
         'write validation.dataset = "python_stdlib"'),
        (["--validation.enable", "--validation.steps=1", "--validation.dataset", "c5"], "known"),
        (["--validation.enable"], "write validation.steps = "),
        (["--nproc", "3"], "write --nproc 2"),
        (["--nproc", "4"], "or write parallelism.data_parallel_shard_degree = 4"),
        (["--nproc", "3", "--parallelism.data_parallel_shard_degree=-1",
          "--parallelism.tensor_parallel_degree=2"], "write --nproc a multiple of 2"),
        (["--dry-run", "--world", "3"], "write --world 2"),
        (["--dry-run", "--nproc", "2"], "write --world 2"),
        (["--world", "2"], "write --nproc 2"),
        (["--compare"], "--compare works with --dry-run only"),
        (["--megamoe.attention_split", "qkv"], "'attention_split' any more; leave the option out"),
        (["--training.steps", "-5"], "training.steps is -5; write 1 or more"),
        (["--training.global_batch_size", "-2"], "write 1 or more, or -1"),
        (["--training.global_batch_size", "24"], "write a multiple of 16"),
        (["--optimizer.lr", "-0.1"], "optimizer.lr is -0.1"),
        (["--megamoe.hardware", "h1000"], "no profile 'h1000'"),
        (["--megamoe.disable_passes", "split_bath"], "Did you mean 'split_batch'?"),
        (["--megamoe.recompute_modules", "layernorms"], "Did you mean 'layernorm'?"),
        (["--megamoe.transport", "pigeons"], "pigeons"),
        (["--megamoe.batch_parts", "9"], "write training.local_batch_size = 9 or more"),
        (["--compile.backend", "inductr"], "Did you mean 'inductor'?"),
        (["--experimental.custom_import", "torchtitan_integration.registr"], "no such module"),
        (["--experimental.custom_import", "nowhere.register"], "No module named 'nowhere'"),
        (["--job.dump_folder", "job.toml/outputs"], "job.toml is a file"),
        (["--megamoe.report", "."], "write the name of a file"),
        (["--megamoe.report", "/dev/null"], "it is a device or a pipe"),
        (["--megamoe.report", "job.toml/report.json"], "job.toml is a file"),
        (["--megamoe.report", "/proc/none/report.json"], "no file can be written in /proc"),
        (["--dry-run", "--megamoe.report", "/proc/report.json"], "no file can be written in /proc"),
        (["--job.dump_folder", "/proc/outputs"], "no file can be written in /proc"),
        (["--checkpoint.enable", "--checkpoint.folder=/proc/c"], "checkpoint.folder = '/proc/c'"),
        (["--metrics.enable_tensorboard", "--metrics.save_tb_folder=/proc/c"], "save_tb_folder = "),
        (["--profiling.enable_memory_snapshot"], "enable_memory_snapshot = false on a CPU"),
        (["--profiling.enable_profiling", "--profiling.profile_freq=3"], "write 4 or more"),
        (["--checkpoint.async_mode=async_with_pinned_mem"], 'write checkpoint.async_mode = "as'),
        (["--megamoe.batch_parts", "9", "--validation.enable"],
         "write validation.local_batch_size = 9 or more"),
    ],
)  # fmt: skip
def test_wrong_flags_are_named_before_a_process_starts(checked, flags, message):
    said = checked(RIGHT, *flags)
    assert message in said and "Traceback" not in said


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (RIGHT.replace("dataset =", "datset ="), "Did you mean 'training.dataset'?"),
        (RIGHT.replace("[training]", "[trainings]"), "Did you mean 'training'?"),
        (RIGHT.replace("enable = true", 'enable = "yes"'), "compile.enable is 'yes'"),
        (f"{RIGHT}[optimizer]\nlr = 'high'\n", "write a number"),
        (RIGHT.replace(MODULES, "") + "[megamoe]\nchunks = 2\n", "write under [job]: custom_con"),
        (RIGHT.replace(MODULES, ""), "write under [experimental]: custom_import"),
        (RIGHT.replace("job_config", "no_config"), "torchtitan_integration.no_config"),
    ],
)
def test_wrong_files_are_named_before_a_process_starts(checked, text, message):
    assert message in checked(text)


def test_all_that_is_wrong_with_a_job_is_said_at_once(checked):
    """One thing was said in each try."""
    text = RIGHT.replace("[training]", "[training]\nsteps = -1\nlocl = 3")
    text += '[megamoe]\nchunks = 0\ncodgen = "fx"\nnumerics = "rough"\nattention_chunks = 0\n'
    said = checked(text, "--training.step", "5", "--compile.enable", "true", "--nproc", "3")
    first, *faults = said.splitlines()
    assert first.endswith("9 things are wrong:") and len(faults) == 9
    for fault in (
        "'codgen'", "megamoe.chunks is 0", "megamoe.numerics is 'rough'",
        "megamoe.attention_chunks", "training.steps is -1", "no key 'training.locl'",
        "no flag '--training.step'", "--compile.enable takes no value", "write --nproc 2",
    ):  # fmt: skip
        assert sum(fault in line for line in faults) == 1, fault


@pytest.mark.slow
def test_an_unknown_flavor_is_answered_by_those_there_are(tmp_path):
    """In a process of its own: torchtitan is imported for the list."""
    pytest.importorskip("torchtitan", reason="pip install megamoe[titan]")
    command = [sys.executable, "-m", "moe_compile.cli", "train", str(write(tmp_path, RIGHT))]
    run = subprocess.run(
        [*command, "--model.flavor", "silly"],
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert run.returncode == 2
    assert "deepseek_v3 has debugmodel" in run.stderr and "debug_cpu" in run.stderr


def test_every_recipe_is_a_job_without_a_fault():
    pytest.importorskip("torchtitan", reason="pip install megamoe[titan]")
    for name in recipes():
        job = read_job(find_job(name), [])
        assert checked_ranks(job, None, is_run=False) == num_ranks(job)
        assert list(notes_on(job)) == []


def test_experts_that_no_rank_shares_are_remarked_on(tmp_path):
    text = RIGHT.replace("expert_parallel_degree = 2", "expert_parallel_degree = 1")
    (note,) = notes_on(read_job(write(tmp_path, text), []))
    assert "no exchange to hide" in note
    assert "write parallelism.expert_parallel_degree = 2" in note
    ulysses = ["--parallelism.context_parallel_degree=2"]
    assert list(notes_on(read_job(tmp_path / "job.toml", ulysses))) == []
    (note,) = notes_on(read_job(write(tmp_path, RIGHT), ["--compile.no-enable"]))
    assert "write compile.enable = true" in note


def test_the_model_is_compiled_though_the_file_names_the_loss_alone(tmp_path):
    """torchtitan's own files for MoE models do; such jobs trained without megamoe, and said so
    nowhere."""
    text = RIGHT.replace("enable = true", 'enable = true\ncomponents = ["loss"]')
    for flags in ([], ["--compile.components=loss"]):
        (note,) = notes_on(read_job(write(tmp_path, text), flags))
        assert 'write compile.components = ["model", "loss"]' in note
    compile_ = dataclasses.make_dataclass("Compile", ["enable", "backend", "components"])
    titan = dataclasses.make_dataclass("Job", ["compile"])
    job = titan(compile_(True, "megamoe", ["loss"]))
    assert asks_for_megamoe(job)
    assert with_model_compiled(job).compile.components == ["model", "loss"]
    assert job.compile.components == ["loss"]
    job.compile.backend = "inductor"
    assert with_model_compiled(job) is job and not asks_for_megamoe(job)


def failing(error):
    """Return a job that ends by an error of rank 1, in the place of torchrun."""

    def fail(command, show, settings):
        for rank, said in enumerate(("", f"Traceback:\n  File\n{error}\nends\n")):
            log = Path("outputs/ranks/run/attempt_0") / str(rank) / "stderr.log"
            log.parent.mkdir(parents=True, exist_ok=True)
            log.write_text(said)
        return 1

    return fail


def test_a_run_that_fails_says_so_in_its_last_line(tmp_path, capsys, monkeypatch):
    pytest.importorskip("torchtitan", reason="pip install megamoe[titan]")
    monkeypatch.setattr("moe_compile.commands.train.run", failing("ValueError: no data"))
    monkeypatch.chdir(tmp_path)
    assert main(["train", str(write(tmp_path, RIGHT))]) == 1
    said = capsys.readouterr()
    error, last = said.err.splitlines()[-2:]
    assert error == "megamoe: rank 1: ValueError: no data"
    assert (
        last == "megamoe: the job failed, exit status 1; what ranks printed: outputs/ranks/latest"
    )
    assert Path("outputs/ranks/latest/attempt_0/1/stderr.log").is_file()
    assert "nothing was compiled" not in said.out
    monkeypatch.setattr("moe_compile.commands.train.run", lambda *_: 130)
    assert main(["train", str(tmp_path / "job.toml")]) == 130
    assert "the job was ended by SIGINT" in capsys.readouterr().err.splitlines()[-1]


def test_a_run_that_lacks_memory_names_the_keys_to_lower(tmp_path, capsys, monkeypatch):
    """Also where the backward lacks it, whose error no code of the backend sees."""
    pytest.importorskip("torchtitan", reason="pip install megamoe[titan]")
    error = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB"
    monkeypatch.setattr("moe_compile.commands.train.run", failing(error))
    monkeypatch.chdir(tmp_path)
    job = str(write(tmp_path, RIGHT))
    assert main(["train", job, "--megamoe.max_memory_increase", "0.1"]) == 1
    said, ours, of_job, last = capsys.readouterr().err.splitlines()[-4:]
    assert said == f"megamoe: rank 1: {error}"
    assert "max_memory_increase = 0.1 lets the schedule use that share more" in ours
    assert "training.local_batch_size" in of_job and last.startswith("megamoe: the job failed")
    assert main(["train", job, "--compile.backend", "inductor"]) == 1
    assert "max_memory_increase" not in capsys.readouterr().err


def test_a_folder_for_compiled_code_that_cannot_be_written_is_named(checked, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/proc/code")
    assert "TORCHINDUCTOR_CACHE_DIR = '/proc/code' cannot be written" in checked(RIGHT)


def test_a_run_that_filled_its_disk_says_so_and_shows_no_tables(tmp_path, capsys, monkeypatch):
    """The tables followed as if all were well, and "No space" was cut off in the ranks' output."""
    pytest.importorskip("torchtitan", reason="pip install megamoe[titan]")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)

    def fill(command, show, settings):
        write_report()
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 15, limits[1]))
        return 1

    monkeypatch.setattr("moe_compile.commands.train.run", fill)
    try:
        assert main(["train", str(write(tmp_path, RIGHT))]) == 1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    said = capsys.readouterr()
    disk, _ = said.err.splitlines()[-2:]
    assert "job.dump_folder = 'outputs' cannot be written: " in disk
    assert "no file can be written in" in disk and "(File too large)" in disk
    assert said.out.splitlines() == [
        "megamoe: the report on what was compiled before the job failed, as JSON: "
        "outputs/report.json"
    ]


def write_report():
    path = Path("outputs/report.json")
    path.parent.mkdir(exist_ok=True)
    warning = "megamoe: the exchange at a.py:3"
    path.write_text(json.dumps(report_of([], [], hardware="cpu", warnings=(warning,))))


def test_each_run_keeps_its_own_report(tmp_path, capsys, monkeypatch):
    """Two runs in one folder had one, of the second."""
    pytest.importorskip("torchtitan", reason="pip install megamoe[titan]")
    monkeypatch.chdir(tmp_path)
    runs = iter(("first", "second"))

    def train(command, show, settings):
        log = Path("outputs/ranks") / next(runs) / "attempt_0/0/stderr.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        write_report()
        show(["a line\n"])
        return 0

    monkeypatch.setattr("moe_compile.commands.train.run", train)
    for name in ("first", "second"):
        assert main(["train", str(write(tmp_path, RIGHT))]) == 0
        assert Path("outputs/ranks/latest").resolve().name == name
        assert Path("outputs/ranks", name, "report.json").is_file()


def test_a_second_run_in_the_folder_of_one_under_way_is_refused(tmp_path, capsys, monkeypatch):
    """Both wrote one report, and each showed what the other had written last."""
    pytest.importorskip("torchtitan", reason="pip install megamoe[titan]")
    monkeypatch.chdir(tmp_path)
    job, elsewhere = str(write(tmp_path, RIGHT)), ["--job.dump_folder", "outputs-2"]
    seconds = iter(([], elsewhere))

    def train(command, show, settings):
        if (flags := next(seconds, None)) is not None:
            statuses.append(main(["train", job, *flags]))
        return 0

    for flags in ([], elsewhere):
        statuses = []
        monkeypatch.setattr("moe_compile.commands.train.run", train)
        assert main(["train", job]) == 0
        said = f"'outputs' is in use by another run (process {os.getpid()})"
        assert statuses == [0 if flags else 2]
        assert (said in capsys.readouterr().err) is not bool(flags)


def test_a_run_without_megamoe_says_so_in_its_last_line(tmp_path, capsys, monkeypatch):
    """Jobs trained to their end without a word."""
    pytest.importorskip("torchtitan", reason="pip install megamoe[titan]")
    monkeypatch.chdir(tmp_path)
    compiling = "[rank0]:[titan] 2026-11-26 10:00:00,000 - root - INFO - compiling block 1 of 3"
    for started, last in (
        (lambda *_: 0, "nothing was compiled by megamoe: no block of the model ran"),
        (lambda _, show, __: show([compiling]) or 0, "the report was not written to outputs/"),
        (lambda *_: write_report() or 0, "nothing was rewritten: the exchange at a.py:3"),
    ):
        monkeypatch.setattr("moe_compile.commands.train.run", started)
        assert main(["train", str(write(tmp_path, RIGHT))]) == 0
        assert last in capsys.readouterr().err.splitlines()[-1]


def test_a_recipe_is_found_by_its_name_and_an_unknown_one_lists_them(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert find_job("deepseek_v3_debug_cpu").samefile(find_job("deepseek_v3_debug_cpu.toml"))
    Path("deepseek_v3_debug_cpu").write_text("")
    assert find_job("deepseek_v3_debug_cpu") == Path("deepseek_v3_debug_cpu")
    assert main(["train", "deepseek_v3_debug"]) == 2
    said = capsys.readouterr().err
    assert "Did you mean 'deepseek_v3_debug_cpu'?" in said and "mixtral_8x7b_16gpu" in said


def test_flags_of_ours_are_offered_by_their_names():
    (commands,) = (action for action in new_parser()._actions if action.choices)
    assert {*OUR_FLAGS} == {*commands.choices["train"]._option_string_actions} - {"-h", "--help"}


def test_the_command_alone_prints_help_and_its_version(capsys):
    assert main([]) == 0
    assert "train" in capsys.readouterr().out
    with pytest.raises(SystemExit) as end:
        main(["--version"])
    assert end.value.code == 0
    assert re.fullmatch(r"megamoe \S.*\n", capsys.readouterr().out)


def test_torchtitans_keys_are_all_found_with_their_kinds():
    """What is read off the sources is what torchtitan's own classes say."""
    pytest.importorskip("torchtitan", reason="pip install megamoe[titan]")
    keys = keys_of_jobs("torchtitan_integration.job_config")
    assert keys["training.steps"] == ("int",)
    assert keys["training.dataset_path"] == ("str", "None")
    assert keys["compile.enable"] == ("bool",)
    assert keys["megamoe.chunks"] == ("int", "str")
    assert len(keys) > 150
    assert "debug_cpu" in own_flavors("deepseek_v3") and "20b" not in own_flavors("gpt_oss")


def test_what_ranks_printed_is_kept_of_a_few_runs(tmp_path):
    for number in range(7):
        (tmp_path / f"run{number}" / "attempt_0" / "0").mkdir(parents=True)
        os.utime(tmp_path / f"run{number}", (number, number))
    (tmp_path / "mine").mkdir()
    (tmp_path / "latest").symlink_to("run6")
    drop_old(tmp_path)
    assert (tmp_path / "latest" / "attempt_0").is_dir()
    (tmp_path / "latest").unlink()
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "mine",
        "run3",
        "run4",
        "run5",
        "run6",
    ]
