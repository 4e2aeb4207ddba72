#!/bin/bash
# A job for SLURM that trains on several machines and goes on by itself when its time is over or it is preempted.
#
#   sbatch docs/slurm.sh experiment=enwik8_base data.path=enwik8.zip run_dir=runs/mine
#
# Everything after the script's name is given to `txl fit`; run_dir must be among it, on a file system that all machines
# share, because the job goes on in it. strategy=ddp unless another one is given. Set the sizes below to those of your
# cluster, and --account or --partition if it asks for them.
#
# SLURM sends SIGUSR1 to every rank 300 s before the time limit (--signal; it must be longer than a step and the writing
# of a checkpoint), and SIGTERM at a preemption. txl then finishes the step, saves and ends with exit code 75. This
# script puts the job back into the queue after that, and there resume=auto goes on in run_dir exactly where it stopped.
# After any other end it leaves the queue, with the exit code of txl.

#SBATCH --job-name=txl
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --time=24:00:00
#SBATCH --signal=USR1@300
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log

set -u

case " $* " in
  *" run_dir="*) ;;
  *) echo "error: give run_dir=PATH: the job goes on in that folder" >&2; exit 2 ;;
esac

# srun starts one rank per task; Lightning reads from SLURM's variables which one it is and where the first one listens.
# --wait: once a rank has ended the others have two minutes, then srun ends them
srun --wait=120 txl fit strategy=ddp "$@" resume=auto \
  trainer.num_nodes="$SLURM_JOB_NUM_NODES" \
  trainer.devices="${SLURM_NTASKS_PER_NODE:-1}" &
ranks=$!

# a preemption may signal this shell too: it hands the signal on and lives until the ranks have saved
trap 'signalled=yes; kill -TERM "$ranks" 2>/dev/null' TERM USR1
while
  signalled=
  wait "$ranks"
  code=$?
  [ -n "$signalled" ] # then it was the signal that ended the wait
do :; done

if [ "$code" -eq 75 ]; then
  echo "stopped after saving; back into the queue (restart ${SLURM_RESTART_COUNT:-0})"
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
