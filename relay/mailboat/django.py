"""A Django migration operation that creates the outbox.

    class Migration(migrations.Migration):
        operations = [mailboat.django.MigrateOutbox()]

The schema ``mailboat`` is migrated through a connection of its own (psycopg 3) to the database that Django migrates. To
upgrade it with a later version of Mailboat, add the operation to a new migration.
"""

from typing import Any

from django.db.migrations.operations.base import Operation

from mailboat.store.schema.migrate import migrate


class MigrateOutbox(Operation):  # type: ignore[misc]  # Django has no types
    """Create or upgrade the outbox. Reversing it changes nothing: it would delete events."""

    reversible = True
    reduces_to_sql = False
    atomic = False

    def __init__(self, outbox: str = "mailboat.outbox") -> None:
        self.outbox = outbox

    def state_forwards(self, app_label: str, state: Any) -> None:
        """The outbox is no model: the state of models does not change."""

    def database_forwards(self, app_label: str, schema_editor: Any, from_state: Any, to_state: Any) -> None:
        if schema_editor.connection.vendor == "postgresql":
            migrate(schema_editor.connection, self.outbox)

    def database_backwards(self, app_label: str, schema_editor: Any, from_state: Any, to_state: Any) -> None:
        """Keep the outbox and its events."""

    def describe(self) -> str:
        return f"Create or upgrade the Mailboat outbox {self.outbox}"
