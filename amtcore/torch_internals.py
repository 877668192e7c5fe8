"""Names that torch keeps to itself, in one place, each with the reason why we need it.

The rest of `amtcore` uses torch by its public names. Names of attributes are given to `getattr`,
which costs no Python call where a model is called and which `torch.compile` can trace. All of them
are covered by tests of hooks, saving, loading and conversion: a release of torch that renames one
fails there.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn.modules import module as torch_module

#: Buffers of a module by name, None included. `named_buffers` leaves None out, but
#: `torch.func.functional_call` puts a learnt constant into its empty place for the time of a call.
BUFFERS = "_buffers"
#: Parameters of a module by name. `named_parameters` is a generator over all names.
PARAMETERS = "_parameters"
#: Submodules by name, None included: a stage that a model was built without may be assigned later.
MODULES = "_modules"
#: Names of the buffers that `state_dict` leaves out; torch does not tell them otherwise.
UNSAVED_BUFFERS = "_non_persistent_buffers_set"
#: Hooks of a module. Torch can add and remove hooks, but not say whether there are any.
BACKWARD_HOOKS, BACKWARD_PRE_HOOKS = "_backward_hooks", "_backward_pre_hooks"
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", BACKWARD_PRE_HOOKS, BACKWARD_HOOKS)
#: Hooks of all modules: the dictionaries that torch changes in place.
GLOBAL_BACKWARD_HOOKS = (
    torch_module._global_backward_pre_hooks,
    torch_module._global_backward_hooks,
)
_GLOBAL_HOOKS = (
    *GLOBAL_BACKWARD_HOOKS,
    torch_module._global_forward_pre_hooks,
    torch_module._global_forward_hooks,
)
_VERSION = "_version"
#: The module of torch's compiler: in `sys.modules` once somebody compiles. To ask torch imports it.
COMPILER = "torch._dynamo"


def has_hooks(module: nn.Module) -> bool:
    """Return True if a call of the module, or of a module inside it, runs hooks of their own."""
    return any(getattr(each, hooks) for each in module.modules() for hooks in _HOOKS)


def has_any_hooks(module: nn.Module) -> bool:
    """Return True if a call of the module runs hooks, including hooks of all modules."""
    return any(_GLOBAL_HOOKS) or has_hooks(module)


def version_of(tensor: Tensor) -> int:
    """Return how often torch has counted a change of a tensor in place.

    Autograd counts these changes for its own checks. Tables that follow from a constant are made
    again when its count has changed. Tensors of inference mode have no count.
    """
    return 0 if tensor.is_inference() else getattr(tensor, _VERSION)


class Module(nn.Module):
    """An `nn.Module` whose conversion, saving and loading can be overridden by public names.

    Torch's public hooks run after a conversion to another type is done, and on the state dict of
    all modules. We refuse a conversion before it begins, and save and load per module.
    """

    def convert(self, fn: Any, recurse: bool) -> Any:
        """Apply a conversion, such as `.to` or `.half`, to all tensors. Returns the module."""
        return super()._apply(fn, recurse)

    def save_own(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        """Put the module's own tensors into a state dict, without its submodules' tensors."""
        super()._save_to_state_dict(destination, prefix, keep_vars)

    def load_own(self, *args: Any) -> None:
        """Take the module's own tensors from a state dict; arguments as torch passes them."""
        super()._load_from_state_dict(*args)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        return self.convert(fn, recurse)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        self.save_own(destination, prefix, keep_vars)

    def _load_from_state_dict(self, *args: Any) -> None:
        self.load_own(*args)
