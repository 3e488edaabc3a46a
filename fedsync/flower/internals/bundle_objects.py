"""The parts of messages in a SuperLink's database, for the length of one bundle; see `one_transaction`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from sqlite3 import Cursor
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flwr.proto.message_pb2 import ObjectTree

Do = Callable[[str, Sequence[object]], Cursor]
"""Executes a statement with values where it has question marks, in the transaction that SQLAlchemy has begun."""


class BundleObjects:
    """The object store, within a transaction. What is not here is its own."""

    def __init__(self, store: Any, do: Do) -> None:
        self._store, self._do = store, do

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def __contains__(self, name: str) -> bool:
        return self._do("SELECT 1 FROM objects WHERE object_id = ?", [name]).fetchone() is not None

    def _children(self, name: str) -> list[str]:
        return [child for (child,) in self._do("SELECT child_id FROM object_children WHERE parent_id = ?", [name])]

    def get(self, name: str) -> bytes | None:
        found = self._do("SELECT content FROM objects WHERE object_id = ?", [name]).fetchone()
        return found[0] if found is not None else None

    def get_object_tree(self, name: str) -> ObjectTree:
        """See Flower's; parents have children that are there, by the database's own rule."""
        from flwr.proto.message_pb2 import ObjectTree
        from flwr.supercore.object_store import NoObjectInStoreError

        if name not in self:
            raise NoObjectInStoreError(f"Object {name} was not pre-registered.")
        tree: ObjectTree = self._tree(ObjectTree, name)
        return tree

    def _tree(self, kind: Any, name: str) -> Any:
        return kind(object_id=name, children=[self._tree(kind, child) for child in self._children(name)])

    def store(self, run: int, tree: ObjectTree, came: Mapping[str, bytes]) -> list[str]:
        """Store a message's parts, all of which came; returns the names of those that were not there.

        Raises:
            ValueError: a part is not what its name says.
        """
        from flwr.supercore.inflatable.inflatable_object import iterate_object_tree
        from flwr.supercore.utils import uint64_to_int64

        missing = []
        for part in iterate_object_tree(tree):
            name, content = part.object_id, came[part.object_id]
            children = [child.object_id for child in part.children]
            insert = "INSERT INTO objects (object_id, content, is_available, ref_count) VALUES (?, ?, 1, 0)"
            added = self._do(f"{insert} ON CONFLICT DO NOTHING", [name, content]).rowcount
            if added:
                for child in children:
                    self._do("INSERT INTO object_children (parent_id, child_id) VALUES (?, ?)", [name, child])
                    self._do("UPDATE objects SET ref_count = ref_count + 1 WHERE object_id = ?", [child])
            elif set(children) != set(self._children(name)):
                raise ValueError(f"object {name} was announced with other children")
            else:
                fill = "UPDATE objects SET content = ?, is_available = 1 WHERE object_id = ? AND is_available = 0"
                added = self._do(fill, [content, name]).rowcount
            if added:
                _check(name, content)
                missing.append(name)
            mapped = "INSERT INTO run_objects (run_id, object_id) VALUES (?, ?) ON CONFLICT DO NOTHING"
            self._do(mapped, [uint64_to_int64(run), name])
        # A session of before in which not all of the message came.
        roots = "SELECT session_id FROM object_push_session_roots WHERE root_object_id = ?"
        self._do(f"DELETE FROM object_push_sessions WHERE session_id IN ({roots})", [tree.object_id])
        return missing

    def delete(self, name: str) -> None:
        """Remove a part that is no other's, and those that were its alone."""
        found = self._do("SELECT 1 FROM objects WHERE object_id = ? AND ref_count = 0", [name]).fetchone()
        if found is None:
            return
        children = self._children(name)
        self._do("DELETE FROM objects WHERE object_id = ?", [name])
        for child in children:
            self._do("UPDATE objects SET ref_count = ref_count - 1 WHERE object_id = ? AND ref_count > 0", [child])
            self.delete(child)

    def count(self, run: int, sent: float, received: float, runtime: float) -> None:
        """Add to what a run's messages took."""
        from flwr.supercore.utils import uint64_to_int64

        added = "bytes_sent = bytes_sent + ?, bytes_recv = bytes_recv + ?, clientapp_runtime = clientapp_runtime + ?"
        self._do(f"UPDATE run SET {added} WHERE run_id = ?", [sent, received, runtime, uint64_to_int64(run)])


def _check(name: str, content: bytes) -> None:
    """As Flower's object store checks what it is given."""
    from flwr.supercore.inflatable.inflatable_object import get_object_id
    from flwr.supercore.inflatable.inflatable_utils import validate_object_content

    if get_object_id(content) != name:
        raise ValueError(f"object {name} is another")
    validate_object_content(content)
