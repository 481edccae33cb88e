"""Who waits for which blocks to become durable."""


class Ticket:
    """A promise about blocks: `waiting` empties as they become durable. `lost` counts those that
    left the store before: they will never be. `refused`: those that the SSD did not take."""

    __slots__ = ("lost", "refused", "waiting")

    def __init__(self, rows: set[int]) -> None:
        self.waiting = rows
        self.lost = self.refused = 0

    @property
    def settled(self) -> bool:
        """Whether nothing is waited for any more."""
        return not self.waiting


class Tickets:
    """All open tickets by row."""

    def __init__(self) -> None:
        self._by_row: dict[int, list[Ticket]] = {}

    def open(self, rows: set[int]) -> Ticket:
        """A ticket for rows that are dirty now."""
        ticket = Ticket(rows)
        for row in rows:
            self._by_row.setdefault(row, []).append(ticket)
        return ticket

    def wanted(self, row: int) -> bool:
        """Whether anybody waits for the row."""
        return row in self._by_row

    def close(self, ticket: Ticket) -> None:
        """Nobody waits for it any more."""
        for row in ticket.waiting:
            tickets = self._by_row[row]
            tickets.remove(ticket)
            if not tickets:
                del self._by_row[row]
        ticket.waiting = set()

    def durable(self, row: int) -> None:
        """The row's block is on SSD."""
        for ticket in self._by_row.pop(row, ()):
            ticket.waiting.discard(row)

    def refused(self, row: int) -> None:
        """The SSD does not take the row's block, for now: nobody is to wait for it."""
        for ticket in self._by_row.pop(row, ()):
            ticket.waiting.discard(row)
            ticket.refused += 1

    def lost(self, row: int) -> None:
        """The row's block left the store."""
        for ticket in self._by_row.pop(row, ()):
            ticket.waiting.discard(row)
            ticket.lost += 1
