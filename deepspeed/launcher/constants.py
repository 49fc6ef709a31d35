# SPDX-License-Identifier: Apache-2.0
"""Names of the launcher backends and their fixed settings."""

PDSH_LAUNCHER = "pdsh"
PDSH_MAX_FAN_OUT = 1024

OPENMPI_LAUNCHER = "openmpi"
MPICH_LAUNCHER = "mpich"
IMPI_LAUNCHER = "impi"
SLURM_LAUNCHER = "slurm"
SSH_LAUNCHER = "ssh"

MVAPICH_LAUNCHER = "mvapich"
MVAPICH_TMP_HOSTFILE = "/tmp/deepspeed_mvapich_hostfile"

# Not a value of --launcher: torchrun's agent, under which elastic ranks run.
TORCHRUN_LAUNCHER = "torchrun"
