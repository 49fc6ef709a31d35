# SPDX-License-Identifier: Apache-2.0
"""How ops are compiled, cached and shared: with a script for a compiler, and with the real one where there is one."""

import json
import logging
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from deepspeed.ops.adam import DeepSpeedCPUAdam
from deepspeed.ops.op_builder import CPUAdamBuilder, CUDAOpBuilder, OpBuilder, TransformerBuilder, builder
from deepspeed.ops.op_builder import compile as compiling
from deepspeed.ops.op_builder.all_ops import ALL_OPS
from deepspeed.ops.op_builder.compile import BuildError, BuildPlan, cached_build, find_cached
from deepspeed.ops.op_builder.cuda_arch import gencode_flags, parse_architectures

TIMEOUT_S = 60
ROOT = Path(__file__).parents[3]
WHY_NOT = CPUAdamBuilder().why_not()
needs_compiler = pytest.mark.skipif(WHY_NOT is not None, reason=f"ops cannot be compiled: {WHY_NOT}")

# "Compiles" by copying, and notes each call. Does what a file beside it says, if it is there.
COMPILER = """#!/bin/sh
here=$(dirname "$0")
echo "$@" >> "$here/calls"
if [ -e "$here/fail" ]; then echo "boom.cpp:1: error: $(cat "$here/fail")" >&2; exit 1; fi
if [ -e "$here/wait" ]; then echo $$ > "$here/waiting"; while [ -e "$here/wait" ]; do sleep 0.02; done; fi
if [ -e "$here/fail_after" ]; then echo "boom.cpp:1: error: $(cat "$here/fail_after")" >&2; exit 1; fi
while [ $# -gt 0 ]; do if [ "$1" = -o ]; then echo built > "$2"; fi; shift; done
"""

TINY_OP = """
#include <Python.h>
static PyObject* answer(PyObject*, PyObject*) { return PyLong_FromLong(ANSWER); }
static PyMethodDef methods[] = {{"answer", answer, METH_NOARGS, ""}, {nullptr, nullptr, 0, nullptr}};
static PyModuleDef definition = {PyModuleDef_HEAD_INIT, "tiny_op", "", 0, methods, nullptr, nullptr, nullptr, nullptr};
PyMODINIT_FUNC PyInit_tiny_op() { return PyModule_Create(&definition); }
"""


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test finds what another built, and none answers from what an earlier one found."""
    for name in ("CXX", "CFLAGS", "LDFLAGS", "TORCH_CUDA_ARCH_LIST", "CUDA_HOME", "RANK", builder.NATIVE_VARIABLE):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(compiling.tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr(builder, "_ANSWERS", {})


@pytest.fixture
def warnings() -> Iterator[list[str]]:
    """Messages that the package logs."""
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logger = logging.getLogger("DeepSpeed")
    logger.addHandler(handler)
    yield messages
    logger.removeHandler(handler)


class FakeCompiler:
    def __init__(self, folder: Path) -> None:
        self.folder = folder / "compiler"
        self.folder.mkdir()
        self.path = self.folder / "cxx"
        self.path.write_text(COMPILER)
        self.path.chmod(0o755)
        self.source = folder / "op.cpp"
        self.source.write_text("one")
        self.header = folder / "include" / "op.h"
        self.header.parent.mkdir()
        self.header.write_text("two")

    def calls(self) -> int:
        log = self.folder / "calls"
        return len(log.read_text().splitlines()) if log.exists() else 0

    def plan(self, **changes: object) -> BuildPlan:
        fields = {
            "name": "tiny_op",
            "sources": (str(self.source),),
            "include_paths": (str(self.header.parent),),
            "system_include_paths": (),
            "cxx": (str(self.path),),
            "nvcc": (),
            "cxx_flags": ("-O2",),
            "nvcc_flags": (),
            "link_flags": (),
            "identity": ("torch 2",),
        }
        return BuildPlan(**{**fields, **changes})


@pytest.fixture
def fake(tmp_path: Path) -> FakeCompiler:
    return FakeCompiler(tmp_path)


def in_process(plan: BuildPlan, results: "multiprocessing.Queue[str]") -> None:
    try:
        results.put(str(cached_build(plan)))
    except BuildError as error:
        results.put(f"BuildError {error}")


def start(plan: BuildPlan, count: int) -> tuple[list[multiprocessing.Process], "multiprocessing.Queue[str]"]:
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    processes = [context.Process(target=in_process, args=(plan, results)) for _ in range(count)]
    for process in processes:
        process.start()
    return processes, results


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not path.exists() or not path.read_text():
        assert time.monotonic() < deadline
        time.sleep(0.01)


# ---------------------------------------------------------------------- the cache


def test_built_once_and_found_again_until_something_changes(fake: FakeCompiler) -> None:
    plan = fake.plan()
    assert find_cached(plan) is None
    library = cached_build(plan)
    assert library.read_text() == "built\n" and library.name == "tiny_op" + sysconfig.get_config_var("EXT_SUFFIX")
    assert fake.calls() == 2  # compile and link
    assert cached_build(plan) == find_cached(plan) == library
    assert fake.calls() == 2
    others = {
        "flags": fake.plan(cxx_flags=("-O3",)),
        "torch": fake.plan(identity=("torch 3",)),
        "linker": fake.plan(link_flags=("-lm",)),
        "compiler": fake.plan(cxx=(str(fake.path), "-m64")),
    }
    for number, (what, other) in enumerate(others.items(), 2):
        assert find_cached(other) is None, what
        assert cached_build(other) != library
        assert fake.calls() == 2 * number
    assert find_cached(plan) == library  # the old one stays for those who need it
    for changed in (fake.source, fake.header):
        changed.write_text("changed")
        assert find_cached(plan) is None
        cached_build(plan)
    assert [path.name for path in library.parent.parent.iterdir() if path.name.startswith(".")] == []


def test_processes_that_start_together_build_once(fake: FakeCompiler) -> None:
    (fake.folder / "wait").touch()
    processes, results = start(fake.plan(), 3)
    wait_for(fake.folder / "waiting")
    time.sleep(0.2)  # for the others to reach the lock
    assert results.empty()
    (fake.folder / "wait").unlink()
    libraries = {results.get(timeout=TIMEOUT_S) for _ in processes}
    assert libraries == {str(find_cached(fake.plan()))} and fake.calls() == 2


def test_when_one_fails_those_who_waited_fail_with_it_and_later_ones_try_again(fake: FakeCompiler) -> None:
    for name in ("wait", "fail_after"):
        (fake.folder / name).write_text("no such thing")
    processes, results = start(fake.plan(), 3)
    wait_for(fake.folder / "waiting")
    time.sleep(0.5)  # for the others to reach the lock
    (fake.folder / "wait").unlink()
    answers = [results.get(timeout=TIMEOUT_S) for _ in processes]
    assert all("error: no such thing" in answer for answer in answers) and fake.calls() == 1
    (fake.folder / "fail_after").unlink()
    assert cached_build(fake.plan()).exists()


def test_a_build_that_was_killed_blocks_nobody(fake: FakeCompiler) -> None:
    (fake.folder / "wait").touch()
    (process,), _ = start(fake.plan(), 1)
    wait_for(fake.folder / "waiting")
    os.kill(process.pid, signal.SIGKILL)
    process.join(TIMEOUT_S)
    home = Path(os.environ["TORCH_EXTENSIONS_DIR"], "deepspeed_ops", "tiny_op")
    assert any(path.name.startswith(".") for path in home.iterdir())  # what it had begun
    # Its compiler is still there and must not hold anything either.
    fake.path.write_text(COMPILER.replace('"$here/wait"', '"$here/never"'))
    library = cached_build(fake.plan())
    assert library.read_text() == "built\n"
    assert not any(path.name.startswith(".") for path in home.iterdir())
    (fake.folder / "wait").unlink()


def test_a_failed_build_says_what_the_compiler_said(fake: FakeCompiler) -> None:
    (fake.folder / "fail").write_text("expected ';'")
    with pytest.raises(BuildError, match=r"op tiny_op: \S+cxx -O2 (.|\n)*status 1:\n(.|\n)*expected ';'"):
        cached_build(fake.plan())
    (fake.folder / "fail").unlink()
    assert cached_build(fake.plan()).exists()
    with pytest.raises(BuildError, match="/no/such/cxx cannot be run: No such file"):
        cached_build(fake.plan(cxx=("/no/such/cxx",)))


def test_a_cache_that_cannot_be_written_to(fake: FakeCompiler, tmp_path: Path) -> None:
    library = cached_build(fake.plan())
    before = Path.mkdir

    def mkdir(path: Path, *args: object, **kwargs: object) -> None:
        if str(path).startswith(str(tmp_path / "cache")):
            raise OSError(30, "Read-only file system")
        before(path, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "mkdir", mkdir)
        assert find_cached(fake.plan()) == library  # reading is enough for what is there
        other = cached_build(fake.plan(cxx_flags=("-O1",)))
        assert other.parts[: len(tmp_path.parts) + 1] == (tmp_path / f"deepspeed_ops_{os.getuid()}").parts
        assert find_cached(fake.plan(cxx_flags=("-O1",))) == other
        # A folder that others may write to is no place to load code from.
        (tmp_path / f"deepspeed_ops_{os.getuid()}").chmod(0o777)
        assert find_cached(fake.plan(cxx_flags=("-O1",))) is None
        with pytest.raises(BuildError, match="Read-only file system; .*another user.*TORCH_EXTENSIONS_DIR"):
            cached_build(fake.plan(cxx_flags=("-O1",)))


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert compiling.cache_folders()[0] == tmp_path / "cache" / "deepspeed_ops"
    monkeypatch.delenv("TORCH_EXTENSIONS_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert compiling.cache_folders()[0] == tmp_path / "xdg" / "deepspeed_ops"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert compiling.cache_folders()[0] == Path.home() / ".cache" / "deepspeed_ops"
    monkeypatch.setattr(compiling.os.path, "expanduser", lambda path: path)  # a user without a home
    assert compiling.cache_folders() == [tmp_path / f"deepspeed_ops_{os.getuid()}"]


# ---------------------------------------------------------------------- real builds


class TinyBuilder(OpBuilder):
    NAME = "tiny"
    source = ""
    answer = 42

    def absolute_name(self) -> str:
        return "deepspeed_no_such_package.tiny_op"

    def sources(self) -> list[str]:
        return [self.source]

    def cxx_args(self) -> list[str]:
        return ["-O0", f"-DANSWER={self.answer}"]

    def uses_torch(self) -> bool:
        return False


@pytest.fixture
def tiny(tmp_path: Path) -> TinyBuilder:
    (tmp_path / "tiny").mkdir()
    TinyBuilder.source = str(tmp_path / "tiny" / "tiny.cpp")
    Path(TinyBuilder.source).write_text(TINY_OP)
    return TinyBuilder()


@needs_compiler
def test_compiled_on_first_use_and_again_when_the_library_is_broken(tiny: TinyBuilder, warnings: list[str]) -> None:
    assert tiny.compiled() == ""
    module = tiny.load()
    assert module.answer() == 42 and tiny.load() is module and tiny.compiled() == "cached"
    changed = TinyBuilder()
    changed.answer = 43
    assert changed.load().answer() == 43
    broken = TinyBuilder()
    broken.answer = 44
    library = cached_build(broken.plan())
    library.unlink()
    library.write_bytes(b"\x7fELF nonsense")
    assert broken.load().answer() == 44
    assert any("is built anew" in message for message in warnings)


@needs_compiler
def test_flags_of_the_environment(tiny: TinyBuilder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CFLAGS", "-UANSWER -DANSWER=45")
    assert tiny.load().answer() == 45


@needs_compiler
def test_a_warm_cache_needs_no_compiler(tiny: TinyBuilder, monkeypatch: pytest.MonkeyPatch) -> None:
    library = cached_build(tiny.plan())
    monkeypatch.setenv("PATH", "/nowhere")
    assert tiny.load().__file__ == str(library)


@needs_compiler
def test_compiled_ahead_of_time(
    tiny: TinyBuilder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warnings: list[str]
) -> None:
    package = tmp_path / "deepspeed_no_such_package"
    package.mkdir()
    (package / "__init__.py").touch()
    library = tiny.compile_ahead(package)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert tiny.compiled() == "installed"
    assert tiny.load().__file__ == str(library) and find_cached(tiny.plan()) is None
    facts = library.with_name("tiny_op.json")
    built_for = json.loads(facts.read_text())
    facts.write_text(json.dumps({"built_for": ["torch 1.0"]}))
    assert TinyBuilder().load().__file__ != str(library)
    assert "was compiled from or for ['torch 1.0']" in warnings[-1]
    facts.write_text(json.dumps(built_for))
    Path(tiny.source).write_text(TINY_OP + "// changed\n")
    assert TinyBuilder().installed_library() is None  # sources were edited after an editable install


@needs_compiler
@pytest.mark.skipif(not (ROOT / "setup.py").exists(), reason="not a source tree")
def test_setup_compiles_what_the_environment_asks_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run_setup() -> None:
        exec(compile(script.read_text(), str(script), "exec"), {"__file__": str(script), "__name__": "setup"})

    for name in ("op_builder", "csrc", "requirements"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "deepspeed").mkdir()
    shutil.copy(ROOT / "deepspeed" / "git_version_info.py", tmp_path / "deepspeed")
    script = tmp_path / "setup.py"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "argv", ["setup.py", "-q", "build_ext", "--build-lib", "built"])
    monkeypatch.setenv("DS_BUILD_CPU_LION", "1")
    run_setup()
    ops = tmp_path / "built" / "deepspeed" / "ops"
    assert sorted(path.name for path in ops.iterdir()) == ["lion"]
    assert {path.name.partition(".")[0] for path in (ops / "lion").iterdir()} == {"cpu_lion_op"}
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(SystemExit, match="DS_BUILD_CPU_LION=1, but op cpu_lion cannot be compiled here"):
        run_setup()


# ---------------------------------------------------------------------- where it cannot be compiled


def test_without_a_compiler_torch_does_the_work_after_one_line(
    monkeypatch: pytest.MonkeyPatch, warnings: list[str]
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(RuntimeError, match="op cpu_adam cannot be compiled here: there is no C\\+\\+ compiler"):
        CPUAdamBuilder().load()
    for _ in range(2):
        parameter = torch.ones(5)
        parameter.grad = torch.ones(5)
        DeepSpeedCPUAdam([parameter], lr=0.5).step()
        assert torch.allclose(parameter, torch.full((5,), 0.495 + 0.005))
    assert len(warnings) == 1 and "\n" not in warnings[0]
    assert "op cpu_adam: the native kernel cannot be used, torch does the work" in warnings[0]
    assert "install g++, or name one in CXX" in warnings[0]


def test_only_the_first_rank_says_so(monkeypatch: pytest.MonkeyPatch, warnings: list[str]) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setenv("RANK", "1")
    assert CPUAdamBuilder().load_or_none() is None and warnings == []


def test_native_ops_can_be_switched_off(monkeypatch: pytest.MonkeyPatch, warnings: list[str]) -> None:
    monkeypatch.setenv("DS_NATIVE_OPS", "0")
    assert CPUAdamBuilder().load_or_none() is None and warnings == []


def test_missing_headers_and_sources_are_named(tiny: TinyBuilder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(builder.shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(builder.sysconfig, "get_path", lambda *args, **kwargs: "/usr/include/python3")
    assert "/usr/include/python3 has no Python.h" in tiny.why_not() and not tiny.is_compatible()
    Path(tiny.source).unlink()
    with pytest.raises(FileNotFoundError, match="op tiny: sources are missing: .*tiny.cpp"):
        tiny.plan()


TRAINING = """
import torch, deepspeed, sys
model = torch.nn.Linear(4, 4)
config = {"train_batch_size": 1, "optimizer": {"type": "AdamW"}, "zero_optimization": {"stage": 2}}
engine = deepspeed.initialize(model=model, config=config)[0]
engine.backward(engine(torch.ones(1, 4)).sum())
engine.step()
print("deepspeed.ops.op_builder" in sys.modules)
"""


def test_importing_and_training_compile_nothing_that_is_not_used(tmp_path: Path, fake: FakeCompiler) -> None:
    rendezvous = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    env = {**os.environ, **rendezvous, "CXX": str(fake.path), "DS_ACCELERATOR": "cpu"}
    env["PYTHONPATH"] = os.pathsep.join(sys.path)
    done = subprocess.run([sys.executable, "-c", TRAINING], env=env, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert (done.returncode, done.stdout) == (0, "False\n"), done.stderr
    assert fake.calls() == 0 and not (tmp_path / "cache").exists()


def test_ops_without_a_kernel_say_so() -> None:
    assert ALL_OPS["transformer"].why_not() == "it has no native kernel"
    assert TransformerBuilder().compiled() == ""
    assert all(op.BUILD_VAR.startswith("DS_BUILD_") for op in ALL_OPS.values() if op.sources())
    assert len({op.BUILD_VAR for op in ALL_OPS.values() if op.sources()}) >= 3


# ---------------------------------------------------------------------- CUDA


@pytest.mark.parametrize(
    "text, entries",
    [
        ("9.0a", ["9.0a"]),
        ("8.0;9.0+PTX", ["8.0", "9.0+PTX"]),
        ("8.0 8.6, 9.0a+ptx", ["8.0", "8.6", "9.0a+PTX"]),
        ("Hopper", ["9.0+PTX"]),
        ("ampere;10.0a", ["8.0", "8.6+PTX", "10.0a"]),
        ("10.0f 9.0 9.0", ["10.0f", "9.0"]),
        (" ; ", []),
    ],
)
def test_architecture_lists(text: str, entries: list[str]) -> None:
    assert parse_architectures(text) == entries


def test_architectures_become_flags() -> None:
    assert gencode_flags(["9.0a", "8.6+PTX", "10.0"]) == [
        "-gencode=arch=compute_90a,code=sm_90a",
        "-gencode=arch=compute_86,code=sm_86",
        "-gencode=arch=compute_86,code=compute_86",
        "-gencode=arch=compute_100,code=sm_100",
    ]
    for text in ("sm_90", "9", "9.0b", "Volvo"):
        with pytest.raises(ValueError, match=f"{text!r} is no architecture"):
            parse_architectures(text)


class CudaBuilder(CUDAOpBuilder):
    NAME = "some_cuda_op"

    def absolute_name(self) -> str:
        return "deepspeed.ops.some_cuda_op"

    def sources(self) -> list[str]:
        return []


def test_where_architectures_come_from(monkeypatch: pytest.MonkeyPatch) -> None:
    op = CudaBuilder()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(builder, "cuda_home", lambda: None)
    assert len(op.compute_capability_args()) == len(builder.DEFAULT_COMPUTE_CAPABILITIES.split(";"))
    assert op.compute_capability_args("7.5") == ["-gencode=arch=compute_75,code=sm_75"]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: [(9, 0), (8, 0), (9, 0)][index])
    devices = ["-gencode=arch=compute_80,code=sm_80", "-gencode=arch=compute_90,code=sm_90"]
    assert op.compute_capability_args("7.5") == devices and op.cuda_capability_major() == 9
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "9.0a")
    assert op.compute_capability_args() == ["-gencode=arch=compute_90a,code=sm_90a"]
    assert op.plan().nvcc_flags[-1] == "-gencode=arch=compute_90a,code=sm_90a"
    monkeypatch.setattr(CudaBuilder, "filter_ccs", lambda self, ccs: [])
    with pytest.raises(RuntimeError, match="some_cuda_op cannot be compiled for any of 9.0a"):
        op.compute_capability_args()


def test_a_toolkit_that_does_not_fit(monkeypatch: pytest.MonkeyPatch, warnings: list[str]) -> None:
    op = CudaBuilder()
    monkeypatch.setattr(builder, "installed_cuda_version", lambda name="": (12, 4))
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    assert builder.assert_no_cuda_mismatch()
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(OpBuilder, "why_not", lambda self: None)
    reason = "CUDA toolkit 12.4 does not fit torch, which was built with CUDA 13.0"
    assert reason in op.why_not()
    with pytest.raises(builder.CUDAMismatchException, match=reason):
        op.is_compatible()
    assert builder.probe_is_compatible(op) is False
    monkeypatch.setenv("DS_SKIP_CUDA_CHECK", "1")
    assert op.why_not() is None and reason in warnings[-1]
