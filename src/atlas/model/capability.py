"""How a model says that it cannot do something: a group is None, or a member refuses."""

from __future__ import annotations

from typing import NoReturn, TypeVar

from atlas.errors import CapabilityError

Group = TypeVar("Group")


def require(group: Group | None, name: str) -> Group:
    """Return ``group``, or raise when the model lacks it.

    Call it while an engine is configured, so that a missing capability is reported before the
    first step and type checkers see a group that is not None afterwards.

    Parameters
    ----------
    group
        An attribute of a :class:`atlas.model.Model`, for example ``model.ssm``.
    name
        What the message calls it, for example ``"ssm"``.

    Raises
    ------
    CapabilityError
        If ``group`` is None.
    """
    if group is None:
        raise CapabilityError(f"this model on this backend has no {name!r} group")
    return group


def unavailable(group: str, method: str) -> CapabilityError:
    """Build the error of a member that exists in its group but not for this model or backend."""
    return CapabilityError(f"model.{group}.{method} is not available for this model and backend")


class Unavailable:
    """A method of a group that this implementation does not offer; calling it raises.

    It stands as a class attribute in the method's place and takes the method's name from there::

        class DenseForward(ModelForward):
            prefill_twophase = Unavailable("forward")

    Facts are not methods: where a capability is missing they are False, 0 or None, and a plain
    class attribute (``hc_mult = 0``) is enough.
    """

    __slots__ = ("group", "method")

    def __init__(self, group: str) -> None:
        self.group = group
        self.method = "?"

    def __set_name__(self, owner: type, name: str) -> None:
        self.method = name

    def __call__(self, *args: object, **kwargs: object) -> NoReturn:
        """Raise :class:`CapabilityError`, whatever the arguments."""
        raise unavailable(self.group, self.method)

    def __repr__(self) -> str:
        return f"<model.{self.group}.{self.method}: not available>"
