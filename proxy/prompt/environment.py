"""jinja2's sandbox with a shorter way to what templates do for every message: fields, and methods of texts.

What a template may do and what it gets is the sandbox's own; only the way there is shorter. `message.role` on a dict
otherwise goes through an AttributeError first, then through checks that no plain value can fail.
"""

from types import BuiltinMethodType
from typing import Any

from jinja2.runtime import Context, LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

DICT_ATTRIBUTES = frozenset(dir(dict))
LOOP_ATTRIBUTES = frozenset(name for name in dir(LoopContext) if not name.startswith("_"))
TEXT_METHODS = frozenset(name for name in dir(str) if not name.startswith("_")) - {"format", "format_map"}
"""Without those that the sandbox replaces by its own."""


class FieldsFirst(ImmutableSandboxedEnvironment):
    """The sandbox with a short way to these fields."""

    def getattr(self, obj: Any, attribute: str) -> Any:
        kind = type(obj)
        if kind is dict and attribute not in DICT_ATTRIBUTES:
            if attribute in obj:
                return obj[attribute]
            return self.undefined(obj=obj, name=attribute)
        if (kind is LoopContext and attribute in LOOP_ATTRIBUTES) or (kind is str and attribute in TEXT_METHODS):
            return getattr(obj, attribute)
        if kind is Namespace and not attribute.startswith("_"):
            try:
                return getattr(obj, attribute)
            except AttributeError:
                return self.undefined(obj=obj, name=attribute)
        return super().getattr(obj, attribute)

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Calls of a macro and of a text's method are safe by what they are; the sandbox looks at every one anew."""
        kind = type(obj)
        if kind is Macro or (kind is BuiltinMethodType and type(obj.__self__) is str and obj.__name__ in TEXT_METHODS):
            for scope in ("_loop_vars", "_block_vars"):  # of the caller, for functions that ask for their context
                kwargs.pop(scope, None)
            return obj(context.eval_ctx, *args, **kwargs) if kind is Macro else obj(*args, **kwargs)
        return super().call(context, obj, *args, **kwargs)
