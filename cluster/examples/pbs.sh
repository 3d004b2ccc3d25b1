#!/bin/bash
# many_nodes.sbatch for PBS (OpenPBS, PBS Pro). An example: it was not run here, for want of a PBS.
#
#   qsub -V -v PROGRAM='cluster/exercises/06_ddp.py --turns 3' cluster/examples/pbs.sh
#
# qsub hands a script no arguments, so the program comes in a variable; -V brings along the
# environment that is active where you type it. Two chunks with two GPUs each, one launcher in
# each (mpiprocs), every chunk on a node of its own (scatter):
#PBS -N many_nodes
#PBS -l select=2:ncpus=4:ngpus=2:mpiprocs=1
#PBS -l place=scatter
# hours:minutes:seconds
#PBS -l walltime=00:30:00
# errors go where the output goes
#PBS -j oe

set -euo pipefail # end at the first command that fails, also within a pipe

cd "$PBS_O_WORKDIR" # PBS begins in the home folder, not where qsub was typed

# A rank a GPU: as many as ngpus says above.
ranks=${RANKS_PER_NODE:-2}
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" # threads of each rank

# The file names a node for each launcher: one line a node.
nodes=$(sort -u "$PBS_NODEFILE" | wc -l)
head=$(head -n 1 "$PBS_NODEFILE")
number=${PBS_JOBID%%[!0-9]*} # 1234 of 1234.server
port=$((20000 + number % 12000))

# xargs reads quotes as a shell does, but runs nothing. An open quote ends the job here.
lines=$(printf '%s' "${PROGRAM:?need qsub -v PROGRAM=...}" | xargs -n 1 printf '%s\n')
mapfile -t words <<< "$lines" # a word a line

# mpiexec is PBS's srun: it starts one torchrun on each node.
mpiexec -n "$nodes" torchrun \
  --nnodes="$nodes" --nproc-per-node="$ranks" \
  --rdzv-backend=c10d --rdzv-endpoint="$head:$port" --rdzv-id="$number" \
  "${words[@]}"
