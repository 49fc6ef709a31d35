# SPDX-License-Identifier: Apache-2.0
"""Names of the config section ``elasticity`` and its defaults."""

ELASTICITY = "elasticity"

ENABLED = "enabled"
ENABLED_DEFAULT = False
# Largest train batch size that may be chosen, samples.
MAX_ACCEPTABLE_BATCH_SIZE = "max_train_batch_size"
MAX_ACCEPTABLE_BATCH_SIZE_DEFAULT = 2000
# Micro batch sizes that fit on a device, samples per rank and micro-step.
MICRO_BATCHES = "micro_batch_sizes"
MICRO_BATCHES_DEFAULT = [2, 4, 6]
MIN_GPUS = "min_gpus"
MIN_GPUS_DEFAULT = 1
MAX_GPUS = "max_gpus"
MAX_GPUS_DEFAULT = 10000
NUM_GPUS_PER_NODE = "num_gpus_per_node"
NUM_GPUS_PER_NODE_DEFAULT = 1
MODEL_PARALLEL_SIZE = "model_parallel_size"
MODEL_PARALLEL_SIZE_DEFAULT = 1
# Minutes for which a scheduler leaves the world size alone; only passed on.
MIN_TIME = "min_time"
MIN_TIME_DEFAULT = 0
PREFER_LARGER_BATCH = "prefer_larger_batch"
PREFER_LARGER_BATCH_DEFAULT = True
# Batch keys beside the section are ignored instead of refused.
IGNORE_NON_ELASTIC_BATCH_INFO = "ignore_non_elastic_batch_info"
IGNORE_NON_ELASTIC_BATCH_INFO_DEFAULT = False
VERSION = "version"
LATEST_ELASTICITY_VERSION = 0.2
VERSION_DEFAULT = LATEST_ELASTICITY_VERSION

# Environment variable in which a scheduler leaves the section that it reckons with, as JSON.
DEEPSPEED_ELASTICITY_CONFIG = "DEEPSPEED_ELASTICITY_CONFIG"
# First release that knew the section.
MINIMUM_DEEPSPEED_VERSION = "0.3.8"
