"""The check on several GPUs, of one machine or of two, no section in more than eight minutes.

    python -m benchmarks.node --out FOLDER
    torchrun --nnodes 2 --nproc-per-node 8 ... -m benchmarks.node --out FOLDER

It needs what `benchmarks.gpu` needs, and two to eight GPUs. Run by itself it starts a rank for each
GPU of the machine (`--ranks`); each process of a torchrun job is one rank. FOLDER, that of the
first rank, gets `summary.json`, and per section `NAME.json` and a log of each rank.

    beside     GEMM and grouped GEMM with and without an exchange beside them, at several numbers
               of CTAs: by how much each slows the other
    links      collectives by message size, within a machine and among all
    hidden     a layer in one chunk, chunks, two hops, parts: exposed and hidden time by the
               profiler beside the prediction, and steps against Inductor with its reordering
    bits       a program for every rewrite and option against eager, bit for bit; chunks and ranks
               without rows among them, in memory that held NaN
    recipes    training jobs of small models, compiled and as they are written: losses and norms

Of `links` and `beside` it writes `measured.toml`, a hardware profile.

Contract
    Each rank of a section is a process of its own, which ends in the section's time. Ranks that
    fail, hang or die leave what they had measured; new ones go on behind the item that did it.
    The exit code is 0 when every section asked for ran and had no failure.
    The same command again goes on: what passed on this machine, torch and code is not run again.
    The table at the end says which bars hold, which are missed, which are open.

`--device cpu --ranks 2` runs all of it at tiny sizes over gloo: a test of this program, no
measurement.
"""
