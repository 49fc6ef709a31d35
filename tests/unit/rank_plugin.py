# SPDX-License-Identifier: Apache-2.0
"""The pytest plugin of the test tree: runs DistributedTest classes in ranks and holds markers and shared fixtures."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from unit.common import DistributedTest, RankPools, add_fixture_functions, run_test, world_sizes_of
from unit.rank_group import close_server

pytest.register_assert_rewrite("unit.util", "unit.simple_model", "unit.reference")

_pools = RankPools()

MARKERS = (
    "world_size(n, ...): number of ranks of a test of a DistributedTest class, instead of the class's; several run "
    "the test once for each",
    "cuda: needs a CUDA device; skipped where there is none",
)


class Module(pytest.Module):
    """A test module whose DistributedFixture classes are fixtures."""

    def collect(self) -> Any:
        add_fixture_functions(self.obj)
        return super().collect()


def pytest_configure(config: pytest.Config) -> None:
    for marker in MARKERS:
        config.addinivalue_line("markers", marker)


@pytest.hookimpl(tryfirst=True)
def pytest_plugin_registered(plugin: object) -> None:
    # A conftest is registered as a plugin and is not collected as a module.
    if Path(getattr(plugin, "__file__", None) or "").name == "conftest.py":
        add_fixture_functions(plugin)


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> Module:
    return Module.from_parent(parent, path=module_path)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    owner = metafunc.cls
    if owner is None or not issubclass(owner, DistributedTest):
        return
    sizes = world_sizes_of(owner, metafunc.definition.get_closest_marker("world_size"))
    if not isinstance(sizes, int):
        names = [f"world{size}" for size in sizes]
        metafunc.parametrize("_parametrized_world_size", sizes, indirect=True, ids=names)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("cuda") is not None:
        import torch

        if not torch.cuda.is_available():
            pytest.skip("needs a CUDA device")


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    owner = pyfuncitem.cls
    if owner is None or not issubclass(owner, DistributedTest):
        return None
    run_test(pyfuncitem, _pools)
    return True


def pytest_sessionfinish() -> None:
    try:
        _pools.close()
    finally:
        close_server()


@pytest.fixture(scope="class")
def class_tmpdir(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder shared by the tests and DistributedFixtures of one class."""
    yield tmp_path_factory.mktemp(request.node.name, numbered=True)
