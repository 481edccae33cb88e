"""Who touches the bytes of one tier's slots: a slot goes back when the last of them is done."""

from collections.abc import Callable, Iterable, Sequence

from kvstore.tiers.base import PoolTier, Slot


class SlotUsers:
    """Users by a slot's first page. `changed` is called whenever a slot may have become free or
    evictable."""

    def __init__(self, tier: PoolTier, changed: Callable[[], None]) -> None:
        self._tier, self._changed = tier, changed
        self._users: dict[int, int] = {}
        self._orphaned: dict[int, Slot] = {}
        self._abandoned: list[Slot] = []

    def __len__(self) -> int:
        """Slots whose bytes somebody touches now."""
        return len(self._users)

    def __contains__(self, page: object) -> bool:
        """Whether somebody touches the bytes of the slot that starts at `page`."""
        return page in self._users

    def use(self, slot: Slot) -> None:
        """Somebody touches the slot's bytes until `end_use`."""
        self._users[slot.page] = self._users.get(slot.page, 0) + 1

    def end_use(self, slot: Slot) -> None:
        """One user fewer; an orphaned slot goes back with the last."""
        self.end_use_all((slot.page,))

    def use_all(self, pages: Sequence[int]) -> None:
        """`use`, for slots named by their pages."""
        users = self._users
        for page in pages:
            users[page] = users.get(page, 0) + 1

    def end_use_all(self, pages: Sequence[int]) -> None:
        """`end_use`, for slots named by their pages."""
        users, orphaned = self._users, self._orphaned
        for page in pages:
            left = users[page] - 1
            if left:
                users[page] = left
                continue
            del users[page]
            slot = orphaned.pop(page, None)
            if slot is not None:
                self._tier.free(slot)
        if pages:
            self._changed()

    def free(self, slot: Slot) -> None:
        """Nobody owns the slot any more: free it, now or after its last user."""
        if slot.page in self._users:
            self._orphaned[slot.page] = slot
        else:
            self._tier.free(slot)
        self._changed()

    def abandon(self, slot: Slot) -> None:
        """Nobody owns the slot, and a device may still write to it at any time: never free it."""
        self._abandoned.append(slot)

    def check_integrity(self, owned: Iterable[Slot]) -> None:
        """Raise `AssertionError` where slots handed out and their owners disagree. `owned`: slots
        that a block, a reservation or a transfer owns."""
        slots = [*owned, *self._orphaned.values(), *self._abandoned]
        pages = {slot.page for slot in slots}
        assert len(pages) == len(slots), "two owners share a slot"
        held = sum(slot.length for slot in slots)
        used = self._tier.used_bytes
        assert held == used, f"slots of {held} B have owners, the tier gave out {used} B"
        assert self._users.keys() <= pages, "a user reads a slot that was freed"
        assert used <= self._tier.budget_bytes, "a tier is over its budget"
        self._tier.check_integrity()
