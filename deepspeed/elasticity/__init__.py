# SPDX-License-Identifier: Apache-2.0
"""Batch sizes that fit several world sizes (config section ``elasticity``)."""

from .config import ElasticityConfig as ElasticityConfig
from .config import ElasticityConfigError as ElasticityConfigError
from .config import ElasticityError as ElasticityError
from .config import ElasticityIncompatibleWorldSize as ElasticityIncompatibleWorldSize
from .elasticity import compute_elastic_config as compute_elastic_config
from .elasticity import elasticity_enabled as elasticity_enabled
from .elasticity import ensure_immutable_elastic_config as ensure_immutable_elastic_config
