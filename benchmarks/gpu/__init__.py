"""The check on one GPU, one command that fits in 25 minutes, no section in more than eight.

    python -m benchmarks.gpu --out FOLDER

It needs one CUDA device, torch, triton, pytest, hypothesis, rich and nvidia-ml-py, and no network;
run it from a checkout. FOLDER gets `summary.json`, and per section `NAME.json` and `NAME.log`:

    kernels    quantized rows: equal to plain PyTorch, and time against a copy of the same bytes
    slices     grouped products of some experts against those of all, bit for bit; and of groups
               without rows, in memory that held NaN
    layer      a MoE layer by NCCL among one rank: errors against float64, order of generated code
    trace      the same layer under torch's profiler: copies to the host, kernels of chunks
    link       the same layer over an emulated link: time of Inductor's and of our overlap
    tests      unit tests on this machine's torch, and the tests that need a GPU

Contract
    A section is a process of its own and ends in its own time; one that fails, hangs or kills
    its CUDA context leaves what it had measured, and the others run.
    The exit code is 0 when every section asked for ran and had no failure. What no longer fits in
    the time is in the results as skipped; `--sections link` runs one section alone.
    The same command again, `--budget-s 500` say, goes on: what passed on this GPU, torch and code
    is not run again. The table at the end says which bars hold, which are missed, which are open.

`--device cpu` runs everything at tiny sizes without a GPU: a test of this program, no measurement.
One GPU has nobody to talk to: no figure from here is one of several GPUs, and times over the link
are emulated.
"""
