# SPDX-License-Identifier: Apache-2.0
"""``ds_nvme_tune``: searches the settings of the async IO kernels, which are not built."""

import sys
from typing import NoReturn

_NOT_BUILT = "tuning the config section 'aio' needs the async IO kernels (op async_io), which are not built"


def sweep_main() -> NoReturn:
    """Not built.

    Raises:
        NotImplementedError: always.
    """
    raise NotImplementedError(_NOT_BUILT)


def generate_main() -> NoReturn:
    """Not built.

    Raises:
        NotImplementedError: always.
    """
    raise NotImplementedError(_NOT_BUILT)


def main() -> NoReturn:
    """Entry point of the ``ds_nvme_tune`` command.

    Raises:
        SystemExit: always, with the reason.
    """
    sys.exit(f"ds_nvme_tune: {_NOT_BUILT}; ds_io measures with plain file IO")
