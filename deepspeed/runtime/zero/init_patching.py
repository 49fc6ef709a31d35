# SPDX-License-Identifier: Apache-2.0
"""What ``deepspeed.zero.Init`` changes in torch while it is open: it sees each module when its construction has ended,
and torch's constructors make floating-point tensors of the wanted dtype and device.

torch's names are replaced process-wide, so a context is for one thread. Everything a replacement does depends on the
contexts open *at the call*: whoever keeps a replaced function (``from torch import zeros`` in a module imported inside
the context, a decorated ``__init__``) has the plain one in his hands afterwards.
"""

import enum
import functools
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from deepspeed.utils.init_on_device import makes_model_tensors

CONSTRUCTORS = ("tensor", "empty", "zeros", "ones", "full", "arange", "eye", "randn")

original_module_apply = nn.Module.apply
_plain_empty = torch.empty
_plain_new = torch.Tensor.__new__

# Floating-point dtypes that a context overrides. Narrower ones (float8) are storage formats that somebody chose.
_OVERRIDDEN = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
# Made in the wanted dtype at once: the values are the same as after a cast, and there is no second tensor.
_EXACT_IN_ANY_DTYPE = ("empty", "zeros", "ones")


class ConstructionPatch:
    """The replacements for one ``zero.Init`` context. ``install()`` and ``remove()``; contexts may be nested.

    The innermost installed patch governs: its callback gets the modules, its dtype and device apply.

    Args:
        on_module_built: called with each module once its ``__init__`` has ended, that of the instance's own class,
            so that everything the constructor makes is there. Children come before their parent. Not called for a
            module whose constructor raised, for copies (``copy.deepcopy``), for ``torch.jit.ScriptModule`` and for a
            module with uninitialized parameters (``nn.LazyLinear``), which has no sizes yet. It sees torch's
            constructors as they are outside. A second ``module.__init__()`` is a construction of its own.
        dtype: of floating-point tensors from torch's constructors (``CONSTRUCTORS`` and ``torch.Tensor(...)``). It
            replaces float16 to float64, also where the caller names one: a weight that a module asks for in fp32 ends
            in the model's dtype, as it would when the engine casts the model. Integers, complex numbers and float8
            stay. Calls from torch's own code outside ``torch.nn`` are left alone. ``torch.jit.script`` of a function
            that calls a constructor fails while dtype or device apply.
        device: of all tensors from these constructors whose call names no device, unless the default device was
            changed inside the context (``with torch.device(...)``).
        overrides: which of the two apply: a set with "dtype" and "device", or of enum members with these names.
        patch_linear: ``torch.nn.functional.linear`` becomes ``zero3_linear_wrap``.
        module_apply: replaces ``nn.Module.apply``; called as ``module_apply(module, fn)``. ``original_module_apply``
            is the one that it replaces.
        wrap_initialiser: makes the replacement of each in-place function of ``torch.nn.init`` (``normal_``), there and
            in the modules that imported it.
        wrap: makes the replacement of a constructor: ``wrap(fn, target_fp_dtype=..., target_device=...)``. ``fn`` is
            the function found in torch; None for an override that does not apply.

    Raises:
        ValueError: an override of another name.
    """

    def __init__(
        self,
        on_module_built: Callable[[nn.Module], None],
        dtype: torch.dtype | None,
        device: torch.device | None,
        overrides: Iterable[Any],
        patch_linear: bool,
        module_apply: Callable[[nn.Module, Callable[[nn.Module], None]], nn.Module] | None,
        wrap: Callable[..., Callable[..., torch.Tensor]] | None = None,
        wrap_initialiser: Callable[[Callable[..., torch.Tensor]], Callable[..., torch.Tensor]] | None = None,
    ) -> None:
        names = {item.name if isinstance(item, enum.Enum) else item for item in overrides}
        unknown = names - {"dtype", "device"}
        if unknown:
            raise ValueError(f"tensor overrides are 'dtype' and 'device', got {sorted(map(str, unknown))}")
        self.on_module_built = on_module_built
        self.dtype = dtype if "dtype" in names else None
        self.device = torch.device(device) if "device" in names and device is not None else None
        self.patch_linear = patch_linear
        self.module_apply = module_apply
        self.wrap = wrap or fp_tensor_constructor
        self.wrap_initialiser = wrap_initialiser
        self._replaced: list[_Attribute] = []
        self._wrapped: dict[Callable, Callable] = {}  # constructor -> what is called in its stead
        self._lifted = False  # by shutdown()

    @property
    def installed(self) -> bool:
        """Whether the patch is in place, if not the innermost."""
        return self in _patches

    def install(self) -> None:
        """Put the patch in place, innermost.

        Raises:
            RuntimeError: it is installed, or lifted and not yet restored.
        """
        if self.installed or self._lifted or any(self in lifted for lifted in _lifted):
            raise RuntimeError("this zero.Init context is open already; open another one instead")
        self._put_in_place()

    def remove(self, failed: bool = False) -> None:
        """Take the patch away; torch is as before. Does nothing if it is not installed.

        Args:
            failed: the context ends by an exception: modules of which the end of construction was not seen are
                forgotten. Otherwise they are passed to ``on_module_built`` now.
        """
        self._lifted = False
        for lifted in _lifted:
            if self in lifted:
                lifted.remove(self)
        if not self.installed:
            return
        try:
            _construction.finish_late_modules(self, failed)
        finally:
            self._take_away()

    def shutdown(self) -> None:
        """Lift this patch, until ``restore()``. Contexts around it are in force meanwhile."""
        if self.installed:
            self._lifted = True
            self._take_away()

    def restore(self) -> None:
        """Put the patch back, innermost. Does nothing if it was not lifted."""
        if self._lifted:
            self._lifted = False
            self._put_in_place()

    def _put_in_place(self) -> None:
        _patches.append(self)
        try:
            _construction.watch_all()
            for owner, name, value in self._replacements():
                self._replaced.append(_Attribute(owner, name))
                setattr(owner, name, value)
        except BaseException:
            self._take_away()
            raise

    def _take_away(self) -> None:
        """Contexts that were opened later and are still open stay: they are undone and put back."""
        above = _patches[_patches.index(self) + 1 :]
        for patch in (*reversed(above), self):
            while patch._replaced:
                patch._replaced.pop().restore()
            patch._wrapped.clear()
        _patches[_patches.index(self) :] = []
        if not _patches:
            _construction.unwatch_all()
        for patch in above:
            patch._put_in_place()

    def _replacements(self) -> Iterator[tuple[Any, str, Any]]:
        if self.dtype is not None or self.device is not None:
            _let_torch_find_its_functions()
            for name in CONSTRUCTORS:
                yield torch, name, self._dispatcher(getattr(torch, name))
            yield torch.Tensor, "__new__", staticmethod(self._new_dispatcher(torch.Tensor.__new__))
        if self.patch_linear:
            from deepspeed.runtime.zero.linear import zero3_linear_wrap

            yield nn.functional, "linear", zero3_linear_wrap
        if self.module_apply is not None:
            yield nn.Module, "apply", self.module_apply
        if self.wrap_initialiser is not None:
            for owner, name, function in _initialisers():
                yield owner, name, self.wrap_initialiser(function)

    def _dispatcher(self, found: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        plain = _dispatched.get(found, found)
        self._wrapped[plain] = self.wrap(plain, target_fp_dtype=self.dtype, target_device=self.device)

        @functools.wraps(plain)
        def construct(*args: Any, **kwargs: Any) -> torch.Tensor:
            return _governing(plain, sys._getframe(1).f_globals)(*args, **kwargs)

        _dispatched[construct] = plain
        return construct

    def _new_dispatcher(self, found: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        plain = _dispatched.get(found, found)
        self._wrapped[plain] = tensor_new(self.dtype, self.device)

        # The first argument is the class. It has no name here since torch._dynamo, when it is imported with this in
        # place, compares signatures and accepts only those without names, as the original has none.
        def new(*args: Any, **kwargs: Any) -> torch.Tensor:
            function = _governing(plain, sys._getframe(1).f_globals) if args[0] is torch.Tensor else plain
            return function(*args, **kwargs)

        _dispatched[new] = plain
        return new


def shutdown_all() -> None:
    """Lift all patches, until ``restore_all()``. Pairs may be nested."""
    _lifted.append(list(_patches))
    for patch in reversed(_lifted[-1]):
        patch._take_away()


def restore_all() -> None:
    """Put back what the last ``shutdown_all()`` lifted, in its order.

    Raises:
        RuntimeError: nothing is lifted.
    """
    if not _lifted:
        raise RuntimeError("restore_all() without shutdown_all()")
    for patch in _lifted.pop():
        patch._put_in_place()


@contextmanager
def all_lifted() -> Iterator[None]:
    """Inside, no patch is in place; afterwards all are back, also after an exception."""
    shutdown_all()
    try:
        yield
    finally:
        restore_all()


def fp_tensor_constructor(
    fn: Callable[..., torch.Tensor], target_fp_dtype: torch.dtype | None, target_device: torch.device | None
) -> Callable[..., torch.Tensor]:
    """``fn``, one of torch's constructors, with floating-point results in ``target_fp_dtype`` on ``target_device``.

    A ``device=`` of the call wins; a ``dtype=`` of the call does not (see ``ConstructionPatch``). With ``out=`` nothing
    is changed. None leaves dtype or device as they are.
    """
    exact = getattr(fn, "__name__", "") in _EXACT_IN_ANY_DTYPE
    default_device = torch.get_default_device()

    @functools.wraps(fn)
    def construct(*args: Any, **kwargs: Any) -> torch.Tensor:
        if kwargs.get("out") is not None:
            return fn(*args, **kwargs)
        if target_device is not None and kwargs.get("device") is None:
            if torch.get_default_device() == default_device:
                kwargs["device"] = target_device
        if exact and target_fp_dtype is not None and kwargs.get("dtype") in (None, *_OVERRIDDEN):
            kwargs["dtype"] = target_fp_dtype
        return _as_wanted(fn(*args, **kwargs), target_fp_dtype)

    return construct


def tensor_new(target_fp_dtype: torch.dtype | None, target_device: torch.device | None) -> Callable[..., torch.Tensor]:
    """Replacement of ``torch.Tensor.__new__``, for the older style ``torch.Tensor(2, 3)``."""

    def new(cls: type, *args: Any, **kwargs: Any) -> torch.Tensor:
        if args and not kwargs and all(isinstance(size, int) for size in args):
            return _plain_empty(args, dtype=target_fp_dtype, device=target_device)
        made = _plain_new(cls, *args, **kwargs)
        if target_device is not None and kwargs.get("device") is None:
            made = made.to(target_device)
        return _as_wanted(made, target_fp_dtype)

    return new


def _initialisers() -> list[tuple[Any, str, Callable[..., torch.Tensor]]]:
    """In-place functions of ``torch.nn.init``, wherever a module has them under their own name."""
    functions = {n: f for n, f in vars(nn.init).items() if n.endswith("_") and not n.startswith("_") and callable(f)}
    found = []
    for module in list(sys.modules.values()):
        own = getattr(module, "__dict__", {})
        found += [(module, name, function) for name, function in functions.items() if own.get(name) is function]
    return found


@functools.cache
def _let_torch_find_its_functions() -> None:
    """torch knows its functions by identity, in tables that are filled at the first use of ``with torch.device`` and at
    the import of torch._dynamo (which every optimizer does). Filled while replacements are in place, they would miss
    the real functions ever after.
    """
    with torch.device("cpu"):
        torch.empty(0)
    torch.compiler.list_backends()


def _as_wanted(made: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    if dtype is None or made.dtype not in _OVERRIDDEN or made.dtype == dtype:
        return made
    return made.detach().to(dtype).requires_grad_(made.requires_grad)


def _governing(plain: Callable, caller_globals: dict[str, Any]) -> Callable:
    """What a call of the constructor ``plain`` means now: the innermost context's version, or ``plain``."""
    if not _patches or _construction.in_callback or not makes_model_tensors(caller_globals.get("__name__", "")):
        return plain
    return _patches[-1]._wrapped.get(plain, plain)


def _is_of_interest(cls: type) -> bool:
    """Modules, but no script modules nor what torch builds while it makes one."""
    if issubclass(cls, torch.jit.ScriptModule) or cls.__module__.startswith("torch.jit."):
        return False
    return issubclass(cls, nn.Module)


class _Attribute:
    """An attribute of a class or module as it was: its value, or that it was inherited."""

    def __init__(self, owner: Any, name: str) -> None:
        self.owner = owner
        self.name = name
        self.own = name in vars(owner)
        self.value = vars(owner).get(name)

    def restore(self) -> None:
        if self.own:
            setattr(self.owner, self.name, self.value)
        elif self.name in vars(self.owner):
            delattr(self.owner, self.name)


class _Construction:
    """Notices when the construction of a module ends, by wrapping each ``__init__`` that a class defines itself.

    The wrapper that counts is the one that the instance's class resolves to; those of its bases run inside it and pass
    on. A class can escape: its ``__init__`` was replaced after it was defined in the context (``dataclass``, a class
    decorator), or it keeps ``__init_subclass__`` to itself. The first of its instances is then noticed in the
    constructor of a base, whose end says nothing, and waits (``_late``) for the end of the construction around it, or
    of the context; for the next ones the class is wrapped again.
    """

    def __init__(self) -> None:
        self.in_callback = False
        self._originals: dict[type, tuple[Callable, _Attribute]] = {}  # class -> its wrapper and what was there
        self._wrappers: set[Callable] = set()
        self._running: set[int] = set()  # ids of modules whose constructor runs
        self._late: list[nn.Module] = []
        self._saved_hook: _Attribute | None = None

    def watch_all(self) -> None:
        """Wrap what exists, and from now on what is defined. Does nothing if that is so already."""
        if self._saved_hook is not None:
            return
        seen: set[type] = set()
        classes: list[type] = [nn.Module]
        while classes:
            cls = classes.pop()
            if cls not in seen:
                seen.add(cls)
                classes.extend(type.__subclasses__(cls))
                self._watch(cls)
        self._saved_hook = _Attribute(nn.Module, "__init_subclass__")

        def class_defined(cls: type, **kwargs: Any) -> None:
            super(nn.Module, cls).__init_subclass__(**kwargs)
            self._watch(cls)

        nn.Module.__init_subclass__ = classmethod(class_defined)

    def unwatch_all(self) -> None:
        """Put everything back, but an ``__init__`` that somebody replaced since: the wrapper inside it passes on."""
        if self._saved_hook is not None:
            self._saved_hook.restore()
            self._saved_hook = None
        for cls, (wrapper, original) in self._originals.items():
            if vars(cls).get("__init__") is wrapper:
                original.restore()
        self._originals.clear()
        self._wrappers.clear()
        _dispatched.clear()

    def _watch(self, cls: type) -> None:
        if not _is_of_interest(cls):
            return
        owner = next(base for base in cls.__mro__ if "__init__" in vars(base))
        # A class of its own that comes before nn.Module among the bases may hold the constructor. Protocols replace
        # theirs at the first call, and look for it by identity.
        if owner is not cls and (issubclass(owner, nn.Module) or getattr(owner, "_is_protocol", False)):
            return
        wrapped = self._originals.get(owner)
        if wrapped is not None and vars(owner)["__init__"] is wrapped[0]:
            return
        original = _Attribute(owner, "__init__")
        wrapper = self._wrap(original.value)
        try:
            owner.__init__ = wrapper
        except TypeError:  # a type written in C, whose constructor makes no parameters
            return
        self._originals[owner] = (wrapper, original)
        self._wrappers.add(wrapper)

    def _wrap(self, init: Any) -> Callable[..., None]:
        @functools.wraps(init)
        def construct(module: Any, *args: Any, **kwargs: Any) -> None:
            bound = init.__get__(module, type(module))  # a function, or another descriptor (partialmethod)
            if not _patches or id(module) in self._running or not _is_of_interest(type(module)):
                return bound(*args, **kwargs)
            resolved = type(module).__init__
            if resolved is construct:
                return self._run(module, bound, args, kwargs)
            if resolved not in self._wrappers:
                self._watch(type(module))  # from here on its class resolves to a wrapper: it is noted once
                self._late.append(module)
            return bound(*args, **kwargs)

        return construct

    def _run(self, module: nn.Module, init: Callable, args: tuple, kwargs: dict[str, Any]) -> None:
        waiting = len(self._late)
        self._running.add(id(module))
        try:
            init(*args, **kwargs)
        except BaseException:
            del self._late[waiting:]
            raise
        finally:
            self._running.discard(id(module))
        if _patches:
            self._report_late(_patches[-1], waiting)
            self._report(_patches[-1], module)

    def finish_late_modules(self, patch: ConstructionPatch, failed: bool) -> None:
        """The context of ``patch`` ends: what still waits is reported to it, or dropped."""
        if not failed and _patches[-1] is patch:
            self._report_late(patch, 0)
        elif failed:
            self._late.clear()

    def _report_late(self, patch: ConstructionPatch, waiting: int) -> None:
        late, self._late[waiting:] = self._late[waiting:], []
        for module in late:
            self._report(patch, module)

    def _report(self, patch: ConstructionPatch, module: nn.Module) -> None:
        if any(is_lazy(parameter) for parameter in module.parameters(recurse=False)):
            return
        outer, self.in_callback = self.in_callback, True
        try:
            patch.on_module_built(module)
        finally:
            self.in_callback = outer


_patches: list[ConstructionPatch] = []  # installed, innermost last
_lifted: list[list[ConstructionPatch]] = []  # one list per shutdown that waits for its restore
_dispatched: dict[Callable, Callable] = {}  # replacement of a constructor -> the function that it replaces
_construction = _Construction()
