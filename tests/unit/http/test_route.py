"""Routes find the objects that answer by class, and no object takes the place of another."""

from __future__ import annotations

import pytest

from balance_service.errors import ConfigurationError
from balance_service.http.commands import CommandHandler
from balance_service.http.route import Handlers


class Appends(CommandHandler):
    """A handler: an application might make one for each of two topics."""

    def close(self) -> None:
        pass


class AppendsMore(Appends):
    """Would be found in the place of its base class."""


class Base:
    """The common part of several handlers."""


class First(Base):
    pass


class Second(Base):
    pass


@pytest.mark.parametrize("classes", [(Appends, Appends), (Appends, AppendsMore), (AppendsMore, Appends)])
def test_two_handlers_that_routes_cannot_tell_apart_are_refused(classes: tuple[type, type]) -> None:
    first, second = (kind() for kind in classes)

    handlers = Handlers(first)

    with pytest.raises(ConfigurationError, match="two handlers are of class Appends, "):
        handlers.add(second)


def test_handlers_are_found_by_class_and_by_the_base_class_of_one() -> None:
    first, second, more = First(), Second(), AppendsMore()
    handlers = Handlers(first, second, more)

    assert (handlers.of(First), handlers.of(Second), handlers.of(Appends)) == (first, second, more)
    with pytest.raises(ConfigurationError, match="several handlers derive from Base;"):
        handlers.of(Base)
