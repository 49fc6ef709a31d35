# SPDX-License-Identifier: Apache-2.0
"""Leaf modules: those that ZeRO-3 gathers as one unit, with everything below them.

For modules that run different parts of themselves on different ranks or steps (mixtures of experts), where fetching
part by part would have ranks wait for each other. Mark them before ``deepspeed.initialize``, which sets the hooks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from torch import nn

from deepspeed.utils.logging import logger

if TYPE_CHECKING:
    from deepspeed.runtime.zero.leaf_module_config import DeepSpeedZeroLeafModuleConfig

_MARK = "_z3_leaf"


def z3_leaf_module(model: nn.Module) -> bool:
    """Whether this module is marked as a leaf."""
    return bool(getattr(model, _MARK, False))


def z3_leaf_parameter(model: nn.Parameter) -> bool:
    """Whether this parameter lay in a leaf module when that was marked."""
    return bool(getattr(model, _MARK, False))


def get_z3_leaf_modules(model: nn.Module) -> list[nn.Module]:
    """All marked modules of ``model``, itself included."""
    return [module for module in model.modules() if z3_leaf_module(module)]


def set_z3_leaf_module(model: nn.Module, flag: bool) -> None:
    """Mark this module, or with ``flag`` False take its mark away."""
    _mark(model, [model], flag)


def set_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: list[type] | list[str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Mark the modules of the given classes.

    Args:
        leaf_module_classes: classes, or their names, bare or with the module's path; instances of subclasses count.
        raise_if_not_found: raise if there is no such module at all. A class without an instance beside others that
            have some is named in a warning.

    Returns:
        The modules that were marked.

    Raises:
        ValueError: nothing was found.
        TypeError: an element is neither a class nor a string.
    """
    return _do_set_z3_leaf_modules(model, leaf_module_classes, True, raise_if_not_found)


def unset_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: list[type] | list[str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Take the marks of modules of the given classes away; as ``set_z3_leaf_modules``."""
    return _do_set_z3_leaf_modules(model, leaf_module_classes, False, raise_if_not_found)


def set_z3_leaf_modules_by_name(
    model: nn.Module, module_names: list[str], flag: bool = True, raise_if_not_found: bool = True
) -> tuple[list[nn.Module], list[str]]:
    """Mark, or with ``flag`` False unmark, modules by their names in ``model.named_modules()``.

    Returns:
        The modules, and the names that are none of the model's.

    Raises:
        ValueError: there is such a name, and ``raise_if_not_found``.
    """
    return _set_by(str.__eq__, "name", model, module_names, flag, raise_if_not_found)


def set_z3_leaf_modules_by_suffix(
    model: nn.Module, module_name_suffixes: list[str], flag: bool = True, raise_if_not_found: bool = True
) -> tuple[list[nn.Module], list[str]]:
    """Mark, or with ``flag`` False unmark, modules of which the name ends so; as ``set_z3_leaf_modules_by_name``."""
    return _set_by(str.endswith, "suffix", model, module_name_suffixes, flag, raise_if_not_found)


def apply_zero_leaf_module_config(model: nn.Module, leaf_cfg: DeepSpeedZeroLeafModuleConfig | None) -> list[nn.Module]:
    """Mark what the section ``zero_optimization.leaf_module`` names.

    What it names and the model does not have is warned about, except for the default classes.

    Returns:
        The modules that the section names, each once, in the model's order.
    """
    if leaf_cfg is None:
        return []
    from deepspeed.runtime.zero.leaf_module_config import DEFAULT_LEAF_MODULE_CLASSES

    found, missing = _of_classes(model, leaf_cfg.classes)
    unknown = [name for name in missing if name not in DEFAULT_LEAF_MODULE_CLASSES]
    _mark(model, found, True)
    for set_by, names in (
        (set_z3_leaf_modules_by_name, leaf_cfg.names),
        (set_z3_leaf_modules_by_suffix, leaf_cfg.name_suffixes),
    ):
        modules, missing = set_by(model, names, raise_if_not_found=False)
        found += modules
        unknown += missing
    if unknown:
        logger.warning(f"zero_optimization.leaf_module: {type(model).__name__} has no modules {unknown}")
    return [module for module in model.modules() if any(module is other for other in found)]


def _fully_qualified_class_name(module: nn.Module) -> str:
    return _path(type(module))


def _do_set_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: list[type] | list[str], flag: bool, raise_if_not_found: bool = True
) -> list[nn.Module]:
    for cls in leaf_module_classes:
        if not isinstance(cls, (type, str)):
            raise TypeError(f"leaf_module_classes holds classes or their names, got {cls!r}")
    found, missing = _of_classes(model, leaf_module_classes)
    if not found and raise_if_not_found:
        raise ValueError(f"{type(model).__name__} has no module of the classes {[_shown(cls) for cls in missing]}")
    if missing and raise_if_not_found:
        logger.warning(f"{type(model).__name__} has no module of the classes {[_shown(cls) for cls in missing]}")
    _mark(model, found, flag)
    return found


def _set_by(
    matches: Callable[[str, str], bool],
    kind: str,
    model: nn.Module,
    wanted: Sequence[str],
    flag: bool,
    raise_if_not_found: bool,
) -> tuple[list[nn.Module], list[str]]:
    named = [(name, module) for name, module in model.named_modules() if name]
    missing = [each for each in wanted if not any(matches(name, each) for name, _ in named)]
    if missing and raise_if_not_found:
        raise ValueError(f"{type(model).__name__} has no module with {kind} {missing}")
    found = [module for name, module in named if any(matches(name, each) for each in wanted)]
    _mark(model, found, flag)
    return found, missing


def _of_classes(model: nn.Module, classes: Sequence[type | str]) -> tuple[list[nn.Module], list[type | str]]:
    """Modules of the classes, and the classes that have none."""
    found: list[nn.Module] = []
    missing = list(classes)
    for module in model.modules():
        matching = [cls for cls in classes if _is_a(module, cls)]
        if matching:
            found.append(module)
            missing = [cls for cls in missing if cls not in matching]
    return found, missing


def _is_a(module: nn.Module, cls: type | str) -> bool:
    if isinstance(cls, type):
        return isinstance(module, cls)
    return any(cls in (base.__name__, _path(base)) for base in type(module).__mro__)


def _path(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def _shown(cls: type | str) -> str:
    return cls if isinstance(cls, str) else _path(cls)


def _mark(model: nn.Module, modules: Sequence[nn.Module], flag: bool) -> None:
    """Set the flag on modules of ``model``, and on the parameters below them what the marks left say."""
    for module in modules:
        setattr(module, _MARK, flag)
        for parameter in module.parameters():
            setattr(parameter, _MARK, flag)
    for leaf in get_z3_leaf_modules(model):
        for parameter in leaf.parameters():
            setattr(parameter, _MARK, True)
