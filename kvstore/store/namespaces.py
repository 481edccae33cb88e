"""The namespaces that this store knows, by id and by the small number that the index keeps."""

from collections.abc import Iterator

from kvstore.errors import InvalidRequest, UnknownNamespace
from kvstore.namespace import Layout, Namespace, namespace_id
from kvstore.tiers.frame import frame_bytes


class Namespaces:
    """Numbers count up from 0 and are never reused. `frame_bytes_max`: what the smallest tier can
    hold in one piece. `namespaces_max`: more are refused. `secret`: mixed into tenants' ids."""

    def __init__(self, namespaces_max: int, frame_bytes_max: int, secret: bytes) -> None:
        self._max, self._frame_bytes_max, self._secret = namespaces_max, frame_bytes_max, secret
        self.ids: list[bytes] = []
        self._known: list[Namespace | None] = []
        self._frame_bytes: list[int] = []
        self._number: dict[bytes, int] = {}

    def __len__(self) -> int:
        return len(self.ids)

    def __iter__(self) -> Iterator[tuple[int, bytes, Namespace | None]]:
        yield from zip(range(len(self.ids)), self.ids, self._known, strict=True)

    def open(self, namespace: Namespace) -> tuple[bytes, bool]:
        """Its id, and whether its descriptor is news.

        Raises `InvalidRequest` where a block would fit no slot or no segment, or where the store
        has as many namespaces as it may.
        """
        total = frame_bytes(namespace.layout.section_bytes).total
        if total > self._frame_bytes_max:
            raise InvalidRequest(
                f"a block of {namespace.layout.block_bytes} B takes {total} B, and this store "
                f"holds at most {self._frame_bytes_max} B in one piece; raise dram.budget_bytes "
                "or ssd.segment_bytes"
            )
        ns_id = namespace_id(namespace, self._secret)
        number = self._number.get(ns_id)
        if number is not None and self._known[number] is not None:
            return ns_id, False
        if number is None:
            if len(self.ids) >= self._max:
                raise InvalidRequest(
                    f"the store has {self._max} namespaces, the most allowed "
                    "(limits.namespaces_max)"
                )
            number = self.add(ns_id, None)
        self._known[number] = namespace
        self._frame_bytes[number] = total
        return ns_id, True

    def add(self, ns_id: bytes, namespace: Namespace | None) -> int:
        """A namespace found on disk: its number. None: only its id is known as yet."""
        self._number[ns_id] = number = len(self.ids)
        self.ids.append(ns_id)
        self._known.append(namespace)
        self._frame_bytes.append(
            frame_bytes(namespace.layout.section_bytes).total if namespace else 0
        )
        return number

    def number(self, ns_id: bytes) -> int:
        """Raises `UnknownNamespace` where it was never opened here."""
        number = self._number.get(ns_id)
        if number is None or self._known[number] is None:
            raise UnknownNamespace(
                f"namespace {bytes(ns_id).hex()} is not open here; call open_namespace first"
            )
        return number

    def namespace(self, number: int) -> Namespace:
        """The descriptor. Only for numbers that `number` gave."""
        namespace = self._known[number]
        assert namespace is not None
        return namespace

    def layout(self, number: int) -> Layout:
        """The record layout. Only for numbers that `number` gave."""
        return self.namespace(number).layout

    def frame_bytes(self, number: int) -> int:
        """Bytes that one block takes on a tier; 0 where the layout is not known."""
        return self._frame_bytes[number]

    def payload_bytes(self) -> list[int]:
        """Section bytes of one block, by number; 0 where the layout is not known."""
        return [ns.layout.block_bytes if ns else 0 for ns in self._known]
