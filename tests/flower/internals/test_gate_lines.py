"""Whose connection goes when there are too many."""

from fedsync.flower.internals.lines import MOST_OF_ONE, OWN_FILES, TRUSTED, Line, Lines, most_lines


class Cut:
    """Connections by name, and which were ended."""

    def __init__(self, most: int, per_address: int) -> None:
        self.table = Lines(most, per_address)
        self.ended: list[str] = []

    def admit(self, name: str, address: str = "a") -> Line | None:
        return self.table.admit(address, lambda: self.ended.append(name))


def test_the_oldest_stranger_makes_room() -> None:
    cut = Cut(3, 0)
    lines = [cut.admit(name) for name in "123"]
    assert lines[0] is not None and lines[0].belongs_to(7)
    assert cut.admit("4") is not None and cut.ended == ["2"], "a silo stays"
    assert len(cut.table) == 3


def test_there_is_no_room_where_all_are_known() -> None:
    cut = Cut(2, 0)
    for owner in (TRUSTED, 7):
        line = cut.admit(str(owner))
        assert line is not None and line.belongs_to(owner)
    assert cut.admit("x") is None and not cut.ended and not cut.table.cut_oldest()


def test_an_address_has_so_many_strangers() -> None:
    cut = Cut(10, 2)
    first = cut.admit("1", "a")
    cut.admit("2", "b")
    assert first is not None and first.belongs_to(7), "whose it is counts no more for its address"
    for name in "345":
        assert cut.admit(name, "a") is not None
    assert cut.ended == ["3"]
    cut = Cut(10, 0)
    assert all(cut.admit(str(number), "a") for number in range(10)) and not cut.ended, "all come through a proxy"


def test_a_silo_has_so_many_connections_and_its_oldest_idle_one_makes_room() -> None:
    cut = Cut(100, 0)
    lines = [cut.admit(str(number)) for number in range(MOST_OF_ONE + 2)]
    for line in lines[:MOST_OF_ONE]:
        assert line is not None and line.belongs_to(7)
        line.busy = line is not lines[3]
    assert lines[-1] is not None and lines[-2] is not None
    assert lines[-1].belongs_to(7) and cut.ended == ["3"]
    lines[-1].busy = True
    assert not lines[-2].belongs_to(7), "all are at work"
    assert lines[-2].belongs_to(8) and lines[0] is not None and lines[0].belongs_to(7)
    for number in range(2 * MOST_OF_ONE):
        line = cut.admit(f"own {number}")
        assert line is not None and line.belongs_to(TRUSTED), "the server's own programs may have any number"


def test_what_ends_is_counted_no_more_and_once() -> None:
    cut = Cut(2, 2)
    first, second = cut.admit("1"), cut.admit("2")
    assert first is not None and second is not None and second.belongs_to(7)
    for _ in range(2):
        first.release()
        second.release()
    assert len(cut.table) == 0 and cut.admit("3") and cut.admit("4") and not cut.ended
    gone = cut.admit("5")
    assert cut.ended == ["3"] and gone is not None
    gone.release()
    assert gone.belongs_to(7) and len(cut.table) == 1, "it is gone: whose it was makes no difference"


def test_connections_are_files() -> None:
    assert most_lines(1000, 65536) == 1000
    assert most_lines(1000, 256) == 256 - OWN_FILES
    assert most_lines(1000, 10) == 1
