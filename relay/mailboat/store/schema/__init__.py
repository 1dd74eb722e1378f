"""The schema of an outbox: migration, verification, migration scripts, and time partitions."""
