#!/usr/bin/env bash
# Start a job on this node, one of NNODES; run it on every node.
#
#   NNODES=2 NODE_RANK=0 MASTER_ADDR=node0 torchrun.sh CONFIG.toml [--section.key value ...]
#
# NPROC (8) GPUs per node, MASTER_PORT (29500). DRY=1 prints the command and starts nothing.
set -euo pipefail

if [[ $# -lt 1 || $1 == -h || $1 == --help ]]; then
    sed -n '2,7p' "$0" | cut -c3-
    exit 2
fi
config=$1
shift

if [[ ! -r $config ]]; then
    echo "torchrun.sh: $config: no such file" >&2
    exit 2
fi

export OMP_NUM_THREADS=${OMP_NUM_THREADS:-8}
# as `megamoe train` sets them; docs/first-run.md has why
export CUDA_DEVICE_MAX_CONNECTIONS=${CUDA_DEVICE_MAX_CONNECTIONS:-32}
export TORCH_NCCL_HIGH_PRIORITY=${TORCH_NCCL_HIGH_PRIORITY:-1}
if [[ -z ${PYTORCH_ALLOC_CONF:-} ]]; then
    export PYTORCH_CUDA_ALLOC_CONF=${PYTORCH_CUDA_ALLOC_CONF:-expandable_segments:True}
fi
ulimit -S -n "$(ulimit -H -n)"

# shown is each node's first rank: the loss is among them where a pipeline stage is whole nodes
command=(
    torchrun
    --nnodes "${NNODES:-1}"
    --node-rank "${NODE_RANK:-0}"
    --nproc-per-node "${NPROC:-8}"
    --rdzv-backend c10d
    --rdzv-id "${JOB_ID:-megamoe}"
    --rdzv-endpoint "${MASTER_ADDR:-localhost}:${MASTER_PORT:-29500}"
    --local-ranks-filter 0
    --role rank
    --tee 3
    -m torchtitan_integration.train
    --job.config_file "$config"
    "$@"
)

if [[ ${DRY:-0} == 1 ]]; then
    printf '%q ' "${command[@]}"
    echo
    exit 0
fi
exec "${command[@]}"
