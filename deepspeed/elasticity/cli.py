# SPDX-License-Identifier: Apache-2.0
"""``ds_elastic``: what the section ``elasticity`` of a config means."""

import argparse
import json
import sys

from deepspeed.elasticity.config import ElasticityConfig
from deepspeed.elasticity.constants import ELASTICITY
from deepspeed.elasticity.elasticity import compute_elastic_config
from deepspeed.git_version_info import version
from deepspeed.runtime.config import load_config
from deepspeed.runtime.config_utils import DeepSpeedConfigError, read_section


def parse_args(args: list[str] | None = None) -> argparse.Namespace:
    """Parses the command line (``sys.argv`` when ``args`` is None)."""
    parser = argparse.ArgumentParser(
        prog="ds_elastic", description="shows the elastic batch size of a config and the numbers of GPUs that fit it"
    )
    parser.add_argument("-c", "--config", type=str, required=True, help="config file")
    parser.add_argument("-w", "--world-size", type=int, default=0, help="number of GPUs to check")
    return parser.parse_args(args)


def main(args: list[str] | None = None) -> None:
    """Prints the section, the train batch size, the fitting numbers of GPUs and, for a world size, the rest.

    Raises:
        SystemExit: the config cannot be read, or the world size does not fit.
    """
    parsed = parse_args(args)
    try:
        config = load_config(parsed.config)
        batch_size, gpus, micro = compute_elastic_config(config, version, parsed.world_size, return_microbatch=True)
        section = read_section(config, ELASTICITY)
    except (DeepSpeedConfigError, ValueError) as error:
        sys.exit(f"ds_elastic: {error}")
    print(json.dumps({ELASTICITY: section}, indent=2))
    print(f"train batch size: {batch_size}")
    print(f"numbers of GPUs ({len(gpus)}): {', '.join(map(str, gpus))}")
    if parsed.world_size:
        elastic = ElasticityConfig(section)
        ranks = parsed.world_size // (elastic.model_parallel_size if elastic.version >= 0.2 else 1)
        print(f"on {parsed.world_size} GPUs: micro batch {micro}, accumulation steps {batch_size // micro // ranks}")


if __name__ == "__main__":
    main()
