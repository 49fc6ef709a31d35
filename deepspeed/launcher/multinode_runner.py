# SPDX-License-Identifier: Apache-2.0
"""Commands that start ranks on several hosts, one class per launcher backend.

Every ``get_cmd`` returns an argument list that is executed without a shell; only pdsh hands its last part to a shell,
on the remote hosts, so only there values are quoted.
"""

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping

from . import ssh_hosts
from .constants import (
    IMPI_LAUNCHER,
    MPICH_LAUNCHER,
    MVAPICH_LAUNCHER,
    MVAPICH_TMP_HOSTFILE,
    OPENMPI_LAUNCHER,
    PDSH_LAUNCHER,
    PDSH_MAX_FAN_OUT,
    SLURM_LAUNCHER,
    SSH_LAUNCHER,
)
from .launch import helper_flags, per_node_flags, script_command

# Not re.escape: pkill takes POSIX regular expressions, which know no backslash before an ordinary character.
_ERE_SPECIAL = re.compile(r"[.^$*+?()\[\]{}|\\]")
_SHELL_SPECIAL = re.compile(r"[^\w@%+=:,./-]")


def _double_quoted(value: str) -> str:
    """``value`` for a remote shell: unchanged if nothing in it is special, else in double quotes."""
    if value and not _SHELL_SPECIAL.search(value):
        return value
    return '"' + re.sub(r'([\\"$`])', r"\\\1", value) + '"'


def _for_remote_shell(word: str) -> str:
    """``word`` as a remote shell takes it for one word, and pdsh for no placeholder."""
    return shlex.quote(word).replace("%", "%%")


class MultiNodeRunner(ABC):
    """Builds the command of one launcher backend.

    Args:
        args: parsed command line of the runner.
        world_info_base64: slots of each host, as the per-node launch step takes them.

    Raises:
        ValueError: the backend cannot do what the command line asks for.
    """

    def __init__(self, args: argparse.Namespace, world_info_base64: str) -> None:
        self.args = args
        self.world_info_base64 = world_info_base64
        self.exports: dict[str, str] = {}
        self.validate_args()
        self.user_arguments = self.parse_user_args()
        self.user_script = args.user_script

    @abstractmethod
    def backend_exists(self) -> bool:
        """Whether the backend is installed on this host."""

    @abstractmethod
    def get_cmd(self, environment: dict[str, str], active_resources: Mapping[str, list[int]]) -> list[str]:
        """The command to execute; what it needs in its own environment is added to ``environment``."""

    # Whether the ranks run below the per-node launch step, which has more to offer than an MPI launcher.
    starts_launch_step = False

    @property
    def name(self) -> str:
        """Name of the backend as in ``--launcher``."""
        raise NotImplementedError(f"{type(self).__name__} has no name")

    def add_export(self, key: str, var: str) -> None:
        """Adds an environment variable for all ranks; quoting is up to ``get_cmd``."""
        self.exports[key.strip()] = var.strip()

    def parse_user_args(self) -> list[str]:
        """Arguments of the user's script as the backend passes them on."""
        return list(self.args.user_args)

    def validate_args(self) -> None:
        """Raises ValueError for arguments that the backend does not take."""

    @classmethod
    def validate_active_resources(cls, active_resources: Mapping[str, list[int]]) -> None:
        """Raises ValueError for hosts and slots that the backend cannot use."""

    def kill_command(self, active_resources: Mapping[str, list[int]]) -> list[str]:
        """What ends the ranks on remote hosts when the launcher is told to end; empty: the backend does that itself."""
        return []

    def _script_command(self) -> list[str]:
        """Interpreter, script and arguments of one rank."""
        return script_command(self.user_script, self.user_arguments, self.args.module, self.args.no_python)

    def _helper_command(self) -> list[str]:
        """One rank started through launcher_helper, which takes its rank from the launcher's environment."""
        command = [sys.executable, "-u", "-m", "deepspeed.launcher.launcher_helper", "--launcher", self.name]
        return [*command, *helper_flags(self.args), self.user_script, *self.user_arguments]

    def _helper_command_if_needed(self) -> list[str]:
        """One rank; through launcher_helper only for what an MPI launcher does not do."""
        needed = self.args.bind_cores_to_rank or self.args.enable_each_rank_log != "None"
        return self._helper_command() if needed else self._script_command()

    def _export_world(self, total: int, per_host: int) -> None:
        """What all ranks have in common, for launchers that only tell a process its rank."""
        self.add_export("MASTER_ADDR", str(self.args.master_addr))
        self.add_export("MASTER_PORT", str(self.args.master_port))
        self.add_export("WORLD_SIZE", str(total))
        self.add_export("LOCAL_SIZE", str(per_host))

    def _launcher_args(self) -> list[str]:
        return shlex.split(self.args.launcher_args)


class PDSHRunner(MultiNodeRunner):
    """pdsh over ssh: one per-node launch step on each host."""

    starts_launch_step = True

    def backend_exists(self) -> bool:
        return shutil.which("pdsh") is not None

    @property
    def name(self) -> str:
        return PDSH_LAUNCHER

    def parse_user_args(self) -> list[str]:
        # pdsh replaces %n and the like in the whole command, a remote shell splits it.
        return [_for_remote_shell(arg) for arg in self.args.user_args]

    def get_cmd(self, environment: dict[str, str], active_resources: Mapping[str, list[int]]) -> list[str]:
        environment["PDSH_RCMD_TYPE"] = "ssh"
        if self.args.ssh_port is not None:
            extra = environment.get("PDSH_SSH_ARGS_APPEND", "")
            environment["PDSH_SSH_ARGS_APPEND"] = f"{extra} -p {self.args.ssh_port}".strip()
        return [*self._remote_shell(active_resources), *self._launcher_args(), *self._launch_step()]

    def kill_command(self, active_resources: Mapping[str, list[int]]) -> list[str]:
        # ssh leaves remote processes running. The start of the command line tells the launch step from the shells, the
        # ssh clients and this very command, in which it stands further behind; world info and port name the job.
        step = f"{sys.executable} -u -m deepspeed.launcher.launch --world_info={self.world_info_base64}"
        pattern = "^" + _ERE_SPECIAL.sub(r"\\\g<0>", step) + f" .*--master_port={self.args.master_port} "
        return [*self._remote_shell(active_resources), f"pkill -TERM -f {_for_remote_shell(pattern)}"]

    def _remote_shell(self, active_resources: Mapping[str, list[int]]) -> list[str]:
        """What runs the words after it on all hosts, through a shell, with %n replaced by the host's index."""
        return ["pdsh", "-S", "-f", str(PDSH_MAX_FAN_OUT), "-w", ",".join(active_resources)]

    def _launch_step(self) -> list[str]:
        exports = [f"export {key}={_double_quoted(value)};".replace("%", "%%") for key, value in self.exports.items()]
        activate = [] if self.args.venv_script is None else [f". {_for_remote_shell(self.args.venv_script)};"]
        launch = [_for_remote_shell(sys.executable), "-u", "-m", "deepspeed.launcher.launch"]
        launch += [f"--world_info={self.world_info_base64}", "--node_rank=%n"]
        launch += [f"--master_addr={self.args.master_addr}", f"--master_port={self.args.master_port}"]
        launch += [_for_remote_shell(flag) for flag in per_node_flags(self.args)]
        if self.args.save_pid:
            launch.append(f"--save_pid={os.getpid()}")
        here = f"cd {_for_remote_shell(os.path.abspath('.'))};"
        return [*exports, here, *activate, *launch, _for_remote_shell(self.user_script), *self.user_arguments]


class SSHRunner(PDSHRunner):
    """Plain ssh, one client per host, where pdsh is not installed."""

    def backend_exists(self) -> bool:
        return shutil.which("ssh") is not None

    @property
    def name(self) -> str:
        return SSH_LAUNCHER

    def get_cmd(self, environment: dict[str, str], active_resources: Mapping[str, list[int]]) -> list[str]:
        return [*self._remote_shell(active_resources), *self._launch_step()]

    def _remote_shell(self, active_resources: Mapping[str, list[int]]) -> list[str]:
        command = [sys.executable, "-u", os.path.abspath(ssh_hosts.__file__), f"--hosts={','.join(active_resources)}"]
        if self.args.ssh_port is not None:
            command.append(f"--ssh_port={self.args.ssh_port}")
        return [*command, *(f"--ssh_args={arg}" for arg in self._launcher_args()), "--"]


class _MPIRunner(MultiNodeRunner):
    """What the mpirun backends share: the whole hostfile is used, and each host gets its slots from there."""

    needs_equal_slots = True

    def __init__(self, args: argparse.Namespace, world_info_base64: str, resource_pool: Mapping[str, int]) -> None:
        self.resource_pool = resource_pool
        super().__init__(args, world_info_base64)

    def validate_args(self) -> None:
        if self.args.include or self.args.exclude:
            raise ValueError(f"launcher {self.name} takes no --include or --exclude: write the hostfile accordingly")
        if self.args.num_nodes != -1 or self.args.num_gpus != -1:
            raise ValueError(f"launcher {self.name} takes no --num_nodes or --num_gpus: write the hostfile accordingly")
        if self.needs_equal_slots and len(set(self.resource_pool.values())) > 1:
            raise ValueError(
                f"launcher {self.name} needs equally many slots on every host, not {dict(self.resource_pool)}"
            )

    @property
    def _total(self) -> int:
        return sum(self.resource_pool.values())

    @property
    def _per_host(self) -> int:
        return next(iter(self.resource_pool.values()))


class OpenMPIRunner(_MPIRunner):
    """mpirun of Open MPI; ranks find their place in OMPI_COMM_WORLD_* variables."""

    needs_equal_slots = False

    def __init__(self, args: argparse.Namespace, world_info_base64: str, resource_pool: Mapping[str, int]) -> None:
        super().__init__(args, world_info_base64, resource_pool)
        self.add_export("UCX_TLS", "tcp")

    def backend_exists(self) -> bool:
        return shutil.which("ompi_info") is not None

    @property
    def name(self) -> str:
        return OPENMPI_LAUNCHER

    def get_cmd(self, environment: dict[str, str], active_resources: Mapping[str, list[int]]) -> list[str]:
        extra = self._launcher_args()
        command = ["mpirun", "-n", str(self._total), "-hostfile", self.args.hostfile, "--mca", "btl", "^openib"]
        if "btl_tcp_if_include" not in extra:
            command += ["--mca", "btl_tcp_if_include", "eth0"]
        command += extra
        # So that ranks on several hosts meet without mpi4py.
        self.add_export("MASTER_ADDR", str(self.args.master_addr))
        self.add_export("MASTER_PORT", str(self.args.master_port))
        for key, value in self.exports.items():
            command += ["-x", f"{key}={value}"]
        return command + self._helper_command_if_needed()


class MPICHRunner(_MPIRunner):
    """mpirun of MPICH (hydra); launcher_helper gives each rank its RANK and LOCAL_RANK."""

    def backend_exists(self) -> bool:
        return shutil.which("mpirun") is not None

    @property
    def name(self) -> str:
        return MPICH_LAUNCHER

    def get_cmd(self, environment: dict[str, str], active_resources: Mapping[str, list[int]]) -> list[str]:
        command = [
            "mpirun",
            "-n",
            str(self._total),
            "-ppn",
            str(self._per_host),
            "-hosts",
            ",".join(self.resource_pool),
        ]
        return [*command, *self._launcher_args(), *self._global_environment(), *self._helper_command()]

    def _global_environment(self) -> list[str]:
        self._export_world(self._total, self._per_host)
        return [part for key, value in self.exports.items() for part in ("-genv", key, value)]


class IMPIRunner(MPICHRunner):
    """mpirun of Intel MPI: every rank is an argument set of its own, with its RANK and LOCAL_RANK."""

    @property
    def name(self) -> str:
        return IMPI_LAUNCHER

    def get_cmd(self, environment: dict[str, str], active_resources: Mapping[str, list[int]]) -> list[str]:
        self.add_export("I_MPI_PIN", "0")
        command = ["mpirun", "-ppn", str(self._per_host), "-hosts", ",".join(self.resource_pool)]
        command += [*self._launcher_args(), *self._global_environment()]
        # The helper asks for the cores of the host that a rank runs on, which need not be like this one.
        rank_command = self._helper_command_if_needed()
        for rank in range(self._total):
            local_rank = rank % self._per_host
            command += [":"] if rank else []
            command += ["-n", "1", "-env", "RANK", str(rank), "-env", "LOCAL_RANK", str(local_rank)]
            command += rank_command
        return command


class SlurmRunner(MultiNodeRunner):
    """srun; launcher_helper gives each rank its RANK and LOCAL_RANK."""

    def __init__(self, args: argparse.Namespace, world_info_base64: str, resource_pool: Mapping[str, int]) -> None:
        super().__init__(args, world_info_base64)
        self.resource_pool = resource_pool

    def backend_exists(self) -> bool:
        return shutil.which("sinfo") is not None

    @property
    def name(self) -> str:
        return SLURM_LAUNCHER

    @classmethod
    def validate_active_resources(cls, active_resources: Mapping[str, list[int]]) -> None:
        """Slurm chooses devices itself, so slots can only say how many.

        Raises:
            ValueError: a host's slots are not 0..N-1, or hosts have different numbers of slots.
        """
        for host, slots in active_resources.items():
            if list(slots) != list(range(len(slots))):
                raise ValueError(f"launcher slurm needs slots 0..N-1 on every host, but {host!r} has {list(slots)}")
        if len({len(slots) for slots in active_resources.values()}) > 1:
            counts = {host: len(slots) for host, slots in active_resources.items()}
            raise ValueError(f"launcher slurm needs equally many slots on every host, not {counts}")

    def get_cmd(self, environment: dict[str, str], active_resources: Mapping[str, list[int]]) -> list[str]:
        self.validate_active_resources(active_resources)
        per_host = len(next(iter(active_resources.values())))
        total = per_host * len(active_resources)
        self._export_world(total, per_host)
        exported = ["ALL"]
        for key, value in self.exports.items():
            if "," in value:  # srun splits there; ALL passes it on from srun's own environment
                environment[key] = value
            else:
                exported.append(f"{key}={value}")
        # Without it srun may wait for the other tasks, which wait for the failed one.
        command = [
            "srun",
            "-n",
            str(total),
            "--kill-on-bad-exit=1",
            *self._launcher_args(),
            f"--export={','.join(exported)}",
        ]
        command += [f"--nodelist={','.join(active_resources)}", f"--nodes={len(active_resources)}"]
        command.append(f"--ntasks-per-node={per_host}")
        # Not asked of the accelerator here: a login node often has none although the compute nodes do.
        if environment.get("DS_ACCELERATOR") != "cpu":
            command.append(f"--gpus-per-node={per_host}")
        return command + self._helper_command()


class MVAPICHRunner(_MPIRunner):
    """mpirun of MVAPICH2-GDR; launcher_helper gives each rank its RANK and LOCAL_RANK."""

    def __init__(self, args: argparse.Namespace, world_info_base64: str, resource_pool: Mapping[str, int]) -> None:
        super().__init__(args, world_info_base64, resource_pool)
        self.add_export("MV2_USE_CUDA", "1")  # device buffers in MPI calls
        self.add_export("MV2_SUPPORT_DL", "1")  # MPI loaded into a Python process
        self.add_export("MV2_ENABLE_AFFINITY", "0")  # all threads of a rank on one core otherwise
        self.add_export("MV2_DEBUG_SHOW_BACKTRACE", "1")

    def backend_exists(self) -> bool:
        """Whether mpiname is there and names MVAPICH2-GDR, the only variant with device buffers."""
        if shutil.which("mpiname") is None:
            return False
        done = subprocess.run(["mpiname"], capture_output=True, text=True, check=False)
        return "MVAPICH2-GDR" in done.stdout

    @property
    def name(self) -> str:
        return MVAPICH_LAUNCHER

    def get_cmd(self, environment: dict[str, str], active_resources: Mapping[str, list[int]]) -> list[str]:
        self._write_hostfile()
        self._export_world(self._total, self._per_host)
        command = ["mpirun", "-np", str(self._total), "-ppn", str(self._per_host), "--hostfile", MVAPICH_TMP_HOSTFILE]
        command += self._launcher_args()
        for key, value in self.exports.items():
            command += ["-env", key, value]
        return command + self._helper_command()

    def _write_hostfile(self) -> None:
        if os.path.lexists(MVAPICH_TMP_HOSTFILE):
            os.remove(MVAPICH_TMP_HOSTFILE)
        with open(MVAPICH_TMP_HOSTFILE, "x", encoding="utf-8") as file:  # "x": never through somebody's link
            file.writelines(f"{host}\n" for host in self.resource_pool)
