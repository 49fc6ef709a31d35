# SPDX-License-Identifier: Apache-2.0
"""Reading and writing the files of checkpoints."""
