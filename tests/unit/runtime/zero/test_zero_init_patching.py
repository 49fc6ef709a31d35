# SPDX-License-Identifier: Apache-2.0
"""Which modules a patch sees and when, what it does to torch's constructors, and that nothing of it stays."""

import copy
import dataclasses
import enum
import functools
import gc
import inspect
import io
import subprocess
import sys
import typing
import weakref
from contextlib import contextmanager

import pytest
import torch
from torch import nn

from deepspeed.runtime.zero import init_patching
from deepspeed.runtime.zero.init_patching import (
    CONSTRUCTORS,
    ConstructionPatch,
    all_lifted,
    original_module_apply,
    restore_all,
    shutdown_all,
)
from deepspeed.utils.init_on_device import OnDevice


class Override(enum.Enum):
    dtype = 1
    device = 2


def make_patch(seen=None, dtype=None, device=None, overrides=("dtype", "device"), linear=False, apply=None, **kwargs):
    callback = seen.append if isinstance(seen, list) else seen or (lambda module: None)
    return ConstructionPatch(callback, dtype, device, overrides, linear, apply, **kwargs)


@contextmanager
def patched(*args, **kwargs):
    patch = make_patch(*args, **kwargs)
    patch.install()
    try:
        yield patch
    except BaseException:
        patch.remove(failed=True)
        raise
    patch.remove()


def all_module_classes():
    found, waiting = {nn.Module}, [nn.Module]
    while waiting:
        for cls in type.__subclasses__(waiting.pop()):
            if cls not in found:
                found.add(cls)
                waiting.append(cls)
    return found


def snapshot():
    """All attributes that a patch may replace, as they lie in the dictionaries of their owners."""
    state = {cls: vars(cls).get("__init__") for cls in all_module_classes()}
    state |= {name: getattr(torch, name) for name in CONSTRUCTORS}
    state["new"] = vars(torch.Tensor).get("__new__")
    state["linear"] = nn.functional.linear
    state["apply"] = vars(nn.Module)["apply"]
    state["subclass"] = vars(nn.Module).get("__init_subclass__")
    return state


def assert_unchanged(before):
    after = snapshot()
    assert {key for key in before if after[key] is not before[key]} == set()


@pytest.fixture(autouse=True)
def nothing_stays():
    before = snapshot()
    yield
    assert init_patching._patches == [] and init_patching._lifted == []
    assert_unchanged(before)


class Leaf(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))


class Tree(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = Leaf()
        self.second = nn.Sequential(nn.Linear(2, 3), nn.ReLU())
        self.late = nn.Parameter(torch.zeros(2))


class Mixin:
    def __init__(self, size):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size))


class NoModule(Mixin):
    pass


class Protocol(typing.Protocol):
    def forward(self, x): ...


# --- which modules are seen, and when -------------------------------------------------------------------------------


def test_children_are_seen_before_their_parent_and_each_once():
    seen = []
    with patched(seen):
        tree = Tree()
    assert [type(module) for module in seen] == [Leaf, nn.Linear, nn.ReLU, nn.Sequential, Tree]
    assert seen[0] is tree.first and seen[-1] is tree


def test_a_module_is_seen_with_everything_its_constructor_makes():
    parameters = {}
    with patched(lambda module: parameters.update({type(module): len(list(module.parameters()))})):
        Tree()
    assert parameters[Tree] == 4 and parameters[nn.Linear] == 2


def test_class_without_constructor():
    class Bare(nn.Module):
        pass

    class Inheriting(Leaf):
        pass

    seen = []
    with patched(seen):
        made = [Bare(), Inheriting(), nn.Module()]
    assert seen == made


def test_class_defined_inside():
    seen = []
    with patched(seen):

        class Inside(Leaf):
            def __init__(self):
                super().__init__()
                self.other = nn.Parameter(torch.zeros(1))
                assert self not in seen

        class BelowInside(Inside):
            pass

        made = [Inside(), BelowInside()]
    assert seen == made
    assert Inside.__init__.__qualname__.endswith("Inside.__init__") and "__init__" not in vars(BelowInside)


def test_late_and_repeated_super():
    class Late(Leaf):
        def __init__(self):
            object.__setattr__(self, "early", 1)
            super().__init__()
            super().__init__()
            nn.Module.__init__(self)
            self.weight = nn.Parameter(torch.ones(1))
            assert seen == []

    seen = []
    with patched(seen):
        module = Late()
    assert seen == [module]


def test_constructor_that_calls_itself():
    class Again(nn.Module):
        def __init__(self, size=None):
            if size is None:
                self.__init__(3)
            else:
                super().__init__()
            self.weight = nn.Parameter(torch.zeros(3))

    seen = []
    with patched(lambda module: seen.append(list(module.parameters()))):
        module = Again()
    assert len(seen) == 1 and seen[0][0] is module.weight


def test_second_construction_is_seen_again():
    seen = []
    with patched(seen):
        module = Leaf()
        module.__init__()
    assert seen == [module, module]


def test_multiple_inheritance():
    class Left(Leaf):
        def __init__(self):
            super().__init__()
            self.left = nn.Parameter(torch.zeros(1))

    class Right(Leaf):
        def __init__(self):
            super().__init__()
            self.right = nn.Parameter(torch.zeros(1))

    class Both(Left, Right):
        pass

    names = []
    with patched(lambda module: names.append([name for name, _ in module.named_parameters()])):
        Both()
    assert names == [["weight", "right", "left"]]


def test_bases_constructed_by_name():
    """A base without a constructor of its own keeps the one that it inherits, not the next of the instance's order."""

    class Plain(nn.Module):
        pass

    class Needy(nn.Module):
        def __init__(self, size):
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(size))

    class Both(Plain, Needy):
        def __init__(self):
            Plain.__init__(self)
            Needy.__init__(self, 2)

    seen = []
    with patched(seen):
        module = Both()
    assert seen == [module] and module.weight.shape == (2,)


def test_constructor_of_a_base_that_is_no_module():
    class First(Mixin, nn.Module):
        pass

    seen = []
    with patched(lambda module: seen.append(module.weight.shape)):

        class Second(Mixin, nn.Module):
            pass

        First(2), Second(3)
        assert NoModule(4).weight.shape == (4,)
    assert seen == [(2,), (3,)]


def test_protocols():
    class First(Protocol, nn.Module):
        def forward(self, x):
            return x

    class Second(Protocol, nn.Module):
        def forward(self, x):
            return x

    First()
    seen = []
    with patched(seen):
        made = [First(), Second(), Second()]
    assert len(seen) == 3 and {*seen} == {*made}


@pytest.mark.parametrize("kind", ["method", "partialmethod"])
def test_constructors_that_are_not_functions(kind):
    class Odd(nn.Module):
        def build(self, size):
            nn.Module.__init__(self)
            self.weight = nn.Parameter(torch.zeros(size))

        __init__ = build if kind == "method" else functools.partialmethod(build, 3)

    seen = []
    with patched(seen):
        module = Odd(3) if kind == "method" else Odd()
    assert seen == [module] and module.weight.shape == (3,)


def test_failed_construction_is_not_seen():
    class Fails(nn.Module):
        def __init__(self, fail):
            super().__init__()
            self.child = Leaf()
            if fail:
                raise ValueError("no")

    class Tries(nn.Module):
        def __init__(self):
            super().__init__()
            try:
                Fails(True)
            except ValueError:
                self.child = Fails(False)

    seen = []
    with patched(seen):
        with pytest.raises(ValueError, match="no"):
            Fails(True)
        assert [type(module) for module in seen] == [Leaf]
        module = Tries()
    assert [type(each) for each in seen[1:]] == [Leaf, Leaf, Fails, Tries] and seen[-1] is module


def test_constructor_that_recovers():
    class Fallback(Leaf):
        def __init__(self):
            try:
                super().__init__(None)
            except TypeError:
                super().__init__()

    seen = []
    with patched(seen):
        module = Fallback()
    assert seen == [module]


def test_copies_and_loaded_modules_are_not_seen():
    seen = []
    module = Tree()
    stored = io.BytesIO()
    torch.save(module, stored)
    stored.seek(0)
    with patched(seen):
        copy.deepcopy(module)
        torch.load(stored, weights_only=False)
        Leaf.__new__(Leaf)
        nn.Module.__init__(Leaf.__new__(Leaf))
    assert seen == []


def test_lazy_module_is_not_seen_but_its_parent_is():
    class Parent(nn.Module):
        def __init__(self):
            super().__init__()
            self.lazy = nn.LazyLinear(3)

    seen = []
    with patched(seen):
        parent = Parent()
        parent.lazy(torch.zeros(1, 2))
    assert seen == [parent] and parent.lazy.weight.shape == (3, 2)


@pytest.mark.filterwarnings("ignore:.*is deprecated:DeprecationWarning")
def test_script_modules_are_not_seen():
    class Scripted(torch.jit.ScriptModule):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2))

        @torch.jit.script_method
        def forward(self, x):
            return x * self.weight

    linear = nn.Linear(2, 2)
    seen = []
    with patched(seen):
        scripted, own = torch.jit.script(linear), Scripted()
        traced = torch.jit.trace(linear, torch.ones(1, 2))
    assert seen == []
    x = torch.ones(1, 2)
    assert torch.equal(scripted(x), linear(x)) and torch.equal(traced(x), linear(x)) and torch.equal(own(x), x)


def test_graph_modules():
    module = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    seen = []
    with patched(seen):
        traced = torch.fx.symbolic_trace(module)
    assert any(each is traced for each in seen)
    assert torch.equal(traced(torch.ones(1, 2)), module(torch.ones(1, 2)))


def test_signatures_stay_visible():
    with patched():
        parameters = inspect.signature(nn.Linear).parameters
        assert list(parameters)[:2] == ["in_features", "out_features"]


# --- classes whose constructor is replaced behind the patch's back --------------------------------------------------


def make_dataclass():
    @dataclasses.dataclass(eq=False)
    class Data(nn.Module):
        size: int

        def __post_init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(self.size))

    return Data


def test_dataclass_defined_outside():
    Data = make_dataclass()
    seen = []
    with patched(lambda module: seen.append(module.weight.shape)):
        Data(2)
    assert seen == [(2,)]


def test_dataclass_defined_inside():
    seen = []
    with patched(lambda module: seen.append(module.weight.shape)):
        Data = make_dataclass()
        Data(2)
        Data(3)
        assert seen == [(3,)]
    assert seen == [(3,), (2,)]  # the end of the first construction was not visible
    assert vars(Data)["__init__"].__qualname__.endswith("Data.__init__")
    Data(4)
    assert seen == [(3,), (2,)]


def test_invisible_constructor_that_calls_its_base_twice():
    def init(self):
        Leaf.__init__(self)
        nn.Module.__init__(self)
        self.weight = nn.Parameter(torch.zeros(1))

    seen = []
    with patched(seen):

        class Twice(Leaf):
            pass

        Twice.__init__ = init
        module = Twice()
    assert seen == [module]


def test_child_with_an_invisible_end_is_seen_before_its_parent():
    seen = []
    with patched(seen):
        Data = make_dataclass()

        class Parent(nn.Module):
            def __init__(self, fail=False):
                super().__init__()
                self.child = Data(2)
                if fail:
                    raise ValueError

        parent = Parent()
        other = make_dataclass()

        class Failing(nn.Module):
            def __init__(self):
                super().__init__()
                self.child = other(2)
                raise ValueError

        with pytest.raises(ValueError):
            Failing()
    assert seen == [parent.child, parent]


def test_decorated_constructor_keeps_its_decorator():
    def announce(cls):
        inner = cls.__init__

        def init(self, *args):
            inner(self, *args)
            self.extra = nn.Parameter(torch.zeros(1))

        cls.__init__ = init
        return cls

    seen = []
    with patched(lambda module: seen.append(len(list(module.parameters())))):

        @announce
        class Decorated(Leaf):
            pass

        Decorated()
        Decorated()
    assert seen == [2, 2] and len(list(Decorated().parameters())) == 2 and seen == [2, 2]


def test_constructor_replaced_inside_and_never_called_stays():
    def replacement(self):
        pass

    with patched():

        class Replaced(Leaf):
            def __init__(self):
                super().__init__()

        Replaced.__init__ = replacement
    assert vars(Replaced)["__init__"] is replacement


def test_class_that_keeps_init_subclass_to_itself():
    class Closed(nn.Module):
        def __init_subclass__(cls, **kwargs):
            pass

    seen = []
    with patched(seen):

        class Inside(Closed):
            def __init__(self):
                super().__init__()
                self.weight = nn.Parameter(torch.zeros(1))

        made = [Inside(), Inside()]
    assert seen == [made[1], made[0]]


def test_init_subclass_keyword_arguments():
    class Named(nn.Module):
        def __init_subclass__(cls, tag="", **kwargs):
            super().__init_subclass__(**kwargs)
            cls.tag = tag

    seen = []
    with patched(seen):

        class Inside(Named, tag="x"):
            pass

        module = Inside()
        with pytest.raises(TypeError):

            class Wrong(nn.Module, tag="x"):
                pass

    assert Inside.tag == "x" and seen == [module]


def test_context_opened_inside_a_constructor():
    class Outer(nn.Module):
        def __init__(self):
            with patched(seen):
                super().__init__()
                self.child = Leaf()

    seen = []
    outer = Outer()
    assert seen == [outer.child]


# --- nesting, lifting, restoring ------------------------------------------------------------------------------------


def test_innermost_context_governs():
    outer, inner = [], []
    with patched(outer, torch.bfloat16):
        first = Leaf()
        with patched(inner, torch.float16):
            second = Leaf()
        third = Leaf()
    assert outer == [first, third] and inner == [second]
    assert [each.weight.dtype for each in (first, second, third)] == [torch.bfloat16, torch.float16, torch.bfloat16]


def test_inner_context_without_overrides_leaves_torch_alone_or_the_outer_dtype_out():
    with patched(dtype=torch.bfloat16), patched(dtype=torch.float16, overrides=()):
        assert torch.zeros(1).dtype == torch.float32


def test_same_patch_twice_is_refused_but_may_be_opened_again():
    patch = make_patch()
    patch.install()
    with pytest.raises(RuntimeError, match="open already"):
        patch.install()
    patch.shutdown()
    with pytest.raises(RuntimeError, match="open already"):
        patch.install()
    patch.restore()
    patch.remove()
    patch.remove()
    patch.install()
    patch.remove()


def test_everything_is_back_after_an_exception():
    before = snapshot()
    with pytest.raises(KeyError), patched(dtype=torch.bfloat16), patched(dtype=torch.float16, linear=True):
        Tree()
        raise KeyError
    assert_unchanged(before)


def test_callback_that_raises():
    def callback(module):
        raise KeyError(type(module))

    before = snapshot()
    with pytest.raises(KeyError), patched(callback, torch.bfloat16):
        assert torch.zeros(1).dtype == torch.bfloat16
        with pytest.raises(KeyError):
            Leaf()
        assert torch.zeros(1).dtype == torch.bfloat16
        Tree()
    assert_unchanged(before)


def test_removal_out_of_order():
    outer, inner = make_patch(dtype=torch.float16), make_patch(dtype=torch.bfloat16)
    outer.install(), inner.install()
    outer.remove()
    assert torch.zeros(1).dtype == torch.bfloat16 and inner.installed and not outer.installed
    inner.remove()
    assert torch.zeros(1).dtype == torch.float32


def test_patch_that_cannot_be_installed_leaves_nothing():
    def wrap(fn, target_fp_dtype, target_device):
        if fn.__name__ == "eye":
            raise KeyError
        return fn

    before = snapshot()
    with pytest.raises(KeyError):
        make_patch(dtype=torch.bfloat16, wrap=wrap).install()
    assert_unchanged(before)


def test_shutdown_and_restore():
    seen = []
    before = snapshot()
    with patched(seen, torch.bfloat16) as patch:
        first = Leaf()
        patch.shutdown()
        assert_unchanged(before)
        Leaf()
        patch.restore()
        patch.restore()
        second = Leaf()
    assert seen == [first, second]


def test_shutdown_uncovers_the_context_around():
    outer, inner = [], []
    with patched(outer, torch.float16), patched(inner, torch.bfloat16) as patch:
        patch.shutdown()
        assert Leaf().weight.dtype == torch.float16
        patch.restore()
        assert Leaf().weight.dtype == torch.bfloat16
    assert len(outer) == len(inner) == 1


def test_shutdown_of_all():
    outer, inner = [], []
    before = snapshot()
    with patched(outer, torch.float16), patched(inner, torch.bfloat16):
        with pytest.raises(KeyError), all_lifted():
            assert_unchanged(before)
            with patched(dtype=torch.float64):
                assert torch.zeros(1).dtype == torch.float64
            shutdown_all()
            restore_all()
            raise KeyError
        assert Leaf().weight.dtype == torch.bfloat16
    assert len(inner) == 1 and outer == []
    with pytest.raises(RuntimeError, match="without shutdown_all"):
        restore_all()


def test_shutdown_of_all_outside_and_of_a_patch_that_was_lifted_already():
    with all_lifted():
        Leaf()
    with patched(dtype=torch.bfloat16) as patch:
        patch.shutdown()
        with all_lifted():
            pass
        assert torch.zeros(1).dtype == torch.float32
        patch.restore()
        assert torch.zeros(1).dtype == torch.bfloat16


def test_removed_while_lifted():
    patch = make_patch()
    patch.install()
    with all_lifted():
        patch.remove()
    assert not patch.installed


def test_lifted_inside_a_constructor():
    class Initializes(nn.Module):
        def __init__(self):
            super().__init__()
            with all_lifted():
                self.hidden = Leaf()
            self.child = Leaf()

    seen = []
    with patched(seen):
        module = Initializes()
    assert seen == [module.child, module]


def test_no_module_is_kept_alive():
    patch = make_patch()
    patch.install()
    module = make_dataclass()(2)
    references = [weakref.ref(module), weakref.ref(Leaf())]
    patch.remove()
    del module
    gc.collect()
    assert [reference() for reference in references] == [None, None]


# --- tensors --------------------------------------------------------------------------------------------------------

FLOATS = {
    "tensor": lambda **kw: torch.tensor([1.5, 2.0], **kw),
    "empty": lambda **kw: torch.empty(2, 3, **kw),
    "zeros": lambda **kw: torch.zeros((2, 3), **kw),
    "ones": lambda **kw: torch.ones(2, **kw),
    "full": lambda **kw: torch.full((2,), 0.5, **kw),
    "arange": lambda **kw: torch.arange(0.0, 1.0, 0.25, **kw),
    "eye": lambda **kw: torch.eye(3, **kw),
    "randn": lambda **kw: torch.randn(4, **kw),
}


@pytest.mark.parametrize("name", CONSTRUCTORS)
@pytest.mark.parametrize("asked", [None, torch.float32, torch.float64, torch.float16])
def test_floating_point_becomes_the_target(name, asked):
    kwargs = {} if asked is None else {"dtype": asked}
    torch.manual_seed(0)
    plain = FLOATS[name](**kwargs)
    torch.manual_seed(0)
    with patched(dtype=torch.bfloat16):
        made = FLOATS[name](requires_grad=True, **kwargs)
    assert made.dtype == torch.bfloat16 and made.requires_grad and made.is_leaf and made.device.type == "cpu"
    if name != "empty":
        assert torch.equal(made.detach(), plain.to(torch.bfloat16))


def test_what_is_not_floating_point_keeps_its_dtype():
    with patched(dtype=torch.bfloat16, device="cpu"):
        made = [torch.tensor([1, 2]), torch.arange(3), torch.zeros(2, dtype=torch.int32), torch.full((2,), True)]
        made += [torch.ones(2, dtype=torch.complex64), torch.zeros(2, dtype=torch.float8_e4m3fn)]
    assert [each.dtype for each in made] == [
        torch.int64,
        torch.int64,
        torch.int32,
        torch.bool,
        torch.complex64,
        torch.float8_e4m3fn,
    ]


def test_old_style_tensors():
    with patched(dtype=torch.bfloat16):
        made = [torch.Tensor(2, 3), torch.Tensor([1.0, 2.0]), torch.Tensor(torch.Size([4])), torch.Tensor()]
        parameter = nn.Parameter(torch.Tensor(2))
        others = [torch.IntTensor(2), torch.FloatTensor(2)]
    assert {each.dtype for each in (*made, parameter)} == {torch.bfloat16}
    assert [each.shape for each in made] == [(2, 3), (2,), (4,), (0,)]
    assert [each.dtype for each in others] == [torch.int32, torch.float32]
    assert torch.Tensor(2, 3).dtype == torch.float32 and torch.Tensor([3.0]).item() == 3.0


def test_device():
    with patched(device="meta"):
        made = [torch.zeros(1), torch.arange(3), torch.tensor(1.0), torch.Tensor(2), nn.Linear(2, 2).weight]
        kept = [torch.zeros(1, device="cpu"), torch.empty(1, device=torch.device("cpu"))]
    assert {each.device.type for each in made} == {"meta"} and {each.dtype for each in made} >= {torch.float32}
    assert {each.device.type for each in kept} == {"cpu"}
    assert torch.zeros(1).device.type == "cpu"


def test_default_device_changed_inside():
    with patched(device="cpu"):
        with torch.device("meta"):
            assert torch.zeros(1).device.type == "meta"
        assert torch.zeros(1).device.type == "cpu"
    with torch.device("meta"), patched(device="cpu"):
        assert torch.zeros(1).device.type == "cpu"


@pytest.mark.parametrize("overrides", [{"dtype"}, {"device"}, {Override.dtype}, {Override.device}, set()])
def test_overrides(overrides):
    names = {getattr(each, "name", each) for each in overrides}
    with patched(dtype=torch.bfloat16, device=torch.device("meta"), overrides=overrides):
        made = torch.zeros(1)
    assert made.dtype == (torch.bfloat16 if "dtype" in names else torch.float32)
    assert made.device.type == ("meta" if "device" in names else "cpu")


def test_unknown_override():
    with pytest.raises(ValueError, match="layout"):
        make_patch(overrides={"layout"})


def test_out_argument():
    target = torch.zeros(3, 3)
    with patched(dtype=torch.bfloat16, device="meta"):
        assert torch.eye(3, out=target) is target
        nn.init.eye_(target)
    assert torch.equal(target, torch.eye(3))


def test_loading_keeps_what_is_stored():
    stored = io.BytesIO()
    values = {"a": torch.randn(5), "b": torch.randn(3, dtype=torch.float64)}
    torch.save(values, stored)
    with patched(dtype=torch.bfloat16, device="meta"):
        for weights_only in (True, False):
            stored.seek(0)
            loaded = torch.load(stored, weights_only=weights_only)
            assert all(torch.equal(loaded[key], values[key]) for key in values)
        copied = copy.deepcopy(values)
    assert all(torch.equal(copied[key], values[key]) for key in values)


def test_optimizers_count_steps_in_fp32():
    parameter = nn.Parameter(torch.zeros(2))
    parameter.grad = torch.ones(2)
    with patched(dtype=torch.bfloat16):
        optimizer = torch.optim.AdamW([parameter], lr=0.1)
        optimizer.step()
    assert optimizer.state[parameter]["step"].dtype == torch.float32


def test_modules_of_torch_are_built_in_the_target():
    with patched(dtype=torch.bfloat16):
        model = nn.Sequential(nn.Linear(2, 3), nn.LayerNorm(3), nn.BatchNorm1d(3), nn.Embedding(2, 3), nn.LSTM(2, 3))
        model.append(nn.TransformerEncoderLayer(4, 2, 8))
    kinds = {t.dtype for t in model.state_dict().values()}
    assert kinds == {torch.bfloat16, torch.int64}


def test_functions_kept_from_inside_are_plain_outside():
    with patched(dtype=torch.bfloat16):
        zeros = torch.zeros
        with patched(dtype=torch.float16):
            ones = torch.ones
            assert zeros(1).dtype == torch.float16
        assert ones(1).dtype == torch.bfloat16
    assert zeros(1).dtype == ones(1).dtype == torch.float32
    with patched(dtype=torch.bfloat16):
        assert zeros(1).dtype == torch.bfloat16


def test_callback_sees_plain_constructors():
    made = []
    with patched(lambda module: made.append(torch.zeros(1)), torch.bfloat16, "meta"):
        Leaf()
    assert made[0].dtype == torch.float32 and made[0].device.type == "cpu"


def test_wrapper_factory_is_called_by_keyword_with_torchs_functions():
    calls = []

    def wrap(fn, target_fp_dtype, target_device):
        calls.append((fn, target_fp_dtype, target_device))
        return lambda *args, **kwargs: "wrapped"

    plain = [getattr(torch, name) for name in CONSTRUCTORS]
    with patched(dtype=torch.bfloat16, device="cpu", wrap=wrap):
        assert torch.arange(3) == "wrapped"
        calls.clear()
        with patched(dtype=torch.float16, overrides={"dtype"}, wrap=wrap):
            pass
    assert calls == [(fn, torch.float16, None) for fn in plain]


@pytest.mark.parametrize("inner_first", [False, True])
def test_together_with_on_device(inner_first):
    before = snapshot()
    if inner_first:
        with OnDevice(torch.float16, "meta"), patched(dtype=torch.bfloat16, device="cpu"):
            made = torch.zeros(1), torch.Tensor(2)
        assert {(each.dtype, each.device.type) for each in made} == {(torch.bfloat16, "cpu")}
    else:
        with patched(dtype=torch.bfloat16, device="cpu"), OnDevice(torch.float16, "meta"):
            assert torch.zeros(1).dtype == torch.float16
            with patched(dtype=torch.bfloat16, device="cpu"):
                assert torch.zeros(1).dtype == torch.bfloat16
    assert_unchanged(before)


FIRST_USES_INSIDE = """
import torch
from deepspeed.runtime.zero.init_patching import ConstructionPatch

def add_zeros(x):
    return x + torch.zeros(3)

patch = ConstructionPatch(lambda module: None, torch.bfloat16, torch.device("cpu"), {"dtype", "device"}, False, None)
patch.install()
with torch.device("meta"):
    assert torch.zeros(1).device.type == "meta"
torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
patch.remove()
with torch.device("meta"):
    assert torch.zeros(1).device.type == "meta"
compiled = torch.compile(add_zeros, backend="eager", fullgraph=True)
assert compiled(torch.ones(3)).dtype == torch.float32
"""


def test_tables_of_torch_that_are_filled_at_first_use():
    subprocess.run([sys.executable, "-c", FIRST_USES_INSIDE], check=True, timeout=120)


# --- the rest -------------------------------------------------------------------------------------------------------


def test_module_apply():
    calls = []

    def module_apply(module, fn):
        calls.append(type(module))
        return original_module_apply(module, fn)

    with patched(apply=module_apply):
        visited = []
        tree = Tree()
        assert tree.apply(lambda module: visited.append(type(module))) is tree
    assert visited == [Leaf, nn.Linear, nn.ReLU, nn.Sequential, Tree]
    assert sorted(map(str, calls)) == sorted(map(str, visited))


def test_linear():
    x = torch.randn(4, 2)
    layer = nn.Linear(2, 3)
    plain = layer(x)
    with patched(linear=True):
        assert nn.functional.linear.__name__ == "zero3_linear_wrap"
        torch.testing.assert_close(layer(x), plain)
        with patched(linear=False):
            torch.testing.assert_close(layer(x), plain)
