"""Mailboat: carries a PostgreSQL transactional outbox to the outside world."""
