# SPDX-License-Identifier: Apache-2.0
"""Communication façade: ``from deepspeed import comm as dist``."""

from deepspeed.accelerator import get_accelerator as get_accelerator
from deepspeed.utils.comms_logging import get_caller_func as get_caller_func

from . import torch as torch
from .comm import *  # noqa: F403
from .utils import get_debug_log_name as get_debug_log_name
from .utils import get_default_args as get_default_args
from .utils import get_local_rank_from_launcher as get_local_rank_from_launcher
from .utils import get_msg_size_from_args as get_msg_size_from_args
from .utils import get_tensor_kwarg as get_tensor_kwarg
from .utils import get_tensor_position as get_tensor_position
from .utils import get_world_rank_from_launcher as get_world_rank_from_launcher
from .utils import get_world_size_from_launcher as get_world_size_from_launcher
from .watchdog import CollectiveError as CollectiveError
from .watchdog import CollectiveTimeoutError as CollectiveTimeoutError
