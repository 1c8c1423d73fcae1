"""Which connections a server keeps when many are open."""

from __future__ import annotations

from balance_service.http.server.listening import Slot, Slots


class Server:
    """A hundred and sixty places, ten of them reserved, and a clock that the test moves."""

    def __init__(self, trusted_proxies: tuple[str, ...] = ()) -> None:
        self.time = 0.0
        self.cut: list[Slot] = []
        self.places = Slots(160, trusted_proxies, lambda: self.time)

    def take(self, address: str) -> Slot | None:
        self.time += 1
        place = self.places.take(address)
        if place is not None:
            place.close_now = lambda: self.cut.append(place)
        return place

    def take_all(self, count: int, address: str = "10.{}.0.1", *, busy: bool = False) -> list[Slot]:
        """Slots for as many connections, each of another address if that has room for a number."""
        taken = [self.take(address.format(number)) for number in range(count)]
        places = [place for place in taken if place is not None]
        assert len(places) == count
        for place in places:
            if busy:
                place.idle_since = None
        return places


def test_one_address_has_what_it_wants_while_there_is_room() -> None:
    server = Server()

    server.take_all(113, "10.0.0.1")

    assert server.cut == []


def test_of_one_address_with_its_share_the_longest_idle_connection_makes_room_for_its_next() -> None:
    server = Server()
    others = server.take_all(80)
    own = server.take_all(37, "192.0.2.1")

    server.take_all(2, "192.0.2.1")

    assert server.cut == own[:2]
    assert len(server.places) == 117
    assert not set(others).intersection(server.cut)


def test_one_address_whose_connections_are_all_busy_gets_no_more_than_its_share() -> None:
    server = Server()
    server.take_all(80)
    server.take_all(37, "192.0.2.1", busy=True)

    assert server.take("192.0.2.1") is None
    assert server.take("198.51.100.1") is not None
    assert server.cut == []


def test_addresses_of_one_ipv6_site_are_one_client() -> None:
    server = Server()
    server.take_all(113, "2001:db8::{}")

    assert server.take("2001:db8::ffff") is not None
    assert len(server.cut) == 1


def test_when_all_is_full_the_connection_that_is_idle_longest_makes_room() -> None:
    server = Server()
    places = server.take_all(150)
    places[0].idle_since = server.time
    places[1].idle_since = None

    newcomer = server.take("198.51.100.1")

    assert newcomer is not None
    assert not newcomer.is_reserved
    assert server.cut == [places[2]]


def test_a_connection_that_was_used_since_it_was_found_idle_is_not_closed() -> None:
    server = Server()
    places = server.take_all(150)
    server.take("198.51.100.1")
    places[1].idle_since = server.time

    server.take("198.51.100.2")

    assert server.cut == [places[0], places[2]]


def test_when_all_are_busy_the_reserved_places_are_taken_and_then_no_more() -> None:
    server = Server()
    server.take_all(150, busy=True)

    reserved = server.take_all(10, "198.51.{}.1", busy=True)

    assert all(place.is_reserved for place in reserved)
    assert server.take("203.0.113.1") is None


def test_a_silent_connection_in_a_reserved_place_makes_room_for_the_next() -> None:
    server = Server()
    server.take_all(150, busy=True)
    silent = server.take_all(10, "198.51.{}.1")
    assert server.cut == []

    assert server.take("203.0.113.1") is not None
    assert server.cut == silent[:1]


def test_a_trusted_proxy_has_no_share() -> None:
    server = Server(("192.0.2.0/24",))

    server.take_all(150, "192.0.2.7")

    assert server.cut == []
    # Mapped into IPv6, as a socket of both families has it.
    server.take_all(1, "::ffff:192.0.2.7")
    assert len(server.cut) == 1


def test_connections_that_show_a_token_count_for_its_holder_and_for_their_address_no_more() -> None:
    server = Server()
    for place in server.take_all(112, "192.0.2.1"):
        server.places.attribute(place, "token:billing")

    server.take_all(20, "192.0.2.1")

    assert server.cut == []


def test_of_a_token_with_its_share_the_longest_idle_connection_makes_room_for_the_next() -> None:
    server = Server(("192.0.2.1",))
    places = server.take_all(120, "192.0.2.1")
    for place in places[:37]:
        server.places.attribute(place, "token:billing")

    server.places.attribute(places[60], "token:billing")

    assert server.cut == [places[0]]
    assert len(server.places) == 119


def test_a_place_may_be_given_up_twice_and_is_there_again() -> None:
    server = Server()
    places = server.take_all(150, busy=True)

    server.places.release(places[0])
    server.places.release(places[0])

    newcomer = server.take("198.51.100.1")
    assert newcomer is not None
    assert not newcomer.is_reserved
    assert len(server.places) == 150


def test_where_there_are_fewer_places_than_before_the_connections_that_are_idle_longest_are_closed() -> None:
    server = Server()
    busy, idle = server.take_all(10, busy=True), server.take_all(10, "198.51.{}.1")

    server.places.resize(16)

    assert server.cut == idle[:5]
    server.places.resize(2)
    assert server.cut == idle
    assert len(server.places) == len(busy)
